"""Copy a checkpoint's tree for an output: choose one shard per region, note left-out values and every problem."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptools.consolidate.options import FILLS, ConsolidateOptions, hole_rule
from ckptools.consolidate.provenance import NOT_SAVED, why_not_saved
from ckptools.consolidate.source_records import Compared, Donor, without_damaged
from ckptools.consolidate.writers.layout import FromReplicas, OutputContents
from ckptools.dtypes import ITEMSIZE, can_be_nan
from ckptools.errors import NotWholeError, RefusedError, UsageError
from ckptools.files.opening import OpenFiles
from ckptools.formats.rank_search.one_of_several import SLICES
from ckptools.keys.entries import path_text, pattern
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover, cover_problem
from ckptools.model.extents import ExtentFile, Extents
from ckptools.model.incidents import LOSSES, Cause, causes_of, consequences_of
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import (
    OMEGACONF,
    Global,
    Lost,
    NumpyArray,
    NumpyScalar,
    Opaque,
    describe_for_error,
    empty_like,
    plain,
    walk,
)
from ckptools.option import spelled
from ckptools.pickles.foreign_names import suspicious_names
from ckptools.rules.verdict import is_of_one_rank, may_concern, stands_in_the_way, verdict_of
from ckptools.tensor_io import replicas
from ckptools.tensor_io.checksums import Record, damaged_records, records_of
from ckptools.tensor_io.copies import copies_without_checksums
from ckptools.tensor_io.fetch_ahead import no_progress
from ckptools.text import (
    KeyPath,
    and_others,
    clip_middle,
    few,
    first_few,
    fqn_of,
    is_within,
    named_ranks,
    plural,
    printable,
)
from ckptools.training_state.adapters import adapter_sections
from ckptools.training_state.models import chosen_models, models_of, note_on_choice, the_models
from ckptools.training_state.rank_values import NOTHING, RankValues, own_paths
from ckptools.training_state.sections import ALL, Section, sections_of, sections_of_kind, tensors_of

# -- plain values for objects of foreign classes: their attributes, or a text for an enum or a path --------------------
# An object is plain if its pickle holds nothing but its attributes or its items: `argparse.Namespace`, dataclasses,
# `SimpleNamespace`, OmegaConf's containers, a tokenizer of the user's. Any other object is left out and listed by name.


MAX_DEPTH = 50
MAX_VALUES = 100_000
"""At most so many levels and values of one foreign object are taken; nothing else limits its size."""

MEMBER = (str, int, float, bool)


class NotPlainError(ValueError):
    """An object holds more than its attributes; the message says why."""


class _Plain:
    """Convert a foreign object to dicts, lists and texts; raise `NotPlainError` if it is more than attributes."""

    def __init__(self) -> None:
        self.left = MAX_VALUES

    def value(self, node: Any, depth: int, above: frozenset[int]) -> Any:
        node, self.left = plain(node), self.left - 1
        if depth > MAX_DEPTH or self.left < 0 or id(node) in above:
            raise NotPlainError("it holds itself, or more than an object of settings does")
        if isinstance(node, Tensor):
            raise NotPlainError("a tensor is in it")
        inside = above | {id(node)}
        if isinstance(node, Opaque) and not isinstance(node, Lost):
            return self._object(node, depth, inside)
        if isinstance(node, dict):
            return {key: self.value(value, depth + 1, inside) for key, value in node.items()}
        if type(node) in (list, tuple):
            return type(node)(self.value(value, depth + 1, inside) for value in node)
        return node

    def _object(self, node: Opaque, depth: int, inside: frozenset[int]) -> Any:
        if suspicious_names((node.name,), {}):
            raise NotPlainError("its name could run code")
        if text := as_text(node):
            return text
        state = node.state[0] if type(node.state) is tuple and node.state[1:] == (None,) else node.state
        if node.name.startswith(OMEGACONF) and isinstance(state, dict) and "_content" in state:
            return self.value(state["_content"], depth + 1, inside)
        made_by = node.name in ("copyreg._reconstructor", "copy_reg._reconstructor") and len(node.args) == 3
        bare = not node.args or (made_by and node.args[2] is None)
        if isinstance(state, tuple) and len(state) == 2 and all(part is None or type(part) is dict for part in state):
            state = {**(state[0] or {}), **(state[1] or {})}  # attributes in `__dict__`, and in slots
        if bare and not node.keywords and type(state) is dict and not node.items:
            return self.value(state, depth + 1, inside)
        raise NotPlainError("it is more than its attributes")


def as_text(node: Opaque) -> str:
    """A path, or a member of an enum such as `Phase('main')`, as text; "" for anything else."""
    if node.state or node.items or node.keywords:
        return ""
    if path := path_text(node):
        return path
    args = node.args if isinstance(node.args, tuple) else ()
    if len(args) == 1 and isinstance(args[0], MEMBER) and not node.name.startswith(("torch.", "builtins.", "numpy.")):
        return f"{node.name.rpartition('.')[2]}({args[0]!r:.200})"
    return ""


def class_of(node: Opaque) -> str:
    """The dotted name of an object's class."""
    first = node.args[0] if node.name.endswith("._reconstructor") and node.args else None
    return first.dotted if isinstance(first, Global) else node.name


