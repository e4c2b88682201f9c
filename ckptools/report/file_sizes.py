"""Add up a checkpoint: the size of its files is the bytes of its tensors, and what surrounds them.

The sizes of sections are of global tensors, each counted once. The files may hold more (copies on several ranks, the
pickles, padding) or less (a file is missing). Every difference has a line, so that the lines add up to the byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import TangledLayoutError, cover
from ckptools.model.facts import RankFile
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.training_state.sections import measure, sections_of, storage_identity

UNKNOWN = "in damaged files, outside of readable tensors"
"""Name of bytes that may be of lost tensors or overhead."""


class FileSize(NamedTuple):
    """A file of a checkpoint: the bytes of tensors in it, and all others (pickles, directories, padding)."""

    file: RankFile
    tensors: int

    @property
    def others(self) -> int:
        """Bytes of the file that belong to no tensor that could be read."""
        return self.file.nbytes - self.tensors

    @property
    def overhead(self) -> int | None:
        """Bytes of the file that belong to no tensor; None for a damaged file, where they may be of lost tensors."""
        return self.others if self.file.is_here else None


class SizeLine(NamedTuple):
    """A number of bytes with its name; `total` if it is the sum of the lines since the last total, that included."""

    name: str
    nbytes: int
    total: bool = False


class FileSizes(NamedTuple):
    """The sizes of a checkpoint's files."""

    files: tuple[FileSize, ...]
    lines: tuple[SizeLine, ...]

    @property
    def words(self) -> str:
        """State that the files are tensors and overhead, with bytes that add up: `2,985,940 B of files = …`."""
        nbytes = sum(one.file.nbytes for one in self.files)
        tensors = sum(one.tensors for one in self.files)
        parts = [f"{tensors:,} B of tensors", f"{self.overhead:,} B of overhead"]
        parts += [f"{self.unknown:,} B {UNKNOWN}"] if self.unknown else []
        return f"{nbytes:,} B of files = {' + '.join(parts)}"

    @property
    def overhead(self) -> int:
        """Bytes that belong to no tensor, of the files that are not damaged."""
        return sum(one.overhead or 0 for one in self.files)

    @property
    def unknown(self) -> int:
        """Bytes of damaged files outside of the tensors that could be read."""
        return sum(one.others for one in self.files if one.overhead is None)


def file_sizes(ck: Checkpoint) -> FileSizes | None:
    """Add up the files of a checkpoint that was opened with all ranks; no file is read.

    None if the bytes of tensors in the files are not known: of compressed files, and of URLs whose size is unknown.
    """
    spans = _Spans()
    every = dict.fromkeys(file.path for file in ck.files)
    copies = absent = 0
    for section in sections_of(ck):
        seen = set()
        for _, tensor in tensors_in(section.value):
            identity = storage_identity(tensor)
            if identity is not None and identity in seen:
                continue  # a tied weight counts once, as in the sizes of sections
            seen.add(identity)
            stored = spans.add(tensor)
            held = _held(tensor)
            copies += stored - held
            absent += tensor.nbytes - held
    if spans.compressed:
        return None
    found = spans.by_file()
    files = [FileSize(f, found.pop(f.path, 0)) for f in ck.files if f.status != "missing"]
    if found.keys() - every.keys() or any(one.others < 0 for one in files):
        return None
    sections = [SizeLine(s.name, nbytes) for s in sections_of(ck) if (nbytes := measure(s.value).nbytes)]
    whole, inside = sum(line.nbytes for line in sections), sum(one.tensors for one in files)
    shared = inside - (whole + copies - absent)
    further = (
        ("further copies of them", copies),
        ("in no file here", -absent),
        ("stored in another form, or once for several tensors", shared),
    )
    own = [SizeLine(name, nbytes) for name, nbytes in further if nbytes]
    lines = [*sections, SizeLine("tensors, each once", whole, True), *own]
    lines += [SizeLine("tensors in the files", inside, True)] if own else []
    sizes = FileSizes(tuple(files), ())
    lines.append(SizeLine("overhead: pickles, directories, padding", sizes.overhead))
    lines += [SizeLine(UNKNOWN, sizes.unknown)] if sizes.unknown else []
    return sizes._replace(lines=(*lines, SizeLine("files", sum(one.file.nbytes for one in files), True)))


class _Spans:
    """Bytes of tensors as spans of files; bytes that several tensors share are in each of their spans."""

    def __init__(self) -> None:
        self.compressed = False
        self._spans: dict[Path, list[tuple[int, int]]] = defaultdict(list)

    def add(self, tensor: Tensor) -> int:
        """Add the shards of a tensor that are in files; return the bytes of their values."""
        extents, itemsize, total = tensor.extents, ITEMSIZE[tensor.dtype], 0
        layouts = extents.layouts or [None] * len(extents)
        for n, (sizes, file, start, layout) in enumerate(
            zip(extents.sizes, extents.files, extents.starts, layouts, strict=True)
        ):
            if n in extents.located:
                self._add_shard(extents.located[n])
                total += prod(sizes) * itemsize
            elif file.path is not None and (nbytes := prod(sizes) * itemsize):
                self.compressed |= file.zstd
                self._spans[file.path].append((start + (layout.offset if layout else 0), nbytes))
                total += nbytes
        return total

    def _add_shard(self, shard: Shard) -> None:
        """Add a shard that may have another dtype than its tensor, or codes and scales instead of values."""
        self.compressed |= shard.item is not None and shard.item.zstd
        for source in shard.sources:
            self._spans[source.path].append((source.offset, prod(source.shape) * ITEMSIZE[source.dtype]))

    def by_file(self) -> dict[Path, int]:
        """Count the bytes of each file that belong to a tensor; bytes that several tensors share count once."""
        return {path: sum(_joined(spans)) for path, spans in self._spans.items()}


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yield the number of bytes that each span adds to the spans that begin before it."""
    end = 0
    for start, nbytes in sorted(spans):
        yield max(start + nbytes - max(start, end), 0)
        end = max(end, start + nbytes)


def _held(tensor: Tensor) -> int:
    """Count the bytes of a tensor that are in some file, each once."""
    if tensor.lies_in_a_row:
        return tensor.nbytes
    extents = tensor.extents
    boxes = {shard.box for shard in extents if shard.is_here and shard.box.numel}
    try:
        missing = cover(tensor.shape, boxes).missing
    except TangledLayoutError:
        missing = max(tensor.numel - sum(box.numel for box in boxes), 0)
    return (tensor.numel - missing) * ITEMSIZE[tensor.dtype]
