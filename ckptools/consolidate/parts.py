"""Which part of a checkpoint is written: its model, its optimizer, all of it, or the names that match a glob."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptools.contents.selection import pattern
from ckptools.errors import UsageError
from ckptools.formats.shared.merge import empty_like
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import fqn_of, tensors_in
from ckptools.text import plural
from ckptools.training_state.sections import Section, sections_of, sections_of_kind

ONLY = ("model", "optimizer", "all")


def tensors_of(checkpoint: Checkpoint, only: str) -> Iterator[tuple[str, Tensor]]:
    """Fqn and tensor of all that `only` names, as `select` does.

    Raises:
        UsageError: there is no such section.
    """
    for section in sections_to_write(checkpoint, only).values():
        yield from ((fqn_of((*section.path, *path)), tensor) for path, tensor in tensors_in(section.value))


def sections_to_write(checkpoint: Checkpoint, only: str) -> dict[str, Section]:
    """The parts to write, by their name in the output; one part alone has no name there."""
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
    """The models of a checkpoint with the names that match a glob, on their own or behind the name of their section.

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
    """What the names begin with of the tensors that are written of a section."""
    return [fqn_of(section.path)] if only in ONLY else [fqn_of((*section.path, key)) for key in section.value]


def concerns(problem: Problem, parts: Iterable[Section], only: str) -> bool:
    """Whether a problem is about what is going to be written."""
    if problem.tensor is None or problem.kind is Code.MIXED_SAVES:
        return True
    prefixes = [prefix for section in parts for prefix in _prefixes(section, only)]
    return any(not p or problem.tensor == p or problem.tensor.startswith(p + ".") for p in prefixes)


def note_on_glob(checkpoint: Checkpoint, parts: Iterable[Section], glob: str) -> list[str]:
    """The note on how many names a glob has chosen."""
    written = sum(len(part.value) for part in parts)
    others = sum(len(section.value) for section in sections_of_kind(checkpoint, "model")) - written
    return [f"--only {glob}: {plural(written, 'name')} of the model, without {plural(others, 'other')}"]