# -- the copy of the tree ----------------------------------------------------------------------------------------------


MAX_NAMED = 5
"""At most this many names are listed in a note."""

IN_PARTS = "ranks hold parameters of their own here, so that one name may stand for two"
"""Advice if copies differ. In the second case, one rank's copy for all ranks would lose the other ranks' values."""

MAX_TENSOR = 1 << 60
"""At most this many bytes per tensor. Strides of 0 let a few bytes claim any size."""

KINDS = {"text": "text", "dict": "dicts and lists of their attributes"}
"""The kinds of values that objects of foreign classes become."""

MAX_NAME = 60
"""Characters of the name of a class."""

LEFT_OUT = Opaque("left out")
"""Stands for a node that is not written."""


class Picking:
    """Copy a tree for writing: one source per region, foreign objects left out, problems collected.

    `contents` collects everything about the copy except the tree itself.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: ConsolidateOptions,
        files: OpenFiles,
        damage: Mapping[Record, int],
        donor: Donor | None = None,
    ) -> None:
        self.checkpoint, self.options, self.holes = checkpoint, options, hole_rule(options)
        self.files, self.damage, self.donor = files, damage, donor
        self.dequantized: dict[str, list[str]] = {}
        self.plainly: dict[str, list[tuple[KeyPath, str]]] = {}
        self.problems: list[Problem] = []
        self.gaps = {p.tensor: p for p in checkpoint.problems if p.kind is Code.TENSOR_GAP}
        self.contents = OutputContents(None, checkpoint)
        before = checkpoint.provenance.filled if checkpoint.provenance else ()
        self.filled = {one.name: one for one in (*before, *checkpoint.hollow)}
        self.ranks = RankValues(checkpoint, files)
        self.listed: list[KeyPath] = []
        self.spared: list[Problem] = []
        self.models = sections_of_kind(checkpoint, "model")
        self._orders: dict[int, tuple[Sequence[ExtentFile], list[int]]] = {}
        self.cut = {f.path for f in checkpoint.files if f.status in ("cut", "bad")}

    def lose(self, left_out: Mapping[KeyPath, str]) -> None:
        """Note values that are left out because the source has lost them."""
        self.contents.left_out |= left_out
        self.contents.lost |= left_out.keys()

    def copy(self, node: Any, source: KeyPath, at: KeyPath) -> Any:
        """Copy the node at `source` in the checkpoint to `at` in the output; `LEFT_OUT` if it is not written."""
        if (values := self.ranks.at(source)) is not None:
            return self._by_rank(values, source, at)
        if isinstance(node, Tensor):
            own = self.ranks.of_tensor(node, source)
            return self._tensor(node, source, at) if own is None else self._by_rank(own, source, at)
        if isinstance(node, dict):
            copied = empty_like(node)
            if hasattr(copied, "_metadata") and not all(
                isinstance(leaf, (str, bytes, int, float, type(None), dict, list, tuple))
                and not any(isinstance(key, Opaque) for key in path)
                for path, leaf in walk(copied._metadata)
            ):
                versions = (*at, "_metadata")
                self.contents.left_out[versions] = "module versions that hold foreign objects"
                del copied._metadata
            elif hasattr(copied, "_metadata"):
                copied._metadata = _without_attributes(copied._metadata)
            for key, value in node.items():
                place = (*at, key)
                if isinstance(key, Global) or _is_foreign(key):
                    self.contents.left_out[place] = f"its key is {key!r:.80}"
                    continue
                kept = self.copy(value, (*source, key), place)
                if kept is not LEFT_OUT:
                    copied[key] = kept
            return copied
        if type(node) in (list, tuple):
            items = [self.copy(v, (*source, i), (*at, i)) for i, v in enumerate(node)]
            # An index of a sequence has a meaning, so a left-out item becomes None.
            return type(node)(None if v is LEFT_OUT else v for v in items)
        if isinstance(node, Opaque) and not isinstance(node, Lost):
            try:
                made = _Plain().value(node, 0, frozenset())
            except NotPlainError:
                self.contents.left_out[at] = _why_foreign(node)
                return LEFT_OUT
            self.plainly.setdefault("text" if isinstance(made, str) else "dict", []).append((at, class_of(node)))
            return self.copy(made, source, at)
        if why := _why_foreign(node):
            self.contents.left_out[at] = why
            return LEFT_OUT
        return node

    def copy_section(self, section: Section, at: KeyPath) -> Any:
        """Copy a section to `at` in the output; a model that is a list in the tree becomes a dict by name."""
        if not section.keys:
            return self.copy(section.value, section.path, at)
        copied = ((key, self.copy(v, section.place_of((key,)), (*at, key))) for key, v in section.value.items())
        return {key: kept for key, kept in copied if kept is not LEFT_OUT}

    def _by_rank(self, values: Mapping[int, Any], source: KeyPath, at: KeyPath) -> list[Any]:
        """List each rank's own value; None for a rank without a value, or whose value is not written."""
        self.listed.append(source)
        self.contents.by_rank = (*self.contents.by_rank, at)
        kept = [
            LEFT_OUT if value is NOTHING else self.copy(value, (*source, rank), (*at, rank))
            for rank, value in enumerate(self.ranks.listed(values))
        ]
        return [None if value is LEFT_OUT else value for value in kept]

    def _tensor(self, tensor: Tensor, source: KeyPath, at: KeyPath) -> Any:
        fqn = fqn_of(source)
        if tensor.kind == "meta":
            self.contents.left_out[at] = tensor.note
            return LEFT_OUT
        if tensor.nbytes > MAX_TENSOR:
            nbytes = describe_for_error(tensor.nbytes)
            raise RefusedError(self.checkpoint.path, f"{fqn} would take {nbytes} bytes; no disk holds that")
        if fqn in self.filled and self.holes == "leave":
            self.lose({at: why_not_saved(self.filled[fqn])})
            return LEFT_OUT
        if fqn in self.filled:
            self.contents.carried[at] = self.filled[fqn]
        tensor = self._decoded(tensor, fqn)
        tensor, damage = without_damaged(tensor, fqn, self.damage)
        problem = cover_problem(tensor, fqn)
        reported = self.gaps.get(fqn)
        if reported is not None and problem is not None and reported.message.endswith(problem.message):
            problem = reported  # It may also say which file states the shape.
        if problem is not None and problem.kind is Code.TENSOR_GAP and self.donor is not None:
            gaps = cover(tensor.shape, tensor.extents.boxes_read).gaps
            filled = self.donor.fill(tensor, source, gaps)
            if filled is not None:
                tensor, problem, damage = filled, None, None
                self.contents.borrowed[at] = gaps
                self.contents.borrowed_from = str(self.donor.origin)
        if damage is not None and problem is None:
            self.spared.append(damage)  # another rank's copy is right
        elif damage is not None and problem is not None and problem.kind is Code.TENSOR_GAP:
            problem = damage
        if problem is not None and not self._may_fill(tensor, problem, at):
            return LEFT_OUT
        chosen = self._replicas(tensor, source, at)
        self.problems += self._in_cut_files(chosen, fqn) if self.holes is None and self.cut else []
        if any(s.holds(source) for s in self.models):
            self.contents.model_paths.add(at)
        fill = self.holes or "" if problem is not None else ""
        return replace(tensor, shards=chosen, fill=fill)

    def _decoded(self, tensor: Tensor, fqn: str) -> Tensor:
        if not (self.options.dequantize and tensor.encoded_as):
            return tensor
        from ckptools.tensor_io.read import dequantized

        found = dequantized(tensor)
        if found.note != tensor.note and not found.note:
            for encoded in tensor.encoded_as:
                self.dequantized.setdefault(encoded.name, []).append(fqn)
        return found

    def _may_fill(self, tensor: Tensor, problem: Problem, at: KeyPath) -> bool:
        """Note the problem of a tensor; return whether it is written anyway, with its holes filled."""
        if problem.kind.lacks == "elements":
            self.contents.missing[at] = cover(tensor.shape, tensor.extents.boxes_read).gaps
        if self.holes is None:
            self.problems.append(problem)
        elif problem.kind.lacks == "elements" and self.holes in FILLS:
            if self.holes == "zero" or can_be_nan(tensor.dtype):
                return True
            self.lose({at: f"{problem.message}; there is no NaN in {tensor.dtype}"})
            return False
        self.lose({at: problem.message})
        return False

    def _replicas(self, tensor: Tensor, source: KeyPath, at: KeyPath) -> Sequence[Shard]:
        """Choose one shard for each region, in the order of offsets; copies of a region that differ are a problem."""
        if tensor.lies_in_a_row:
            return tensor.extents.in_order_of(tensor.extents.offsets)
        differing = self.ranks.differing(tensor, source)
        if differing and not self.options.unchecked and self.options.prefer_rank is None:
            tensor = self._right_copies(tensor, fqn_of(source), differing)
            differing = self.ranks.differing(tensor, source)
        if differing and self.options.prefer_rank is None:
            copies = next(iter(differing.values()))
            whose = f" (with regions of {self.contents.borrowed_from})" if at in self.contents.borrowed else ""
            way = f"take one with {spelled('prefer-rank')} if they are copies of one model"
            more = f"{whose}; {IN_PARTS if self.checkpoint.in_parts else way}"
            self.problems.append(copies.problem(fqn_of(source), self.files, more))
        if not tensor.has_copies:
            return tuple(sorted(tensor.found, key=lambda s: s.box.offsets))
        return tuple(sorted(self._preferred(tensor.extents.read), key=lambda s: s.box.offsets))

    def _preferred(self, found: Extents) -> Iterable[Shard]:
        """The copy of each region to write."""
        order = self._order(found.files)
        order = order[:1] if found.one_box else order
        first = {(found.offsets[i], found.sizes[i]): i for i in reversed(order)}
        return [found[i] for i in first.values()]

    def _order(self, files: Sequence[ExtentFile]) -> list[int]:
        """The numbers of files by preference; worked out once for tensors that share the list."""
        known = self._orders.get(id(files))
        if known is None:  # kept with its list, so that no other list gets the same id
            wanted, ranks = self.options.prefer_rank, [-1 if file.rank is None else file.rank for file in files]
            preferences = [(f.path in self.cut, f.rank != wanted, rank) for f, rank in zip(files, ranks, strict=True)]
            known = self._orders[id(files)] = files, sorted(range(len(files)), key=preferences.__getitem__)
        return known[1]

    def _right_copies(self, tensor: Tensor, fqn: str, differing: Collection[Box]) -> Tensor:
        """Remove copies whose checksums do not match if other copies are right."""
        copies = tuple([s for s in tensor.found if s.box in differing])
        records = records_of([replace(tensor, shards=copies)])
        kept, damage = without_damaged(tensor, fqn, damaged_records(records, self.files, 1, no_progress))
        if damage is None or cover_problem(kept, fqn) is not None:
            return tensor
        self.spared.append(damage)
        return kept

    def _in_cut_files(self, chosen: Iterable[Shard], fqn: str) -> Iterator[Problem]:
        """Report the shards of a whole tensor that lie in a cut file: their bytes may differ from those saved."""
        for shard in chosen:
            if shard.source is None or shard.source.path not in self.cut:
                continue
            text = f"{shard.box} lies in {shard.source.path.name}, which is cut short or damaged elsewhere"
            yield Problem(Code.FILE_CUT, text, shard.rank, fqn)

    def notes_on(self, parts: Iterable[Section]) -> list[str]:
        """Collect the notes for the user on a checkpoint with nothing missing."""
        notes = [f"dequantized, as {name} does: {few(fqns, 1)}" for name, fqns in self.dequantized.items()]
        for became, places in self.plainly.items():
            named = few([f"{clip_middle(name, MAX_NAME)} at {fqn_of(at) or 'the top'}" for at, name in places], 3)
            notes.append(f"{plural(len(places), 'object')} became {KINDS[became]}: {named}")
        if self.spared:
            more = and_others(len(self.spared) - 1)
            notes.append(f"{self.spared[0]}{more}; another rank's copy is right, and is written")
        notes += _note_on_own(self.listed, f"kept for each of {plural(self.ranks.count, 'rank')}, as a list by rank")
        rest = [p for p in self.checkpoint.differing if not any(p[: len(kept)] == kept for kept in self.listed)]
        rest = [p for p in rest if any(part.holds(p) for part in parts)]
        return [*notes, *_note_on_own(rest, "only the lowest rank's is written")]


