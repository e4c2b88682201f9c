"""Files that are copies of others under another rank's name, where nothing states a checksum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ckptools.files.opening import OpenFiles
from ckptools.model.regions import Box
from ckptools.model.source import ItemLayout
from ckptools.model.tensor import HoldingFile, ItemShards, Shard, Source, Tensor
from ckptools.tensor_io.copied_files import copied_files

ROWS = 40


def of_ranks(folder: Path, *pieces: np.ndarray, boxes: tuple[int, ...] | None = None) -> Tensor:
    """A tensor of which each rank has some rows in a file of bare floats."""
    shards = []
    for rank, piece in enumerate(pieces):
        path = folder / f"{rank}.bin"
        path.write_bytes(piece.astype("<f4").tobytes())
        source = Source(path, 0, "float32", (ROWS,), (1,), "", (0, 4 * ROWS))
        at = rank if boxes is None else boxes[rank]
        shards.append(Shard(Box((at * ROWS,), (ROWS,)), rank, source))
    return Tensor((ROWS * len(pieces),), "float32", tuple(shards), "chunks")


def by_column(tensor: Tensor) -> Tensor:
    """The same tensor with its shards in columns, as those of items that are like others."""
    listed = ItemShards("float32")
    for shard in tensor.found:
        listed.offsets.append(shard.box.offsets)
        listed.sizes.append(shard.box.sizes)
        listed.files.append(HoldingFile(shard.source.path, shard.rank))
        listed.starts.append(0)
        listed.lengths.append(0)
    listed.expect_layouts()
    listed.layouts = [ItemLayout.of(shard.source, 0) for shard in tensor.found]
    return replace(tensor, shards=listed)


def copies(tensor: Tensor) -> list[tuple[str, int | None]]:
    with OpenFiles() as files:
        found, columns = ([*copied_files([("w", one)], files)] for one in (tensor, by_column(tensor)))
    assert found == columns
    return [(p.code, p.rank) for p in found]


def test_the_same_bytes_for_other_places_are_a_copy(tmp_path):
    one, other = np.arange(ROWS), np.arange(ROWS) + 1
    assert copies(of_ranks(tmp_path, one, other, one)) == [("CK009", 2)]


def test_other_bytes_are_none(tmp_path):
    assert copies(of_ranks(tmp_path, np.arange(ROWS), np.arange(ROWS) + 1)) == []


def test_replicas_have_the_same_place_and_are_none(tmp_path):
    one, other = np.arange(ROWS), np.arange(ROWS) + 1
    assert copies(of_ranks(tmp_path, one, other, one, other, boxes=(0, 1, 0, 1))) == []


def test_elements_that_are_all_alike_prove_nothing(tmp_path):
    assert copies(of_ranks(tmp_path, np.zeros(ROWS), np.zeros(ROWS), np.ones(ROWS), np.ones(ROWS))) == []


def test_another_tensor_that_differs_proves_that_there_is_no_copy(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    same = of_ranks(tmp_path / "a", np.arange(ROWS), np.arange(ROWS))
    paths = [tmp_path / "a" / f"{rank}.bin" for rank in (0, 1)]
    for rank, path in enumerate(paths):
        path.write_bytes(path.read_bytes() + np.full(ROWS, rank, "<f4").tobytes())
    shards = [s._replace(source=s.source._replace(offset=4 * ROWS)) for s in same.shards if s.source]
    other = Tensor(same.shape, "float32", tuple(shards), "chunks")
    with OpenFiles() as files:
        assert copied_files([("w", same), ("v", other)], files) == []
