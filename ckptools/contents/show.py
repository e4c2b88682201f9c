"""Show some keys: values in full and by rank, tensors with their shards, a few figures, elements of a slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckptools.contents.pickled_bytes import with_inside
from ckptools.contents.record import KeyRow, RankValue, Shown, ShownKey
from ckptools.contents.shards import holes, shard_rows, stated_row
from ckptools.contents.tree import described, full_value, is_short, key_rows
from ckptools.errors import NotWholeError, ReadError, UsageError
from ckptools.files.opening import OpenFiles
from ckptools.formats import options
from ckptools.keys.entries import KINDS, Entry, asks_for_private, entries_of, is_glob, is_private, matching, pattern
from ckptools.keys.random_states import stream_rows
from ckptools.keys.rank_leaves import leaves_of
from ckptools.keys.value_digests import content_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.item_shards import ItemShards
from ckptools.model.records import Rows
from ckptools.model.shard import in_rank_order
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, is_within
from ckptools.model.values import Absent
from ckptools.tensor_io.dcp_items import ItemLocator, with_items_read
from ckptools.text import no_such_key
from ckptools.training_state.sections import sections_of

SMALL = 1 << 20
"""Figures are computed for tensors of at most this many elements."""

MANY = 16
"""With more tensors than this, no figures are computed."""

FIGURES = ("rms", "l2", "min", "max", "mean", "std", "zeros", "nan", "inf", "elements")

NOTHING = Absent()


def show(
    ck: Checkpoint,
    keys: Sequence[str],
    values: str | None = None,
    private: bool = False,
    all_ranks: bool = False,
    with_all_ranks: Callable[[], Checkpoint] | None = None,
) -> Shown:
    """Show some keys; the row of a tensor says what cannot be read.

    Args:
        ck: the checkpoint; the structure of one rank may be enough.
        keys: names, beginnings of names, kinds of sections, or globs.
        values: a slice of each tensor whose elements are read, such as `0:4,:8`.
        private: show also values whose names begin with `_`.
        all_ranks: read every rank's structure for any key.
        with_all_ranks: opens the checkpoint with every rank's structure. By default it is called for tensors, random
            states and values that each rank may have for itself; for values that all ranks share (settings of an
            optimizer, a scheduler) only up to `options.MAX_RANKS` ranks. None if `ck` has every rank's structure.

    Raises:
        UsageError: a key does not exist, or `values` is no slice of its tensor.
    """
    if values is not None and not isinstance(values, str):  # such as values=True, as `verify` takes it
        raise UsageError(None, f"--values {values!r}: expected a slice such as '0:4,:8'")
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


def stated(ck: Checkpoint, keys: Iterable[tuple[KeyRow, Any]]) -> Shown:
    """Rows of keys, each with its value, as the structure states them: no file is opened.

    So a shard may lack its place in its file, and nothing is said about holes.
    """
    rows = Rows(_as_stated(row, value) for row, value in keys)
    names = tuple(row.name for row in rows)
    return Shown(ck.path, ck.name, names, 0, len(_ranks(ck, "seen", "listed")), 0, Rows(), rows)


def _as_stated(row: KeyRow, value: Any) -> ShownKey:
    if not isinstance(value, Tensor):
        return ShownKey(*row)._replace(value=full_value(value))
    return ShownKey(*row, tuple(stated_row(shard, value.dtype) for shard in in_rank_order(value.shards)))


def _rows(ck: Checkpoint, entries: Sequence[Entry], values: str | None) -> Rows[ShownKey]:
    tensors = sum(isinstance(entry.value, Tensor) for entry in entries)
    rows: list[ShownKey] = []
    locator = ItemLocator()
    with OpenFiles() as files:
        unequal = UnequalValues(ck, files)
        entries = entries if values is not None else [_as_weight(ck, entry, files) for entry in entries]
        found = list(with_inside(entries, ck.path))
        for row, (entry, is_inside) in zip(key_rows(ck, (entry for entry, _ in found)), found, strict=True):
            value = with_items_read(entry.value, locator, files) if isinstance(entry.value, Tensor) else entry.value
            shown = _shown(row, value, values, tensors)
            rows.append(shown._replace(shards=()) if is_inside else shown._replace(ranks=unequal.at(entry)))
    return Rows(rows)


def _as_weight(ck: Checkpoint, entry: Entry, files: OpenFiles) -> Entry:
    """The entry, with the weight in the place of codes that bitsandbytes packed."""
    if not isinstance(entry.value, Tensor) or not entry.value.are_codes:
        return entry
    from ckptools.training_state.packed_values import weight_at  # needs numpy

    weight = weight_at(ck.tree, entry.path, files)
    return entry if weight is None else entry._replace(value=weight)


def _chosen(ck: Checkpoint, keys: Iterable[str]) -> list[Entry]:
    names = {entry.name for key in keys for entry in entries_at(ck, key)}
    return [entry for entry in entries_of(ck) if entry.name in names]


def _needs_all_ranks(ck: Checkpoint, keys: Sequence[str]) -> bool:
    """Whether other ranks' files may have more: keys, shards and copies of a tensor, or values of their own."""
    try:
        entries = _chosen(ck, keys)
    except UsageError:
        return bool(_ranks(ck, "seen", "listed"))
    tensors = [entry.value for entry in entries if isinstance(entry.value, Tensor)]
    if any(entry.kind == "rng" for entry in entries) or not all(isinstance(t.shards, ItemShards) for t in tensors):
        return True
    if len(tensors) == len(entries):  # one file lists the shards of all ranks
        return False
    few = len({file.rank for file in ck.files}) <= options.MAX_RANKS
    return bool(_ranks(ck, "seen", "listed")) and (few or any(entry.kind == "other" for entry in entries))