def _note_on_own(paths: Sequence[KeyPath], what: str) -> list[str]:
    """The note on values that differ from rank to rank."""
    names = first_few(list(map(fqn_of, paths)), MAX_NAMED)
    return [f"{plural(len(paths), 'value')} that ranks have for themselves ({names}): {what}"] if paths else []


# -- foreign objects ---------------------------------------------------------------------------------------------------


def _why_foreign(node: Any) -> str:
    """Why a leaf is not written; empty when it is."""
    if isinstance(node, Opaque):
        return node.name if isinstance(node, Lost) else f"an object of class {node.name}"
    if isinstance(node, (set, frozenset)) and _is_foreign(node):
        return "a set of foreign objects"
    if isinstance(node, NumpyArray) and node.dtype == "|O":
        return "a numpy array of Python objects"
    if isinstance(node, (NumpyArray, NumpyScalar)) and "." in node.dtype and node.dtype[:1] not in ("{", "("):
        return f"a numpy array of {node.dtype}"
    if isinstance(node, Global) and not (node.module == "torch" and node.name in ITEMSIZE):
        return f"the name {node.dotted}"
    return ""


def _is_foreign(node: Any) -> bool:
    """Whether a key or a set is or contains an object that is not rebuilt."""
    if isinstance(node, (tuple, set, frozenset)):
        return any(map(_is_foreign, node))
    return isinstance(node, Opaque)


