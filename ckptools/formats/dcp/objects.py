"""The pickled objects of a DCP folder: hyperparameters, schedulers, RNG states, data loaders.

Each is a torch.save archive of one value (a custom planner may have written a bare pickle), and thousands of them are
the same number. They are read inertly; an unreadable one becomes a `Lost` and a problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.compressed import CompressedItem
from ckptools.formats.dcp.files import DataFile
from ckptools.formats.dcp.items import ItemReader
from ckptools.formats.dcp.metadata import DcpMetadata, StoredItem
from ckptools.formats.dcp.other_files import SuspectFile
from ckptools.formats.shared.merge import Merge
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import KeyPath
from ckptools.model.values import Lost
from ckptools.tensor_io.fetch_ahead import Part, fetched

MAX_SEEN = 64 << 20
"""Most bytes of objects that are read unless everything is asked for."""

MAX_UNPACKED = 256 << 20
"""Most bytes that the compressed objects of one file may unpack to; they stay in memory."""

MAX_LOST = 100
"""At most this many lost objects are named, the others counted."""


def read_objects(
    metadata: Sequence[DcpMetadata],
    here: Mapping[str, DataFile],
    items: ItemReader,
    everything: bool,
    merge: Merge,
    paths: Mapping[str, KeyPath],
) -> tuple[dict[str, Any], list[Problem], list[SuspectFile]]:
    """Read the pickled objects of a DCP folder by fqn, with the problems of lost ones, and suspect items.

    Args:
        metadata: one for all ranks, or one of each.
        here: the data files by the name that the metadata gives them.
        items: reads those files.
        everything: read large ones too.
        merge: compares the values of several ranks for one object.
        paths: key path in the nested state, by fqn.
    """
    reading = _Objects(here, items, None if everything else MAX_SEEN)
    wanted = [(*_place(one, fqn), fqn, one.rank or 0) for one in metadata for fqn in one.objects]
    values: dict[str, list[tuple[int, Any]]] = {}
    reading.unpack(stored for stored, *_ in wanted)
    wanted.sort(key=lambda w: (w[0].file, w[0].offset))
    for stored, twice, fqn, rank in fetched(wanted, lambda w: reading.part(w[0])):
        values.setdefault(fqn, []).append((rank, reading.value(fqn, stored, twice)))
    # A single copy belongs to no rank in particular: merging would call it rank 0's.
    joined = {
        fqn: merge.trees(sorted(ranked, key=lambda r: r[0]), paths.get(fqn, (fqn,)))
        if len(ranked) > 1
        else ranked[0][1]
        for fqn, ranked in values.items()
    }
    return joined, reading.problems(), reading.suspects


def _place(metadata: DcpMetadata, fqn: str) -> tuple[StoredItem, bool]:
    """Where an object lies, and whether the metadata says so twice."""
    found, twice = metadata.stored.of(fqn)
    return metadata.stored[found[None]] if None in found else _NOWHERE, None in twice


def _packed(stored: StoredItem) -> CompressedItem:
    return CompressedItem(stored.offset, stored.length, MAX_UNPACKED)


_NOWHERE = StoredItem("", 0, 0)


class _Objects:
    """Reads objects and records the lost ones."""

    def __init__(self, here: Mapping[str, DataFile], items: ItemReader, budget: int | None) -> None:
        self.here, self.items, self.budget = here, items, budget
        self.lost: list[Problem] = []
        self.unread = 0
        self.suspects: list[SuspectFile] = []

    def unpack(self, wanted: Iterable[StoredItem]) -> None:
        """Unpack the compressed objects of each file together."""
        packed: dict[str, list[CompressedItem]] = {}
        for stored in wanted:
            file = self.here.get(stored.file)
            if stored.zstd and not stored.unreadable and file is not None and file.holds(stored.offset + stored.length):
                packed.setdefault(stored.file, []).append(_packed(stored))
        for name, parts in packed.items():
            self.items.unpack(self.here[name].path, parts, MAX_UNPACKED)

    def part(self, stored: StoredItem) -> list[Part]:
        """Byte ranges that reading an object needs."""
        file, end = self.here.get(stored.file), stored.offset + stored.length
        read = file is not None and file.holds(end) and (self.budget is None or self.budget > 0)
        return [(file.path, stored.offset, end)] if file is not None and read else []

    def value(self, fqn: str, stored: StoredItem, twice: bool) -> Any:
        """Return an object, or its stand-in."""
        file = self.here.get(stored.file)
        if file is None or twice:
            return self._lost(fqn, f"the metadata says {'twice' if twice else 'nowhere'} where it lies", None)
        if not file.holds(stored.offset + stored.length):
            return self._lost(fqn, f"lies in {stored.file}, which is {file.state}", file.rank)
        if stored.unreadable:
            return self._lost(fqn, stored.unreadable, file.rank)
        if self.budget is not None:
            self.budget -= stored.length
            if self.budget < 0:
                self.unread += 1
                return Lost("not read")
        try:
            if stored.zstd:
                return self.items.unpacked_value(file.path, _packed(stored))
            return self.items.value(file.path, stored.offset, stored.length)
        except ReadError as error:
            self.suspects.append(SuspectFile(fqn, file.path, stored, error))
            return self._lost(fqn, self.items.why(error), file.rank)

    def _lost(self, fqn: str, why: str, rank: int | None) -> Lost:
        self.lost.append(Problem(Code.VALUE_LOST, why, rank, fqn))
        return Lost("lost")

    def problems(self) -> list[Problem]:
        """The lost objects, and a note where some were not read."""
        problems = self.lost[:MAX_LOST]
        if len(self.lost) > MAX_LOST:
            problems.append(Problem(Code.VALUE_LOST, f"{len(self.lost) - MAX_LOST} more objects are lost"))
        if self.unread:
            text = f"{self.unread} large objects were not read; --all-ranks reads them"
            problems.append(Problem(Code.VALUE_LOST, text, severity="note"))
        return problems
