"""The pickled objects of a DCP folder: hyperparameters, schedulers, RNG states, data loaders.

Each is a torch.save archive of one value (a planner of one's own may have written a bare pickle), and thousands of
them are the same number. They are read inertly; what cannot be read leaves a `Lost` in its place and a problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.compressed_items import CompressedItem
from ckptools.formats.dcp.files import DataFile
from ckptools.formats.dcp.items import ItemReader
from ckptools.formats.dcp.metadata import Metadata, StoredItem
from ckptools.formats.dcp.other_files import Suspect
from ckptools.formats.shared.merge import Merge
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import KeyPath
from ckptools.model.values import Lost
from ckptools.tensor_io.fetch_ahead import Part, fetched

MAX_SEEN = 64 << 20
"""Bytes of objects that are read where not everything was asked for."""

MAX_UNPACKED = 256 << 20
"""Bytes that compressed objects may unpack to, those of one file; what they hold stays in memory."""

MAX_LOST = 100
"""Lost objects that are named one by one before they are counted."""


def read_objects(
    metadata: Sequence[Metadata],
    here: Mapping[str, DataFile],
    items: ItemReader,
    everything: bool,
    merge: Merge,
    paths: Mapping[str, KeyPath],
) -> tuple[dict[str, Any], list[Problem], list[Suspect]]:
    """Read the pickled objects of a DCP folder by fqn, the problems of those that are lost, and what may be wrong.

    Args:
        metadata: one for all ranks, or one of each.
        here: the data files by the name that the metadata gives them.
        items: reads those files.
        everything: also the large ones.
        merge: what several ranks hold of one object is compared, and noted there.
        paths: where an object lies in the nested state, by fqn.
    """
    reading = _Objects(here, items, None if everything else MAX_SEEN)
    wanted = [
        (one.stored[fqn, None], fqn, at) if (fqn, None) in one.stored else (_NOWHERE, fqn, at)
        for at, one in enumerate(metadata)
        for fqn in one.objects
    ]
    values: dict[str, list[tuple[int, Any]]] = {}
    reading.unpack(stored for stored, _, _ in wanted)
    wanted.sort(key=lambda w: (w[0].file, w[0].offset))
    for stored, fqn, at in fetched(wanted, lambda w: reading.part(w[0])):
        twice = (fqn, None) in metadata[at].twice
        rank = metadata[at].rank
        values.setdefault(fqn, []).append((rank or 0, reading.value(fqn, stored, twice)))
    # An object of which there is one copy is nobody's in particular: merging would say that it is rank 0's.
    joined = {
        fqn: merge.trees(sorted(ranked, key=lambda r: r[0]), paths.get(fqn, (fqn,)))
        if len(ranked) > 1
        else ranked[0][1]
        for fqn, ranked in values.items()
    }
    return joined, reading.problems(), reading.suspects


def _packed(stored: StoredItem) -> CompressedItem:
    return CompressedItem(stored.offset, stored.length, MAX_UNPACKED)


_NOWHERE = StoredItem("", 0, 0)


class _Objects:
    """Reads objects and notes what is lost."""

    def __init__(self, here: Mapping[str, DataFile], items: ItemReader, budget: int | None) -> None:
        self.here, self.items, self.budget = here, items, budget
        self.lost: list[Problem] = []
        self.unread = 0
        self.suspects: list[Suspect] = []

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
        """What reading an object reads."""
        file, end = self.here.get(stored.file), stored.offset + stored.length
        read = file is not None and file.holds(end) and (self.budget is None or self.budget > 0)
        return [(file.path, stored.offset, end)] if file is not None and read else []

    def value(self, fqn: str, stored: StoredItem, twice: bool) -> Any:
        """An object, or what stands for it."""
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
            self.suspects.append(Suspect(fqn, file.path, stored, error))
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