def _without_attributes(node: Any) -> Any:
    """Copy plain values without attributes of their dicts, such as `_metadata`."""
    if isinstance(node, dict):
        made: dict[Any, Any] = OrderedDict() if isinstance(node, OrderedDict) else {}
        made.update((key, _without_attributes(value)) for key, value in node.items())
        return made
    return type(node)(map(_without_attributes, node)) if type(node) in (list, tuple) else node


# -- choice of the output's contents: the sections to write, and the reasons to refuse a checkpoint --------------------
# Everything is checked here, before the first byte is written, and all problems are reported at once.


ONLY = ("model", "optimizer", "all")
LORA = "lora"
"""The part of a model that is its LoRA adapters."""


def select(
    checkpoint: Checkpoint,
    only: str,
    options: ConsolidateOptions,
    files: OpenFiles,
    compared: Compared | None,
    donor: Donor | None,
    does: str = "writes",
) -> OutputContents:
    """Choose the parts named by `only` from a checkpoint whose ranks have all been read.

    Records that did not match their checksums when they were `compared` count as missing; None if no record was
    compared yet. `donor` is another checkpoint of the run, which fills gaps first. `does` says in a message
    what becomes of the values.

    Raises:
        NotWholeError: something is missing, overlaps or contradicts; lists everything.
        UsageError: there is no such section.
    """
    sections, holes, prefer_rank = sections_to_write(checkpoint, only), hole_rule(options), options.prefer_rank
    damage = compared.damaged if compared else {}
    if prefer_rank is not None and prefer_rank not in checkpoint.ranks:
        raise UsageError(checkpoint.path, f"{spelled('prefer-rank')} {prefer_rank}: there is no file of that rank here")
    if prefer_rank is not None and (unlike := next((p for p in checkpoint.problems if SLICES in p.message), None)):
        text = f"{spelled('prefer-rank')} {prefer_rank} would write one rank's values for all: {unlike.message}"
        way = f"{spelled('only-this-file', True)} with the file of a rank takes its copy"
        raise NotWholeError(checkpoint.path, f"{text}; {way}", [unlike])
    picking = Picking(checkpoint, options, files, damage, donor)
    errors = [p for p in checkpoint.problems if p.severity == "error"]
    concerned = [p for p in errors if _concerns(p, sections.values(), only)]
    written = {fqn_of(path): tensor for path, tensor in tensors_of(sections.values())}
    of_tensors = [p for p in concerned if p.kind in (Code.COPIES_DIFFER, Code.LAYOUT_DISAGREES) and p.tensor in written]
    # `picking` compares copies itself, and finds the problem of a tensor with a piece that does not fit into it.
    judged = [p for p in of_tensors if p.kind is Code.COPIES_DIFFER or written[p.tensor or ""].contradictions]
    concerned = [p for p in concerned if p not in judged]
    picking.problems += [p for p in concerned if _refuses(checkpoint, p, holes)]
    # Lost parts that leave no gap in a tensor: their names are unknown, or their file belongs to no single rank.
    without = [p for p in concerned if p.kind.lacks in ("file", "part") and stands_in_the_way(checkpoint, p)]
    if only == "model":
        without = [p for p in without if not _is_of_an_optimizer(checkpoint, p)]
    unsure = [p for p in checkpoint.problems if p.kind is Code.SIZE_UNSTATED]
    picking.problems += [] if holes else [*without, *unsure]
    picking.lose({(p.tensor or p.code,): p.message for p in without})
    picking.ranks.expect(tensors_of(sections.values()), right=compared is not None and not damage)
    trees = {name: picking.copy_section(s, (name,) if name else ()) for name, s in sections.items()}
    if picking.problems:
        gaps = any(p.kind.lacks == "elements" for p in picking.problems)
        lost = [p for p in errors if p.kind is Code.FILE_UNREADABLE or (gaps and p.kind.lacks == "file")]
        problems = list(dict.fromkeys([*lost, *picking.problems]))
        raise NotWholeError(checkpoint.path, _summary(checkpoint, problems, does), problems)
    contents, parts = picking.contents, list(sections.values())
    if any(t is LEFT_OUT for t in trees.values()):
        why = next(iter(contents.left_out.values()))
        raise RefusedError(checkpoint.path, f"is nothing that can be written, but {why}")
    picking.lose(_own_values_lost(checkpoint, parts))
    contents.from_replicas, notes = _from_replicas(checkpoint, parts)
    warnings = [p for p in checkpoint.problems if p.severity == "warning" and _concerns(p, parts, only)]
    exchanged = (p for p in checkpoint.problems if p.kind is Code.NAMED_AS_ANOTHER_RANK)
    contents.notes += [*_notes_on_warnings([*warnings, *exchanged]), *picking.notes_on(parts), *notes]
    contents.notes += [] if only in (*ONLY, LORA) else [_note_on_glob(checkpoint, parts, only)]
    if only != "all" and {part.path for part in parts} & {model.path for model in chosen_models(checkpoint)}:
        contents.notes[:0] = filter(None, [note_on_choice(checkpoint)])
    contents.tree = trees[""] if list(trees) == [""] else trees
    contents.part = only
    if donor is not None:
        contents.notes.append(donor.note())
    contents.filled = holes if holes in FILLS else ""
    # A list that is a model by name is one in the output as well, unless the output has the same tree.
    named = ((s._replace(keys={}, inside=None), (name,) if name else ()) for name, s in sections.items())
    as_in_tree = ((s, s.path) for s in sections_of(checkpoint) if not s.keys)
    contents.places = tuple(as_in_tree if only == "all" else named)
    contents.unsure = tuple(p for p in warnings if p.kind.lacks == "part" and p.tensor is None)
    contents.passed_over = tuple(p for p in concerned if p.kind.lacks == "value" and p.kind not in NOT_SAVED)
    return contents


