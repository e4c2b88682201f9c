"""Location of the values in many items at once: of those that differ from others of their kind in their values only.

What `ItemLocator` compares item by item is compared here by column: what lies before the values, and what lies behind
them but for the checksums of records that are not read. An item that differs in any of it is left to `Locator`, which
looks at it closely.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ckptools.errors import ReadError
from ckptools.files.opening import File
from ckptools.formats.dcp.items import ItemReader
from ckptools.model.extents import ExtentFile, Extents, take
from ckptools.tensor_io.dcp_items import ItemKind, ItemTemplate

AT_ONCE = 4000
"""Items of which the bytes around the values are in memory together, about 1 KB each."""

Numbers = npt.NDArray[np.int64]
T = TypeVar("T", bound=Hashable)


class AlikeItems:
    """Items of some tensors, by column.

    Attributes:
        shards: those of each tensor by fqn.
        places: the numbers of the shards whose items these are: archives in files on the local disk.
        files: those files, by number.
        kinds: the kinds of the items, by number.
        file: the number of the file of each item.
        start: the byte offset of each.
        kind: the number of the kind of each.
    """

    def __init__(self, shards: Mapping[str, Extents], places: Mapping[str, Sequence[int]]) -> None:
        self.shards, self.places = shards, places
        files, kinds = dict[ExtentFile, int](), dict[ItemKind, int]()
        file, start, kind = list[int](), list[int](), list[int]()
        for fqn, of_tensor in places.items():
            one = shards[fqn]
            of_items = list(zip(take(one.lengths, of_tensor), repeat(one.dtype), take(one.sizes, of_tensor)))
            file += _numbered(take(one.files, of_tensor), files)
            start += take(one.starts, of_tensor)
            kind += _numbered(of_items, kinds)
        self.files, self.kinds = list(files), list(kinds)
        self.file, self.start, self.kind = (np.array(column, np.int64) for column in (file, start, kind))

    def locate(self, items: ItemReader) -> None:
        """Note where values lie, and the CRC-32 of their records."""
        order = np.lexsort((self.start, self.file))
        self._learn(items, order)
        templates = [items.locator.template(kind) for kind in self.kinds]
        sizes = np.array([(len(of.head), of.nbytes, of.directory_at) if of else (0, 0, 0) for of in templates])
        order = order[sizes[self.kind[order], 1] > 0]
        found, crcs = np.zeros(len(self.kind), bool), np.zeros(len(self.kind), np.uint32)
        for of_file in np.split(order, np.flatnonzero(np.diff(self.file[order])) + 1) if len(order) else ():
            path = self.files[self.file[of_file[0]]].path
            for at in range(0, len(of_file), AT_ONCE):
                rows = of_file[at : at + AT_ONCE]
                with suppress(ReadError):  # `Locator` meets it again
                    assert path is not None
                    file, starts, kinds = items.open(path), self.start[rows], self.kind[rows]
                    found[rows], crcs[rows] = _compared(file, starts, kinds, templates, sizes[kinds])
        self._note(found, crcs, templates)

    def _learn(self, items: ItemReader, order: Numbers) -> None:
        """Look closely at the first two of several items of a kind: the second shows what they have in common."""
        order = order[np.argsort(self.kind[order], kind="stable")]
        firsts = np.flatnonzero(np.diff(self.kind[order], prepend=-1))
        firsts = firsts[np.diff(firsts, append=len(order)) > 2]
        ends = np.cumsum([len(places) for places in self.places.values()])
        listed = list(self.places.items())
        for row in order[np.sort(np.concatenate([firsts, firsts + 1]))].tolist():
            number = int(np.searchsorted(ends, row, "right"))
            fqn, places = listed[number]
            with suppress(ReadError):  # `Locator` meets it again
                items.locate(fqn, self.shards[fqn][places[row - int(ends[number])]])

    def _note(
        self, found: npt.NDArray[np.bool_], crcs: npt.NDArray[np.uint32], templates: Sequence[ItemTemplate | None]
    ) -> None:
        layouts = [*(template.layout if template is not None else None for template in templates), None]
        numbers, end = np.where(found, self.kind, len(templates)), 0
        for fqn, places in self.places.items():
            shards, rows = self.shards[fqn], slice(end, end := end + len(places))
            of_items = list(map(layouts.__getitem__, numbers[rows].tolist()))
            if len(places) == len(shards):
                shards.layouts, shards.crcs = of_items, array("I", crcs[rows].tobytes())
                continue
            shards.expect_layouts()
            for i, layout, crc in zip(places, of_items, crcs[rows].tolist(), strict=True):
                shards.layouts[i], shards.crcs[i] = layout, crc


def _numbered(column: Sequence[T], numbers: dict[T, int]) -> Iterable[int]:
    """The number of each value of a column; a new one has the next number."""
    for value in {*column} - numbers.keys():
        numbers[value] = len(numbers)
    return map(numbers.__getitem__, column)


def _compared(
    file: File, starts: Numbers, kinds: Numbers, templates: Sequence[ItemTemplate | None], sizes: Numbers
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint32]]:
    """Which items of a file, by ascending offsets, are like others; and the CRC-32 of their records.

    `sizes` has of each item the bytes before its values, the bytes of its directory, and the offset of that.

    Raises:
        ReadError: the file cannot be read.
    """
    heads, nbytes, behind = sizes.T
    behind = starts + behind
    follows = np.append(False, (behind + nbytes)[:-1] == starts[1:])
    # What comes before the values of an item is read with the end of the one before it.
    tails = file.read_rows(behind.tolist(), (nbytes + np.append(np.where(follows, heads, 0)[1:], 0)).tolist())
    fronts = [tail[n:] for tail, n in zip([b"", *tails], [0, *nbytes.tolist()], strict=False)]
    alone = np.flatnonzero(~follows)
    for i, front in zip(alone.tolist(), file.read_rows(starts[alone].tolist(), heads[alone].tolist()), strict=True):
        fronts[i] = front
    found, crcs = np.zeros(len(starts), bool), np.zeros(len(starts), np.uint32)
    for kind in np.unique(kinds).tolist():
        rows, template = np.flatnonzero(kinds == kind), templates[kind]
        assert template is not None
        found[rows] = list(map(template.head.__eq__, take(fronts, rows.tolist())))
        joined = b"".join([tail[: template.nbytes] for tail in take(tails, rows.tolist())])
        if len(joined) < len(rows) * template.nbytes:
            raise ReadError(file.path, "became shorter while it was read")
        read = np.frombuffer(joined, np.uint8).reshape(len(rows), -1)
        differs = read != np.frombuffer(template.tail, np.uint8)
        for at in template.loose:
            differs[:, at : at + 4] = False
        if differs.any():
            found[rows] &= ~differs.any(axis=1)
        crcs[rows] = read[:, template.crc_at : template.crc_at + 4].copy().view("<u4")[:, 0]
    return found, np.where(found, crcs, 0)
