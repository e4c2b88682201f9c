"""Files of two ranks that hold the same bytes for different places of tensors: one was copied over the other.

Where containers state checksums this is seen without reading (`formats.shared.copied_files`). Bare bytes state none, so
the first bytes of some tensors are compared, only of files whose tensors have the same names and sizes. Elements that
are all alike (zeros, ones) prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ckptools.dtypes import ITEMSIZE
from ckptools.files.opening import OpenFiles
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.tensor import Shard, Source, Tensor

SAMPLE = 4096
"""Bytes of each tensor that are compared."""

MAX_COMPARED = 16
"""Tensors that are compared, the largest first."""

MIN_TELLING = 16
"""Elements below which equal files may be chance."""

Held = dict[str, Shard]
"""What a file holds: a shard of each of some tensors, by name."""


def copied_files(tensors: Iterable[tuple[str, Tensor]], files: OpenFiles) -> list[Problem]:
    """A problem for each file that is a copy of another one; `tensors` come with their names.

    Raises:
        ReadError: a file cannot be read.
    """
    held: dict[Path, Held] = {}
    for name, tensor in tensors:
        for shard in tensor.found if tensor.sharded else ():
            if shard.source is not None and not shard.source.crc and shard.source.contiguous and shard.box.numel:
                held.setdefault(shard.source.path, {})[name] = shard
    alike: dict[frozenset[tuple[str, tuple[int, ...]]], list[Path]] = {}
    for path, shards in held.items():
        alike.setdefault(frozenset((name, shard.box.sizes) for name, shard in shards.items()), []).append(path)
    return [problem for paths in alike.values() for problem in _copies_among(paths, held, files)]


def _copies_among(paths: Sequence[Path], held: dict[Path, Held], files: OpenFiles) -> list[Problem]:
    """Files with the same bytes in tensors of other places, of those that hold the same names and sizes."""
    places: dict[frozenset[tuple[str, Box]], Path] = {}
    for path in paths:  # one of each set of replicas
        places.setdefault(frozenset((name, shard.box) for name, shard in held[path].items()), path)
    groups, telling = [list(places.values())], dict.fromkeys(paths, 0)
    first = held[paths[0]]
    for name in sorted(first, key=lambda n: -first[n].box.numel)[:MAX_COMPARED]:
        groups = [part for group in groups if len(group) > 1 for part in _split(group, name, held, files, telling)]
    return [
        Problem(Code.STRAY_FILE, _text(copy, group[0]), held[copy][next(iter(held[copy]))].rank)
        for group in groups
        for copy in group[1:]
        if telling[copy] >= MIN_TELLING
    ]


def _split(
    group: Sequence[Path], name: str, held: dict[Path, Held], files: OpenFiles, telling: dict[Path, int]
) -> list[list[Path]]:
    """The files of a group by the first bytes of one tensor; elements that are not all alike are counted."""
    found: dict[bytes, list[Path]] = {}
    for path in group:
        source = held[path][name].source
        assert source is not None
        data = _beginning(source, files)
        width = ITEMSIZE[source.dtype]
        if data != data[:width] * (len(data) // width):
            telling[path] += len(data) // width
        found.setdefault(data, []).append(path)
    return list(found.values())


def _beginning(source: Source, files: OpenFiles) -> bytes:
    nbytes = ITEMSIZE[source.dtype]
    for n in source.shape:
        nbytes *= n
    with files.open(source.path) as file:
        return file.read(source.offset, min(nbytes, SAMPLE))


def _text(copy: Path, other: Path) -> str:
    return f"{copy.name} has the same bytes as {other.name}, which is another part of the tensors; one is a copy"