# -- the parts that the user asked for ---------------------------------------------------------------------------------


def tensors_to_write(checkpoint: Checkpoint, only: str) -> Iterator[tuple[str, Tensor]]:
    """Fqn and tensor of everything that `only` selects, as in `select`."""
    return ((fqn_of(path), tensor) for path, tensor in places_to_write(checkpoint, only))


def places_to_write(checkpoint: Checkpoint, only: str) -> Iterator[tuple[KeyPath, Tensor]]:
    """Key path in the checkpoint and tensor of everything that `only` selects."""
    return tensors_of(sections_to_write(checkpoint, only).values())


def sections_to_write(checkpoint: Checkpoint, only: str) -> dict[str, Section]:
    """The sections to write by their name in the output; a single section has no name there."""
    if not isinstance(only, str):
        raise UsageError(checkpoint.path, f"{spelled('only', only)}: expected a name or a glob")
    if only == "all":
        named = checkpoint.options.model if checkpoint.options is not None else None
        if named not in (None, ALL):
            text = f"{spelled('only', 'all')} writes the whole tree, and {spelled('model', named)} names one model"
            raise UsageError(checkpoint.path, f"{text}: give one of them")
        return {"": Section("other", "", (), checkpoint.tree)}
    if only == LORA:
        found = adapter_sections(checkpoint)
    elif only in ONLY:
        found = list(the_models(checkpoint) if only == "model" else sections_of_kind(checkpoint, only))
    else:
        found = _matching(checkpoint, only)
    if not found:
        here = ", ".join(sorted({s.kind for s in sections_of(checkpoint)})) or "nothing"
        text, verdict = f"holds no {only}; it holds {here}", verdict_of(checkpoint)
        if verdict.whole is False:  # the part may be what is lost
            raise RefusedError(checkpoint.path, f"{verdict.in_one_line}; {text}")
        raise UsageError(checkpoint.path, text)
    return {"": found[0]} if len(found) == 1 else {s.name: s for s in found}