def _ranks(ck: Checkpoint, *status: str) -> set[int]:
    """Ranks with files of a given status, none of which was read; none if the files read belong to no rank."""
    read = {file.rank for file in ck.files if file.status == "read" and file.rank is not None}
    found = {file.rank for file in ck.files if file.status in status and file.rank is not None}
    return found - read if read else set()


def _shown(row: KeyRow, value: Any, values: str | None, tensors: int) -> ShownKey:
    if not isinstance(value, Tensor):
        return ShownKey(*row)._replace(value=full_value(value))
    shards = shard_rows(value)
    gaps, missing = holes(value, shards)
    unreadable = dict.fromkeys(f"rank {s.rank}: {s.note}" for s in shards if s.status == "unreadable")
    shown = ShownKey(*row, shards, gaps, missing, problem="; ".join(unreadable))
    if values is not None:
        return _with_elements(shown, value, values, alone=tensors == 1)
    return _with_figures(shown, value) if tensors <= MANY else shown


def _with_elements(shown: ShownKey, tensor: Tensor, values: str, alone: bool) -> ShownKey:
    """Add the elements of a slice; with several tensors, a slice that does not fit is a problem in the row."""
    from ckptools.contents.slices import elements

    try:
        return shown._replace(slice=values, values=elements(tensor, values))
    except (NotWholeError, ReadError, UsageError) as error:
        if alone and isinstance(error, UsageError):
            raise
        return shown._replace(slice=values, problem=error.reason)


def _with_figures(shown: ShownKey, tensor: Tensor) -> ShownKey:
    here = any(shard.status == "here" for shard in shown.shards)
    if shown.kind == "rng" or tensor.encoded_as or not 0 < tensor.numel <= SMALL or not here:
        return shown
    from ckptools.stats.figures import tensor_stats

    found = tensor_stats(tensor, shown.name)
    figures = {name: getattr(found, name) for name in FIGURES}
    return shown._replace(
        statistics=figures if found.elements else None,
        problem=shown.problem or ("" if shown.missing else found.problem),
    )


# -- the entries of a KEY: a name, the beginning of names, a kind of section, or a glob ---------------------------


def entries_at(ck: Checkpoint, key: str) -> list[Entry]:
    """Find the entry of this name and those below it, whose names go on with a dot.

    Without any, the key may be a glob (none in a checkpoint without keys) or begin with a kind of section:
    `optimizer.param_groups` is that of the section `optimizers.AdamW`, `model` is all of the model.

    Raises:
        UsageError: there are none; the message has the nearest name.
    """
    entries = entries_of(ck)
    found = _beginning(entries, key) or (matching(entries, key) if is_glob(key) else []) or _of_kind(ck, key)
    if not found and (entries or not is_glob(key)):
        names = [*(entry.name for entry in entries), *(section.name for section in sections_of(ck))]
        raise UsageError(ck.path, f"{no_such_key(key, names)}; ckptools tree lists all")
    return found


def _beginning(entries: Sequence[Entry], key: str) -> list[Entry]:
    found = [entry for entry in entries if is_within(entry.name, key)]
    return found or [e for e in entries if any(is_within(name, key) for name in e.names)]


def _of_kind(ck: Checkpoint, key: str) -> list[Entry]:
    """The entries for a key that is the name of a section or begins with a kind of section."""
    kind, _, rest = key.partition(".")
    own = [entry for entry in entries_of(ck) if entry.section == key]
    if own or kind not in KINDS:
        return own
    inside = [entry for entry in entries_of(ck) if entry.kind == kind]
    if is_glob(rest):
        wanted = pattern((rest,))
        return [entry for entry in inside if wanted.fullmatch(entry.inside)]
    return [entry for entry in inside if not rest or is_within(entry.inside, rest)]


# -- values that differ between ranks -----------------------------------------------------------------------------


class UnequalValues:
    """Find the values of a checkpoint that differ between ranks."""

    def __init__(self, ck: Checkpoint, files: OpenFiles) -> None:
        self._files = files
        self._by_path = {**ck.unequal, **ck.per_rank}
        self._leaves: dict[KeyPath, Mapping[int, Mapping[KeyPath, Any]]] = {}

    def at(self, entry: Entry) -> tuple[RankValue, ...]:
        """A row for each distinct value, the lowest rank first; none if no rank is known to differ, or for tensors."""
        above = next((entry.path[:n] for n in range(len(entry.path) + 1) if entry.path[:n] in self._by_path), None)
        if above is None or isinstance(entry.value, Tensor):
            return ()
        if above not in self._leaves:
            self._leaves[above] = {rank: dict(leaves_of(value)) for rank, value in self._by_path[above].items()}
        below = entry.path[len(above) :]
        values = {rank: leaves.get(below, NOTHING) for rank, leaves in self._leaves[above].items()}
        ranks: dict[Any, list[int]] = {}
        for rank in sorted(values):
            found = None if isinstance(values[rank], Absent) else content_of(values[rank], self._files)
            ranks.setdefault(found and (found.digest or found), []).append(rank)
        return tuple(_row(of, values[of[0]]) for of in ranks.values()) if len(ranks) > 1 else ()


def _row(ranks: Iterable[int], value: Any) -> RankValue:
    if isinstance(value, Absent):
        return RankValue(tuple(ranks), None, "nothing there")
    return RankValue(tuple(ranks), full_value(value), "" if is_short(value) else described(value))
