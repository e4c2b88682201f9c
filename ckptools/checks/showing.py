"""What is at some keys: values in full, tensors with their shards, a few figures and the elements of a slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ckptools.contents.entries import Entry, entries_of
from ckptools.contents.keys import key_rows
from ckptools.contents.lookup import entries_at
from ckptools.contents.private_values import asks_for_private, is_private
from ckptools.contents.random_states import stream_rows
from ckptools.contents.shards import holes, shard_rows
from ckptools.contents.unequal_values import UnequalValues
from ckptools.contents.values import full_value
from ckptools.errors import NotWholeError, ReadError, UsageError
from ckptools.files.opening import OpenFiles
from ckptools.formats import options
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.keys import KeyRow
from ckptools.model.rows import Rows
from ckptools.model.shown import Shown, ShownKey
from ckptools.model.tensor import Tensor

SMALL = 1 << 20
"""Elements of the largest tensor of which figures are taken unasked."""

MANY = 16
"""Of more tensors than this no figures are taken."""

FIGURES = ("rms", "l2", "min", "max", "mean", "std", "zeros", "nan", "inf", "elements")


def show(
    ck: Checkpoint,
    keys: Sequence[str],
    values: str | None = None,
    private: bool = False,
    all_ranks: bool = False,
    with_all_ranks: Callable[[], Checkpoint] | None = None,
) -> Shown:
    """What is at some keys. What cannot be read of a tensor is said in its row.

    Args:
        ck: the checkpoint; the structure of one rank may do.
        keys: names, beginnings of names, kinds of sections, or globs.
        values: a slice of each tensor whose elements are read, such as `0:4,:8`.
        private: show also values whose names begin with `_`.
        all_ranks: read every rank's structure, whatever is asked for.
        with_all_ranks: opens it with every rank's structure, which is otherwise done for tensors, random states and
            what may be each rank's own; for what all ranks share (settings of an optimizer, a scheduler) where there
            are at most `options.MAX_RANKS`. None where `ck` has it.

    Raises:
        UsageError: nothing is at a key, or it is no slice of its tensor.
    """
    if with_all_ranks is not None and (all_ranks or _needs_all_ranks(ck, keys)):
        ck = with_all_ranks()
    chosen = _chosen(ck, keys)
    asked = private or asks_for_private(keys)
    shown = [entry for entry in chosen if asked or not is_private(entry)]
    streams = stream_rows(ck, {entry.section for entry in shown if entry.kind == "rng"})
    gathered = all(entry.kind == "rng" for entry in shown)
    known = {rank for row in streams for rank in row.fingerprints} if gathered else set()
    return Shown(
        path=ck.path,
        name=ck.name,
        keys=tuple(keys),
        private=len(chosen) - len(shown),
        not_read=len(_ranks(ck, "seen", "listed")),
        lost=sum(str(rank) not in known for rank in _ranks(ck, "missing", "cut", "bad")),
        streams=streams,
        rows=_rows(ck, shown, values),
    )


def _rows(ck: Checkpoint, entries: Sequence[Entry], values: str | None) -> Rows[ShownKey]:
    tensors = sum(isinstance(entry.value, Tensor) for entry in entries)
    rows = zip(key_rows(ck, entries), entries, strict=True)
    with OpenFiles() as files:
        unequal = UnequalValues(ck, files)
        return Rows(_shown(row, entry.value, values, tensors)._replace(ranks=unequal.at(entry)) for row, entry in rows)


def _chosen(ck: Checkpoint, keys: Iterable[str]) -> list[Entry]:
    """The entries that some keys mean, each once, in the order of the checkpoint."""
    names = {entry.name for key in keys for entry in entries_at(ck, key)}
    return [entry for entry in entries_of(ck) if entry.name in names]


def _needs_all_ranks(ck: Checkpoint, keys: Sequence[str]) -> bool:
    """Whether other ranks' files have more to tell: keys, shards and copies of a tensor, or values of their own."""
    try:
        entries = _chosen(ck, keys)
    except UsageError:
        return bool(_ranks(ck, "seen", "listed"))
    if any(entry.kind == "rng" or isinstance(entry.value, Tensor) for entry in entries):
        return True
    few = len({file.rank for file in ck.files}) <= options.MAX_RANKS
    return bool(_ranks(ck, "seen", "listed")) and (few or any(entry.kind == "other" for entry in entries))


def _ranks(ck: Checkpoint, *status: str) -> set[int]:
    """Ranks that have files of some status and none that was read; none where what was read is no rank's own."""
    read = {file.rank for file in ck.files if file.status == "read" and file.rank is not None}
    found = {file.rank for file in ck.files if file.status in status and file.rank is not None}
    return found - read if read else set()


def _shown(row: KeyRow, value: Any, values: str | None, tensors: int) -> ShownKey:
    if not isinstance(value, Tensor):
        return ShownKey(*row)._replace(value=full_value(value))
    shards = shard_rows(value)
    gaps, missing = holes(value, shards)
    told = ShownKey(*row, shards, gaps, missing, problem="; ".join(dict.fromkeys(_unreadable(shards))))
    if values is not None:
        return _with_elements(told, value, values, alone=tensors == 1)
    return _with_figures(told, value) if tensors <= MANY else told


def _unreadable(shards: Iterable[Any]) -> Iterable[str]:
    return (f"rank {s.rank}: {s.note}" for s in shards if s.status == "unreadable")


def _with_elements(told: ShownKey, tensor: Tensor, values: str, alone: bool) -> ShownKey:
    """The row with the elements of a slice; one that does not fit one of several tensors is said in its row."""
    from ckptools.contents.slices import elements

    try:
        return told._replace(slice=values, values=elements(tensor, values))
    except (NotWholeError, ReadError) as error:
        return told._replace(slice=values, problem=error.reason)
    except UsageError as error:
        if alone:
            raise
        return told._replace(slice=values, problem=error.reason)


def _with_figures(told: ShownKey, tensor: Tensor) -> ShownKey:
    """The row with figures, where the tensor is small and its bytes are here."""
    if (
        told.kind == "rng"
        or tensor.encoded_as
        or not 0 < tensor.numel <= SMALL
        or not any(s.status == "here" for s in told.shards)
    ):
        return told
    from ckptools.checks.statistics.values import tensor_stats

    found = tensor_stats(tensor, told.name)
    figures = {name: getattr(found, name) for name in FIGURES}
    return told._replace(
        statistics=figures if found.elements else None, problem=told.problem or ("" if told.missing else found.problem)
    )