def _matching(checkpoint: Checkpoint, glob: str) -> list[Section]:
    """Reduce the model to look at to the names that match a glob, alone or after the name of its section.

    If it has none, the same in any other model: `ema.*` names that of an average.
    """
    wanted = pattern((glob,))
    chosen = chosen_models(checkpoint) or [model.section for model in models_of(checkpoint)]
    found = [kept for section in chosen if (kept := _reduced(section, wanted, bare=True)).value]
    if not found:
        others = (model.section for model in models_of(checkpoint))
        found = [kept for section in others if (kept := _reduced(section, wanted, bare=False)).value]
    if not found:
        text = f"{spelled('only', glob)}: choose one of {', '.join(ONLY)}; or a glob that names of the model match"
        raise UsageError(checkpoint.path, text)
    return found


def _reduced(section: Section, wanted: re.Pattern[str], bare: bool) -> Section:
    """Keep the names of a model that match: with the section before them or, if `bare`, also without it."""
    kept = empty_like(section.value)
    for key, value in section.value.items():
        if (bare and wanted.fullmatch(key)) or wanted.fullmatch(f"{section.name}.{key}"):
            kept[key] = value
    return section._replace(value=kept)


OPTIMIZER_FILES = ("optim", "optimizer")
"""Parts whose files hold an optimizer; if they also hold a copy of the model, its loss shows as gaps in tensors."""


