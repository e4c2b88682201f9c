"""The selection for an output: the sections or names that the user asked for, and the contents chosen from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import UsageError
from ckptools.formats.shared.merge import empty_like
from ckptools.keys.entries import pattern
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.provenance import Filled
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of, tensors_in, walk
from ckptools.model.values import Global, Lost, NumpyArray, Opaque
from ckptools.text import plural
from ckptools.training_state.sections import Section, sections_of, sections_of_kind

FILLS = ("nan", "zero")
"""The values that can fill a hole."""

ONLY = ("model", "optimizer", "all")


@dataclass
class OutputContents:
    """The contents of an output.

    Attributes:
        tree: the subtree to write; its tensors have exactly one shard per region.
        model_paths: key paths of the tensors that belong to a model, for `--dtype`.
        left_out: key paths that are not written, with the reason.
        missing: tensors with holes by key path, with the regions that are in no file.
        filled: `nan` or `zero` if holes are filled; empty if such tensors are left out.
        notes: notes for the user that are no problems.
        places: every section to write, with its key path in `tree`.
        source: the checkpoint that it was chosen from.
        renamed: every name of the model with its new one; empty without renaming.
        part: the requested part: `model`, `optimizer`, `all` or a glob.
        lost: key paths that are left out because the source has lost them.
        carried: tensors with values that were filled in when the source was written, by key path.
        passed_over: errors of the source about parts to write that leave neither a gap nor a name.
        with_record: whether the output gets a record of its source.
    """

    tree: Any
    model_paths: frozenset[KeyPath] = frozenset()
    left_out: dict[KeyPath, str] = field(default_factory=dict)
    missing: dict[KeyPath, tuple[Box, ...]] = field(default_factory=dict)
    filled: str = ""
    notes: list[str] = field(default_factory=list)
    places: tuple[tuple[Section, KeyPath], ...] = ()
    source: Checkpoint | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    part: str = "all"
    lost: frozenset[KeyPath] = frozenset()
    carried: dict[KeyPath, Filled] = field(default_factory=dict)
    passed_over: tuple[Problem, ...] = ()
    with_record: bool = True

    def moved(self, move: Callable[[KeyPath], KeyPath]) -> OutputContents:
        """Map all key paths of the selection; the caller maps the tree."""
        return replace(
            self,
            left_out={move(path): why for path, why in self.left_out.items()},
            missing={move(path): boxes for path, boxes in self.missing.items()},
            lost=frozenset(map(move, self.lost)),
            carried={move(path): filled for path, filled in self.carried.items()},
        )


def tensors_of(checkpoint: Checkpoint, only: str) -> Iterator[tuple[str, Tensor]]:
    """Fqn and tensor of everything that `only` selects, as in `select`.

    Raises:
        UsageError: there is no such section.
    """
    for section in sections_to_write(checkpoint, only).values():
        yield from ((fqn_of((*section.path, *path)), tensor) for path, tensor in tensors_in(section.value))


def sections_to_write(checkpoint: Checkpoint, only: str) -> dict[str, Section]:
    """The sections to write by their name in the output; a single section has no name there."""
    if not isinstance(only, str):
        raise UsageError(checkpoint.path, f"--only {only!r}: expected a name or a glob")
    if only == "all":
        return {"": Section("other", "", (), checkpoint.tree)}
    if only not in ONLY:
        return {"" if len(some) == 1 else s.name: s for some in [_matching(checkpoint, only)] for s in some}
    found = sections_of_kind(checkpoint, only)
    if not found:
        here = ", ".join(sorted({s.kind for s in sections_of(checkpoint)})) or "nothing"
        raise UsageError(checkpoint.path, f"holds no {only}; it holds {here}")
    return {"": found[0]} if len(found) == 1 else {s.name: s for s in found}


def _matching(checkpoint: Checkpoint, glob: str) -> list[Section]:
    """The models of a checkpoint with the names that match a glob, alone or after the name of their section.

    Raises:
        UsageError: there are none.
    """
    wanted = pattern((glob,))
    found = []
    for section in sections_of_kind(checkpoint, "model"):
        kept = empty_like(section.value)
        for key, value in section.value.items():
            if wanted.fullmatch(key) or wanted.fullmatch(f"{section.name}.{key}"):
                kept[key] = value
        found += [section._replace(value=kept)] if kept else []
    if not found:
        text = f"--only {glob}: choose one of {', '.join(ONLY)}; or a glob that names of the model match"
        raise UsageError(checkpoint.path, text)
    return found


def _prefixes(section: Section, only: str) -> list[str]:
    """The beginnings of the names of a section's tensors in the output."""
    return [fqn_of(section.path)] if only in ONLY else [fqn_of((*section.path, key)) for key in section.value]


def concerns(problem: Problem, parts: Iterable[Section], only: str) -> bool:
    """Whether a problem is about a part to write."""
    if problem.tensor is None or problem.kind is Code.MIXED_SAVES:
        return True
    prefixes = [prefix for section in parts for prefix in _prefixes(section, only)]
    return any(not p or problem.tensor == p or problem.tensor.startswith(p + ".") for p in prefixes)


def note_on_glob(checkpoint: Checkpoint, parts: Iterable[Section], glob: str) -> list[str]:
    """Note the number of names that match a glob."""
    written = sum(len(part.value) for part in parts)
    others = sum(len(section.value) for section in sections_of_kind(checkpoint, "model")) - written
    return [f"--only {glob}: {plural(written, 'name')} of the model, without {plural(others, 'other')}"]


# -- foreign ----------------------------------------------------------------------------------------------------------


def why_foreign(node: Any) -> str:
    """Why a leaf is not written; empty when it is."""
    if isinstance(node, Opaque):
        return node.name if isinstance(node, Lost) else f"an object of class {node.name}"
    if isinstance(node, (set, frozenset)) and is_foreign(node):
        return "a set of foreign objects"
    if isinstance(node, NumpyArray) and node.dtype == "|O":
        return "a numpy array of Python objects"
    if isinstance(node, Global) and not (node.module == "torch" and node.name in ITEMSIZE):
        return f"the name {node.dotted}"
    return ""


def is_foreign(node: Any) -> bool:
    """Whether a key or a set is or contains an object that is not rebuilt."""
    if isinstance(node, (tuple, set, frozenset)):
        return any(map(is_foreign, node))
    return isinstance(node, Opaque)


def without_attributes(node: Any) -> Any:
    """Copy plain values without attributes of their dicts, such as `_metadata`."""
    if isinstance(node, dict):
        made: dict[Any, Any] = OrderedDict() if isinstance(node, OrderedDict) else {}
        made.update((key, without_attributes(value)) for key, value in node.items())
        return made
    return type(node)(map(without_attributes, node)) if type(node) in (list, tuple) else node


def is_plain(tree: Any) -> bool:
    """Whether a tree has only values of Python's own types."""
    return all(
        isinstance(leaf, (str, bytes, int, float, type(None), dict, list, tuple))
        and not any(isinstance(key, Opaque) for key in path)
        for path, leaf in walk(tree)
    )
