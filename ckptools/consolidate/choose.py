"""What goes into the output: the sections, one source for every region, and the proof that nothing is missing.

Everything is checked here, before the first byte is written, and everything that is wrong is reported at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptools.consolidate.foreign import is_foreign, is_plain, why_foreign, without_attributes
from ckptools.consolidate.parts import ONLY, concerns, note_on_glob, sections_to_write
from ckptools.consolidate.provenance import NOT_SAVED, why_not_saved
from ckptools.consolidate.selection import FILLS, Selection
from ckptools.consolidate.shortfall import (
    absent,
    own_values_lost,
    refuses,
    replicas_note,
    summary,
    unreadable_files,
)
from ckptools.consolidate.sources import spared_note, without_damaged
from ckptools.dtypes import can_be_nan
from ckptools.errors import NotWholeError, RefusedError, UsageError
from ckptools.files.opening import OpenFiles
from ckptools.formats.shared.merge import empty_like
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover
from ckptools.model.problems import Code, Problem
from ckptools.model.provenance import Filled
from ckptools.model.regions import Box
from ckptools.model.tensor import Shard, Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.model.values import Global, Opaque, describe_for_error
from ckptools.tensor_io.coverage import cover_problem
from ckptools.tensor_io.dequantize import dequantized
from ckptools.tensor_io.progress import not_told
from ckptools.tensor_io.records import Record, damaged_records
from ckptools.text import few, first_few, plural
from ckptools.training_state.rank_values import NOTHING, RankValues
from ckptools.training_state.sections import Section, sections_of, sections_of_kind, tensors_of

MAX_NAMED = 5
"""Names in a note."""

COPIES = "take one with --prefer-rank if they are copies of one model"
IN_PARTS = "ranks hold parameters of their own here, so that one name may stand for two"
"""What to do where copies differ; a rank that is taken for all would lose what is another's."""

MAX_TENSOR = 1 << 60
"""Bytes of one tensor. A few bytes that are expanded, with strides of 0, can claim any number."""


def select(
    checkpoint: Checkpoint,
    only: str,
    holes: str | None,
    prefer_rank: int | None,
    files: OpenFiles,
    damage: Mapping[Record, int] | None,
    dequantize: bool = False,
) -> Selection:
    """Choose what `only` names of a checkpoint whose ranks have all been read.

    Args:
        checkpoint: opened with all ranks.
        only: `model` (the bare state dict), `optimizer` (the bare optimizer state), `all` (the same tree), or a glob
            for names of the model.
        holes: None to refuse what is not whole, `leave` to leave such tensors out, `nan` or `zero` to fill their holes.
        prefer_rank: where copies of a tensor differ that should be equal, take this rank's.
        files: where source files are opened.
        damage: records that are known not to be what their checksums say, with the CRC-32 that they have; what lies in
            them is missing. None where checksums are not looked at.
        dequantize: take the values of quantized tensors, as their class computes them.

    Raises:
        NotWholeError: something is missing, overlaps or contradicts; lists everything.
        UsageError: there is no such section.
    """
    sections = sections_to_write(checkpoint, only)
    if prefer_rank is not None and prefer_rank not in checkpoint.ranks:
        raise UsageError(checkpoint.path, f"--prefer-rank {prefer_rank}: there is no file of that rank here")
    picking = _Picking(checkpoint, holes, prefer_rank, files, damage, dequantize)
    errors = [p for p in checkpoint.problems if p.severity == "error"]
    concerned = [p for p in errors if concerns(p, sections.values(), only)]
    written = {fqn_of(path) for path, _ in tensors_of(sections.values())}
    concerned = [p for p in concerned if p.kind is not Code.COPIES_DIFFER or p.tensor not in written]  # compared below
    picking.problems += [p for p in concerned if refuses(checkpoint, p, holes)]
    without = absent(checkpoint, concerned)
    picking.problems += [] if holes else without
    picking.lose({(p.tensor or p.code,): p.message for p in without})
    picking.ranks.expect(tensors_of(sections.values()))
    trees = {name: picking.copy(s.value, s.path, (name,) if name else ()) for name, s in sections.items()}
    if picking.problems:
        problems = list(dict.fromkeys([*unreadable_files(checkpoint), *picking.problems]))
        raise NotWholeError(checkpoint.path, summary(checkpoint, problems), problems)
    if any(t is _LEFT_OUT for t in trees.values()):
        raise RefusedError(
            checkpoint.path, f"is nothing that can be written, but {next(iter(picking.left_out.values()))}"
        )
    tree = trees[""] if list(trees) == [""] else trees
    if only == "all":
        places = tuple((s, s.path) for s in sections_of(checkpoint))
    else:
        places = tuple((s, (name,) if name else ()) for name, s in sections.items())
    parts = list(sections.values())
    picking.lose(own_values_lost(checkpoint, parts))
    notes = [*picking.notes_for(checkpoint, parts), *replicas_note(checkpoint, parts)]
    notes += [] if only in ONLY else note_on_glob(checkpoint, parts, only)
    filled = holes if holes in FILLS else ""
    return Selection(
        tree,
        frozenset(picking.model_paths),
        picking.left_out,
        picking.missing,
        filled,
        notes,
        places,
        checkpoint,
        part=only,
        lost=frozenset(picking.lost),
        carried=picking.carried,
        passed_over=tuple(p for p in concerned if p.kind.lacks == "value" and p.kind not in NOT_SAVED),
    )