def _is_of_an_optimizer(checkpoint: Checkpoint, problem: Problem) -> bool:
    """Whether a problem is about a rank of which only files of the optimizer are lost."""
    lost = [f.part for f in checkpoint.files if f.rank == problem.rank and not f.is_here]
    return problem.rank is not None and bool(lost) and all(part in OPTIMIZER_FILES for part in lost)


def _concerns(problem: Problem, parts: Iterable[Section], only: str) -> bool:
    """Whether a problem is about a part to write."""
    if problem.tensor is None or problem.kind is Code.MIXED_SAVES:
        return True
    paths = [path for s in parts for path in ([s.path] if only in ONLY else [s.place_of((key,)) for key in s.value])]
    return any(not fqn or is_within(problem.tensor, fqn) for fqn in map(fqn_of, paths))


def _note_on_glob(checkpoint: Checkpoint, parts: Iterable[Section], glob: str) -> str:
    written = sum(len(part.value) for part in parts)
    mine = {part.path for part in parts}
    models = [model.section for model in models_of(checkpoint)]
    others = sum(len(section.value) for section in models if section.path in mine) - written
    return f"{spelled('only', glob)}: {plural(written, 'name')} of the model, without {plural(others, 'other')}"


# -- reasons to refuse -------------------------------------------------------------------------------------------------


def _refuses(checkpoint: Checkpoint, problem: Problem, holes: str | None) -> bool:
    """Whether an error prevents writing by itself, even if all tensors are whole."""
    if problem.kind.forbids == "any output":
        return True
    return not holes and problem.kind.lacks == "value" and stands_in_the_way(checkpoint, problem)


def _own_values_lost(checkpoint: Checkpoint, parts: Sequence[Section]) -> dict[KeyPath, str]:
    """The values of single ranks that were in lost files, by key path and rank, with the reason; no gap shows them."""
    own = [*own_paths(sections_of(checkpoint), checkpoint.world_size.exact), *checkpoint.differing]
    own = [path for path in own if any(part.holds(path) for part in parts)]
    own = [path for path in own if not any(path[: len(other)] == other != path for other in own)]
    errors = [p for p in checkpoint.problems if p.severity == "error" and p.kind.lacks in ("file", "value")]
    lost = [p for p in errors if p.rank is not None and not stands_in_the_way(checkpoint, p)]
    found = ((path, p) for p in lost for path in own if may_concern(p, path))
    return {(*path, p.rank): f"what rank {p.rank} had for itself: {printable(p.message)}" for path, p in found}


