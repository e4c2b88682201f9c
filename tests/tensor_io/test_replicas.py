"""Of copies that ranks hold of one region every one is compared, whichever of them differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptools.files.opening import OpenFiles
from ckptools.model.regions import Box, Ints
from ckptools.model.tensor import Shard, Source
from ckptools.tensor_io import replicas
from ckptools.tensor_io.replicas import differing_boxes

RANKS = 4
BOX = Box((0, 0), (2, 2))


def copies(folder: Path, strides: Ints, odd: int | None = None, byte: int = 0) -> list[Shard]:
    """A copy for each rank of the same 16 bytes, of which that of one rank has another byte."""
    shards = []
    for rank in range(RANKS):
        data = bytearray(range(16))
        data[byte] ^= 1 if rank == odd else 0
        path = folder / f"rank{rank}"
        path.write_bytes(data)
        shards.append(Shard(BOX, rank, Source(path, 0, "float32", BOX.sizes, strides, "data/0", (0, 16))))
    return shards


@pytest.mark.parametrize("strides", [(2, 1), (1, 2)], ids=["in a row", "transposed"])
@pytest.mark.parametrize("odd", range(1, RANKS))
def test_a_copy_that_differs_is_named_whichever_it_is(tmp_path, strides, odd):
    with OpenFiles() as files:
        assert differing_boxes(copies(tmp_path, strides, odd, byte=15), files) == {BOX: (0, odd)}
        assert differing_boxes(copies(tmp_path, strides), files) == {}


@pytest.mark.parametrize("byte", [0, 6, 7, 15])
def test_copies_are_compared_to_their_last_byte(tmp_path, monkeypatch, byte):
    monkeypatch.setattr(replicas, "CHUNK", 7)
    with OpenFiles() as files:
        assert differing_boxes(copies(tmp_path, (2, 1), 2, byte), files) == {BOX: (0, 2)}