class _Picking:
    """Copies a tree for writing: one source per region, foreign objects left out, problems collected."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        holes: str | None,
        prefer_rank: int | None,
        files: OpenFiles,
        damage: Mapping[Record, int] | None,
        dequantize: bool,
    ) -> None:
        self.path, self.files = checkpoint.path, files
        self.damage, self.checks = damage or {}, damage is not None
        self.dequantize = dequantize
        self.dequantized: dict[str, list[str]] = {}
        self.holes, self.prefer_rank = holes, prefer_rank
        self.in_parts = checkpoint.in_parts
        self.problems: list[Problem] = []
        self.left_out: dict[KeyPath, str] = {}
        self.lost: set[KeyPath] = set()
        self.carried: dict[KeyPath, Filled] = {}
        before = checkpoint.provenance.filled if checkpoint.provenance else ()
        self.filled = {one.name: one for one in (*before, *checkpoint.hollow)}
        self.missing: dict[KeyPath, tuple[Box, ...]] = {}
        self.ranks = RankValues(checkpoint, files)
        self.listed: list[KeyPath] = []
        self.spared: list[Problem] = []
        self.model_paths: list[KeyPath] = []
        self.models = sections_of_kind(checkpoint, "model")
        self.cut = {f.path for f in checkpoint.files if f.status in ("cut", "bad")}

    def lose(self, left_out: Mapping[KeyPath, str]) -> None:
        """Leave out what the source has lost."""
        self.left_out |= left_out
        self.lost |= left_out.keys()

    def copy(self, node: Any, source: KeyPath, at: KeyPath) -> Any:
        """Copy what is at `source` in the checkpoint to `at` in the output; `_LEFT_OUT` when it is not written."""
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
            return type(node)(None if v is _LEFT_OUT else v for v in items)
        return self._value(node, at)

    def _by_rank(self, values: Mapping[int, Any], source: KeyPath, at: KeyPath) -> list[Any]:
        """What each rank has for itself, as a list; None where a rank has nothing, or what it has is not written."""
        self.listed.append(source)
        kept = [
            _LEFT_OUT if value is NOTHING else self.copy(value, (*source, rank), (*at, rank))
            for rank, value in enumerate(self.ranks.listed(values))
        ]
        return [None if value is _LEFT_OUT else value for value in kept]

    def _dict(self, node: dict[Any, Any], source: KeyPath, at: KeyPath) -> Any:
        copied = empty_like(node)
        if hasattr(copied, "_metadata") and not is_plain(copied._metadata):
            versions = (*at, "_metadata")
            self.left_out[versions] = "module versions that hold foreign objects"
            del copied._metadata
        elif hasattr(copied, "_metadata"):
            copied._metadata = without_attributes(copied._metadata)
        for key, value in node.items():
            place = (*at, key)
            if isinstance(key, Global) or is_foreign(key):
                self.left_out[place] = f"its key is {key!r:.80}"
                continue
            kept = self.copy(value, (*source, key), place)
            if kept is not _LEFT_OUT:
                copied[key] = kept
        return copied

    def _value(self, node: Any, at: KeyPath) -> Any:
        why = why_foreign(node)
        if why:
            self.left_out[at] = why
            return _LEFT_OUT
        return node

    def _tensor(self, tensor: Tensor, source: KeyPath, at: KeyPath) -> Any:
        fqn = fqn_of(source)
        if tensor.kind == "meta":
            self.left_out[at] = tensor.note
            return _LEFT_OUT
        if tensor.nbytes > MAX_TENSOR:
            raise RefusedError(
                self.path, f"{fqn} would take {describe_for_error(tensor.nbytes)} bytes; no disk holds that"
            )
        if fqn in self.filled and self.holes == "leave":
            self.lose({at: why_not_saved(self.filled[fqn])})
            return _LEFT_OUT
        if fqn in self.filled:
            self.carried[at] = self.filled[fqn]
        tensor = self._decoded(tensor, fqn)
        tensor, damage = without_damaged(tensor, fqn, self.damage)
        problem = cover_problem(tensor, fqn)
        if damage is not None and problem is None:
            self.spared.append(damage)  # another rank's copy is right
        elif damage is not None and problem is not None and problem.kind is Code.TENSOR_GAP:
            problem = damage
        if problem is not None and not self._may_fill(tensor, problem, at):
            return _LEFT_OUT
        chosen = self._replicas(tensor, source)
        self.problems += self._in_cut_files(chosen, fqn) if self.holes is None else []
        if any(s.holds(source) for s in self.models):
            self.model_paths.append(at)
        fill = self.holes or "" if problem is not None else ""
        return replace(tensor, shards=tuple(chosen), fill=fill)

    def _decoded(self, tensor: Tensor, fqn: str) -> Tensor:
        """The tensor of the values of a quantized one, if they are wanted."""
        found = dequantized(tensor) if self.dequantize and tensor.encoded_as else tensor
        if found.note != tensor.note and not found.note:
            for encoded in tensor.encoded_as:
                self.dequantized.setdefault(encoded.name, []).append(fqn)
        return found

    def _may_fill(self, tensor: Tensor, problem: Problem, at: KeyPath) -> bool:
        """Note what is wrong with a tensor; whether it is written all the same, with its holes filled."""
        if problem.kind.lacks == "elements":
            self.missing[at] = cover(tensor.shape, {s.box for s in tensor.found}).gaps
        if self.holes is None:
            self.problems.append(problem)
        elif problem.kind.lacks == "elements" and self.holes in FILLS:
            if self.holes == "zero" or can_be_nan(tensor.dtype):
                return True
            self.lose({at: f"{problem.message}; there is no NaN in {tensor.dtype}"})
            return False
        self.lose({at: problem.message})
        return False

    def _replicas(self, tensor: Tensor, source: KeyPath) -> list[Shard]:
        """One shard per region; the copies of it should be equal."""
        differing = self.ranks.differing(tensor, source)
        if differing and self.checks and self.prefer_rank is None:
            tensor = self._right_copies(tensor, fqn_of(source), differing)
            differing = self.ranks.differing(tensor, source)
        if differing and self.prefer_rank is None:
            copies = next(iter(differing.values()))
            text = f"{copies.text(self.files)}; {IN_PARTS if self.in_parts else COPIES}"
            self.problems.append(Problem(Code.COPIES_DIFFER, text, copies.rank, fqn_of(source), ranks=copies.odd))
        by_box: dict[Box, Shard] = {}
        for shard in sorted(tensor.found, key=self._preference):
            by_box.setdefault(shard.box, shard)
        return sorted(by_box.values(), key=lambda s: s.box.offsets)

    def _right_copies(self, tensor: Tensor, fqn: str, differing: Collection[Box]) -> Tensor:
        """The tensor without copies that are damaged by their checksum, where others are right."""
        copies = (s for s in tensor.found if s.box in differing)
        records = dict.fromkeys(Record.of(source) for s in copies for source in s.sources)
        kept, damage = without_damaged(tensor, fqn, damaged_records(records, self.files, 1, not_told))
        if damage is None or cover_problem(kept, fqn) is not None:
            return tensor
        self.spared.append(damage)
        return kept

    def _preference(self, shard: Shard) -> tuple[bool, bool, int]:
        return (self._is_cut(shard), shard.rank != self.prefer_rank, -1 if shard.rank is None else shard.rank)

    def _is_cut(self, shard: Shard) -> bool:
        return bool(self.cut) and shard.source is not None and shard.source.path in self.cut

    def _in_cut_files(self, chosen: Sequence[Shard], fqn: str) -> Iterator[Problem]:
        """That a tensor is all here, but some of it in a file that is not: the file may be another than was saved."""
        for shard in filter(self._is_cut, chosen):
            assert shard.source is not None
            text = f"{shard.box} lies in {shard.source.path.name}, which is cut short or damaged elsewhere"
            yield Problem(Code.FILE_CUT, text, shard.rank, fqn)

    def notes_for(self, checkpoint: Checkpoint, parts: Iterable[Section]) -> list[str]:
        """What the user should know although nothing is missing."""
        more = [p for p in checkpoint.problems if p.severity == "warning" and p.kind.lacks == "part"]
        return [
            *(p.message for p in more),
            *(f"dequantized, as {name} does: {few(fqns, 1)}" for name, fqns in self.dequantized.items()),
            *spared_note(self.spared),
            *self._of_one_rank(checkpoint, parts),
        ]

    def _of_one_rank(self, checkpoint: Checkpoint, parts: Iterable[Section]) -> list[str]:
        """What each rank has for itself: what is kept of every rank, and what only of the lowest."""
        rest = [p for p in checkpoint.differing if not any(p[: len(kept)] == kept for kept in self.listed)]
        return [
            *_note_on_own(self.listed, f"kept for each of {plural(self.ranks.count, 'rank')}, as a list by rank"),
            *_note_on_own(
                [p for p in rest if any(part.holds(p) for part in parts)], "only the lowest rank's is written"
            ),
        ]


_LEFT_OUT = Opaque("left out")


def _note_on_own(paths: Sequence[KeyPath], what: str) -> list[str]:
    """The note on values that ranks have for themselves."""
    names = first_few(list(map(fqn_of, paths)), MAX_NAMED)
    return [f"{plural(len(paths), 'value')} that ranks have for themselves ({names}): {what}"] if paths else []