def _from_replicas(checkpoint: Checkpoint, parts: Iterable[Section]) -> tuple[FromReplicas | None, list[str]]:
    """The ranks whose lost or damaged files are replaced by replicas on other ranks, and the note that says so."""
    verdict = verdict_of(checkpoint)
    if verdict.whole is not False or not verdict.recoverable:
        return None, []
    errors = [p for p in checkpoint.problems if p.severity == "error" and p.all_ranks]
    lost = [p for p in errors if p.kind.lacks == "file" or p.replicated]
    lost = [p for p in lost if p.tensor is None or not is_of_one_rank(checkpoint, p.tensor)]
    if not lost:
        return None, []
    ranks = {rank for p in lost for rank in p.all_ranks}
    others = {s.rank for _, t in tensors_of(parts) for s in t.found if s.rank is not None} - ranks
    if not others:
        return None, []
    more = and_others(len(lost) - 1)
    note = f"what {named_ranks(ranks)} shared is read from {named_ranks(others)}: {printable(str(lost[0]))}{more}"
    return FromReplicas(tuple(sorted(ranks)), tuple(sorted(others))), [note]


DOUBTFUL = (
    Code.FILE_MISSING, Code.FILE_CUT, Code.ODD_FILE_SIZE, Code.MIXED_SAVES, Code.METADATA_CONTRADICTS,
    Code.STRAY_FILE, Code.NAME_CONTRADICTS, Code.NAMED_AS_ANOTHER_RANK, Code.NEVER_WRITTEN, Code.LAYOUT_DISAGREES,
    Code.COPIES_DIFFER, Code.LAYOUT_INFERRED,
)  # fmt: skip
"""Warnings that the files, or the tensors joined from them, may differ from the state that was saved."""


DOUBT = "warning of the source: "
"""The beginning of a note that casts doubt on the values."""


def _notes_on_warnings(warnings: Sequence[Problem]) -> Iterator[str]:
    """Yield the warnings of the source that cast doubt on the output too."""
    yield from (p.message for p in warnings if p.kind.lacks == "part")
    for cause in causes_of(p for p in warnings if p.kind in DOUBTFUL):
        yield f"{DOUBT}{cause.code} {cause.words}"


def check_files(checkpoint: Checkpoint, part: str, files: OpenFiles, unchecked: bool) -> list[str]:
    """Refuse a source with values that contradict the layout; note files that may be copies of another rank's.

    With `unchecked` the module's own weights alone may be written all the same, for example if the user changed them.
    """
    taken = unchecked and part == "model" and getattr(checkpoint.options, "weights", "") == "module"
    problems, _ = replicas.compare_rounded(() if taken else checkpoint.rounded)
    if problems:
        raise NotWholeError(checkpoint.path, f"{problems[0]}{and_others(len(problems) - 1)}", problems)
    return [*_notes_on_warnings(copies_without_checksums(tensors_to_write(checkpoint, part), files))]


def _summary(checkpoint: Checkpoint, problems: Sequence[Problem], does: str) -> str:
    """Summarize in one line: the verdict, the first cause that it does not name, the consequences, the way out."""
    verdict = verdict_of(checkpoint)
    named = verdict.in_one_line if verdict.level == "bad" or verdict.joinable is False else ""
    others = [cause for cause in causes_of(problems) if not _names_lost_ranks(named, cause)]
    first = f"{others[0].code}  {others[0].words}{and_others(len(others) - 1)}" if others else ""
    following = ", ".join(one.text for one in consequences_of(problems))
    gaps_only = all(p.kind.lacks != "nothing" for p in problems)
    way = f"{spelled('allow-missing', True)} {does} what is whole" if gaps_only else ""
    return "; ".join(filter(None, (named, first if named else f"not whole: {first}", following, way)))


def _names_lost_ranks(headline: str, cause: Cause) -> bool:
    """Whether a headline such as `ranks 1, 3 missing` already names a cause; never if its file belongs to no rank."""
    lost = {kind.code for kind in LOSSES}
    return cause.code in lost and cause.where == cause.culprit and cause.text in headline
