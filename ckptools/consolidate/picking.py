"""A copy of the tree for an output: one source for every region, with what is left out and every problem noted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.consolidate.plain_objects import NotPlainError, as_plain, class_of
from ckptools.consolidate.provenance import why_not_saved
from ckptools.consolidate.publishing.source_records import without_damaged
from ckptools.consolidate.writers.layout import Borrowed, OutputContents
from ckptools.dtypes import ITEMSIZE, can_be_nan
from ckptools.errors import RefusedError
from ckptools.files.opening import OpenFiles
from ckptools.formats.shared.merge import empty_like
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover, cover_problem
from ckptools.model.item_shards import HoldingFile, ItemShards
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.shard import Shard
from ckptools.model.shards import Shards, lie_in_a_row, with_bytes
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of, walk
from ckptools.model.values import Global, Lost, NumpyArray, NumpyScalar, Opaque, describe_for_error
from ckptools.tensor_io.checksums import Record
from ckptools.tensor_io.file_records import damaged_records, records_of
from ckptools.tensor_io.threads import no_progress
from ckptools.text import and_others, clip_middle, few, first_few, plural
from ckptools.training_state.rank_values import NOTHING, RankValues
from ckptools.training_state.sections import Section, sections_of_kind

if TYPE_CHECKING:
    from ckptools.consolidate.fill_from import Donor

FILLS = ("nan", "zero")
"""The values that can fill a hole."""

MAX_NAMED = 5
"""Names in a note."""

COPIES = "take one with --prefer-rank if they are copies of one model"
IN_PARTS = "ranks hold parameters of their own here, so that one name may stand for two"
"""Advice for copies that differ; taking one rank's for all would lose the others' values."""

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

    `contents` gets everything that is known of the copy but the tree itself.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        holes: str | None,
        prefer_rank: int | None,
        files: OpenFiles,
        damage: Mapping[Record, int] | None,
        dequantize: bool,
        donor: Donor | None = None,
    ) -> None:
        self.path, self.files = checkpoint.path, files
        self.damage, self.checks = damage or {}, damage is not None
        self.dequantize, self.donor = dequantize, donor
        self.dequantized: dict[str, list[str]] = {}
        self.plainly: dict[str, list[tuple[KeyPath, str]]] = {}
        self.holes, self.prefer_rank = holes, prefer_rank
        self.in_parts = checkpoint.in_parts
        self.problems: list[Problem] = []
        self.gaps = {p.tensor: p for p in checkpoint.problems if p.kind is Code.TENSOR_GAP}
        self.contents = OutputContents(None, checkpoint)
        before = checkpoint.provenance.filled if checkpoint.provenance else ()
        self.filled = {one.name: one for one in (*before, *checkpoint.hollow)}
        self.ranks = RankValues(checkpoint, files)
        self.listed: list[KeyPath] = []
        self.spared: list[Problem] = []
        self.models = sections_of_kind(checkpoint, "model")
        self._orders: dict[int, tuple[Sequence[HoldingFile], list[int]]] = {}
        self.cut = {f.path for f in checkpoint.files if f.status in ("cut", "bad")}

    def lose(self, left_out: Mapping[KeyPath, str]) -> None:
        """Leave out the values that the source has lost."""
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
            return self._dict(node, source, at)
        if type(node) in (list, tuple):
            items = [self.copy(v, (*source, i), (*at, i)) for i, v in enumerate(node)]
            # A place in a sequence has a meaning, so what is left out leaves None there.
            return type(node)(None if v is LEFT_OUT else v for v in items)
        if isinstance(node, Opaque) and not isinstance(node, Lost):
            try:
                made = as_plain(node)
            except NotPlainError:
                self.contents.left_out[at] = _why_foreign(node)
                return LEFT_OUT
            self.plainly.setdefault("text" if isinstance(made, str) else "dict", []).append((at, class_of(node)))
            return self.copy(made, source, at)
        if why := _why_foreign(node):
            self.contents.left_out[at] = why
            return LEFT_OUT
        return node

    def _by_rank(self, values: Mapping[int, Any], source: KeyPath, at: KeyPath) -> list[Any]:
        """List each rank's own value; None for a rank that has none, or whose value is not written."""
        self.listed.append(source)
        kept = [
            LEFT_OUT if value is NOTHING else self.copy(value, (*source, rank), (*at, rank))
            for rank, value in enumerate(self.ranks.listed(values))
        ]
        return [None if value is LEFT_OUT else value for value in kept]

    def _dict(self, node: dict[Any, Any], source: KeyPath, at: KeyPath) -> Any:
        copied = empty_like(node)
        if hasattr(copied, "_metadata") and not _is_plain(copied._metadata):
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

    def _tensor(self, tensor: Tensor, source: KeyPath, at: KeyPath) -> Any:
        fqn = fqn_of(source)
        if tensor.kind == "meta":
            self.contents.left_out[at] = tensor.note
            return LEFT_OUT
        if tensor.nbytes > MAX_TENSOR:
            nbytes = describe_for_error(tensor.nbytes)
            raise RefusedError(self.path, f"{fqn} would take {nbytes} bytes; no disk holds that")
        if fqn in self.filled and self.holes == "leave":
            self.lose({at: why_not_saved(self.filled[fqn])})
            return LEFT_OUT
        if fqn in self.filled:
            self.contents.carried[at] = self.filled[fqn]
        tensor = self._decoded(tensor, fqn)
        tensor, damage = without_damaged(tensor, fqn, self.damage)
        problem = cover_problem(tensor, fqn)
        told = self.gaps.get(fqn)
        if told is not None and problem is not None and told.message.endswith(problem.message):
            problem = told  # which may say who states the shape
        if problem is not None and problem.kind is Code.TENSOR_GAP and self.donor is not None:
            tensor, problem = self._from_donor(tensor, source, at, problem)
            damage = None if problem is None else damage
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

    def _from_donor(
        self, tensor: Tensor, source: KeyPath, at: KeyPath, problem: Problem
    ) -> tuple[Tensor, Problem | None]:
        """Fill the gaps of a tensor from the other checkpoint, if that has them all; with the problem that is left."""
        assert self.donor is not None
        made = self.donor.fill(tensor, source, at)
        if made is tensor:
            return tensor, problem
        self.contents.borrowed[at] = Borrowed(self.donor.taken[at], str(self.donor.origin))
        return made, None

    def _decoded(self, tensor: Tensor, fqn: str) -> Tensor:
        """Dequantize a quantized tensor, if that is wanted."""
        if not (self.dequantize and tensor.encoded_as):
            return tensor
        from ckptools.tensor_io.dequantize import dequantized

        found = dequantized(tensor)
        if found.note != tensor.note and not found.note:
            for encoded in tensor.encoded_as:
                self.dequantized.setdefault(encoded.name, []).append(fqn)
        return found

    def _may_fill(self, tensor: Tensor, problem: Problem, at: KeyPath) -> bool:
        """Note the problem of a tensor; return whether it is written anyway, with its holes filled."""
        if problem.kind.lacks == "elements":
            self.contents.missing[at] = cover(tensor.shape, tensor.found_boxes).gaps
        if self.holes is None:
            self.problems.append(problem)
        elif problem.kind.lacks == "elements" and self.holes in FILLS:
            if self.holes == "zero" or can_be_nan(tensor.dtype):
                return True
            self.lose({at: f"{problem.message}; there is no NaN in {tensor.dtype}"})
            return False
        self.lose({at: problem.message})
        return False

    def _replicas(self, tensor: Tensor, source: KeyPath, at: KeyPath) -> Shards:
        """Choose one shard per region, whose copies should be equal; in the order of their offsets."""
        if isinstance(tensor.shards, ItemShards) and lie_in_a_row(tensor.shards, tensor.shape):
            return tensor.shards.in_order_of(tensor.shards.offsets)
        differing = self.ranks.differing(tensor, source)
        if differing and self.checks and self.prefer_rank is None:
            tensor = self._right_copies(tensor, fqn_of(source), differing)
            differing = self.ranks.differing(tensor, source)
        if differing and self.prefer_rank is None:
            copies = next(iter(differing.values()))
            taken = self.contents.borrowed.get(at)
            whose = f" (with regions of {taken.origin})" if taken else ""
            more = f"{whose}; {IN_PARTS if self.in_parts else COPIES}"
            self.problems.append(copies.problem(fqn_of(source), self.files, more))
        if not tensor.has_copies:
            return tuple(sorted(tensor.found, key=lambda s: s.box.offsets))
        return tuple(sorted(self._preferred(tensor.shards), key=lambda s: s.box.offsets))

    def _preferred(self, shards: Shards) -> Iterable[Shard]:
        """The copy of each region that is written."""
        if isinstance(shards, ItemShards) and shards.all_read:
            order = self._order(shards.files)
            order = order[:1] if shards.one_box else order
            first = {(shards.offsets[i], shards.sizes[i]): i for i in reversed(order)}
            return [shards[i] for i in first.values()]
        found = sorted(with_bytes(shards), key=lambda s: self._preference(s.source and s.source.path, s.rank))
        return {s.box: s for s in reversed(found)}.values()

    def _order(self, files: Sequence[HoldingFile]) -> list[int]:
        """The numbers of files by preference; worked out once for tensors that share the list."""
        known = self._orders.get(id(files))
        if known is None:  # kept with its list, so that no other list gets the same id
            preferences = [self._preference(file.path, file.rank) for file in files]
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

    def _preference(self, path: Path | None, rank: int | None) -> tuple[bool, bool, int]:
        return self._is_cut(path), rank != self.prefer_rank, -1 if rank is None else rank

    def _is_cut(self, path: Path | None) -> bool:
        return bool(self.cut) and path in self.cut

    def _in_cut_files(self, chosen: Shards, fqn: str) -> Iterator[Problem]:
        """Report a whole tensor with bytes in a cut file: the file may differ from the one that was saved."""
        for shard in chosen:
            if shard.source is None or not self._is_cut(shard.source.path):
                continue
            text = f"{shard.box} lies in {shard.source.path.name}, which is cut short or damaged elsewhere"
            yield Problem(Code.FILE_CUT, text, shard.rank, fqn)

    def notes_for(self, checkpoint: Checkpoint, parts: Iterable[Section]) -> list[str]:
        """Collect the notes for the user on a checkpoint with nothing missing."""
        notes = [f"dequantized, as {name} does: {few(fqns, 1)}" for name, fqns in self.dequantized.items()]
        for became, places in self.plainly.items():
            named = few([f"{clip_middle(name, MAX_NAME)} at {fqn_of(at) or 'the top'}" for at, name in places], 3)
            notes.append(f"{plural(len(places), 'object')} became {KINDS[became]}: {named}")
        if self.spared:
            more = and_others(len(self.spared) - 1)
            notes.append(f"{self.spared[0]}{more}; another rank's copy is right, and is written")
        notes += _note_on_own(self.listed, f"kept for each of {plural(self.ranks.count, 'rank')}, as a list by rank")
        rest = [p for p in checkpoint.differing if not any(p[: len(kept)] == kept for kept in self.listed)]
        rest = [p for p in rest if any(part.holds(p) for part in parts)]
        return [*notes, *_note_on_own(rest, "only the lowest rank's is written")]


def _note_on_own(paths: Sequence[KeyPath], what: str) -> list[str]:
    """The note on values that ranks have for themselves."""
    names = first_few(list(map(fqn_of, paths)), MAX_NAMED)
    return [f"{plural(len(paths), 'value')} that ranks have for themselves ({names}): {what}"] if paths else []


# -- foreign objects --------------------------------------------------------------------------------------------------


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


def _is_plain(tree: Any) -> bool:
    """Whether a tree has only values of Python's own types."""
    return all(
        isinstance(leaf, (str, bytes, int, float, type(None), dict, list, tuple))
        and not any(isinstance(key, Opaque) for key in path)
        for path, leaf in walk(tree)
    )
