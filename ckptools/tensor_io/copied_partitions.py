"""Files of flat partitions that may be copies of another rank's, where no checksums are stated.

Ranks' pieces of a parameter may differ in size, and then `copied_files` compares none of them; their partitions, padded
to one length, lie at the same places of their files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptools.dtypes import ITEMSIZE
from ckptools.files.opening import OpenFiles
from ckptools.model.problems import Problem
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import with_bytes
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.copied_files import MAX_COMPARED, MIN_VARIED, copied_files, perhaps_copied, split_alike


def copies_without_checksums(tensors: Iterable[tuple[str, Tensor]], files: OpenFiles) -> list[Problem]:
    """A warning for each file that may be a copy of another one; `tensors` come with their names.

    Raises:
        ReadError: a file cannot be read.
    """
    named = list(tensors)
    return copied_files(named, files) or list(copied_partitions(named, files))


def copied_partitions(tensors: Iterable[tuple[str, Tensor]], files: OpenFiles) -> Iterator[Problem]:
    """A warning for each file of flat partitions that may be a copy of another rank's.

    Raises:
        ReadError: a file cannot be read.
    """
    records: dict[Path, dict[Ints, Source]] = defaultdict(dict)
    places: dict[Path, set[tuple[str, Box]]] = defaultdict(set)
    ranks: dict[Path, int | None] = {}
    for name, tensor in tensors:
        for shard in with_bytes(tensor.shards) if tensor.kind == "flat_pieces" else ():
            for source in (source for source in shard.sources if not source.crc and shard.box.numel):
                start, length = source.record_span
                whole = source._replace(offset=start, shape=(length // ITEMSIZE[source.dtype],))
                records[source.path][start, length] = whole
                places[source.path].add((name, shard.box))
                ranks[source.path] = shard.rank
    alike: dict[frozenset[Ints], dict[frozenset[tuple[str, Box]], Path]] = defaultdict(dict)
    for path, of_file in records.items():  # of replicas, which have the same places, one is compared
        alike[frozenset(of_file)].setdefault(frozenset(places[path]), path)
    for spans, paths in alike.items():
        groups, varied = [list(paths.values())], dict.fromkeys(paths.values(), 0)
        for span in sorted(spans, key=lambda span: -span[1])[:MAX_COMPARED]:
            sources = {path: records[path][span] for path in paths.values()}
            groups = [part for group in groups if len(group) > 1 for part in split_alike(group, sources, files, varied)]
        for first, *others in groups:
            for copy in (path for path in others if varied[path] >= MIN_VARIED):
                yield from perhaps_copied(copy, first, ranks[copy])
