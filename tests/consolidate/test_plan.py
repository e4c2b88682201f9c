"""The arithmetic of the plan: every byte of the output is written once, from the right place."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.selection import Picking
from ckptools.consolidate.writers import dcp
from ckptools.files.opening import OpenFiles
from ckptools.model.extents import Extents
from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io import stream
from ckptools.tensor_io.checksums import Record
from ckptools.tensor_io.stream import Band, Copy, count_parts, parts_of
from tests.truth import FIXTURES

FILE = Path("x")
RECORD = Record(FILE, "data/0", 64, 60, 1234)


@st.composite
def cut_tensors(draw) -> tuple[Tensor, np.ndarray, dict[int, np.ndarray]]:
    """A random array cut into a grid of boxes, each stored somewhere with strides of its own."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    full = np.arange(int(np.prod(shape)), dtype="<i4").reshape(shape)
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    shards, files = [], {}
    for memory, corner in enumerate(np.ndindex(*[len(c) - 1 for c in cuts])):
        low = tuple(c[i] for c, i in zip(cuts, corner, strict=True))
        high = tuple(c[i + 1] for c, i in zip(cuts, corner, strict=True))
        piece = full[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
        piece = piece.copy(order=draw(st.sampled_from("CF")))
        base = draw(st.integers(0, 3))
        strides = tuple(s // 4 for s in piece.strides) if piece.size else contiguous_strides(piece.shape)
        flat = np.concatenate([np.full(base, -1, "<i4"), piece.ravel(order="K")])
        source = Source(FILE / str(memory), base * 4, "int32", piece.shape, strides, "r", (0, flat.nbytes))
        files[memory] = flat
        shards.append(Shard(Box(low, piece.shape), memory, source))
    return Tensor(shape, "int32", tuple(shards), "sharded_tensor"), full, files


@pytest.mark.slow
@given(cut_tensors(), st.integers(1, 64), st.integers(0, 4))
@settings(max_examples=300)
def test_the_parts_write_every_byte_once_and_in_order(cut, min_run, few):
    tensor, full, files = cut
    with mock.patch.multiple(stream, MIN_RUN=min_run, FEW_RUNS=few):
        parts = list(parts_of(tensor, "int32"))
        assert count_parts(tensor, "int32") == len(parts)
    out, at = bytearray(full.nbytes), 0
    for part in parts:
        assert part.offset == at
        out[at : at + part.nbytes] = _bytes(part, full, files)
        at += part.nbytes
    assert at == full.nbytes and bytes(out) == full.tobytes()


@pytest.mark.slow
@given(cut_tensors(), st.integers(1, 4))
@settings(max_examples=200)
def test_pieces_of_rows_are_the_rows(cut, count):
    tensor, full, files = cut
    if not full.ndim:
        return
    at = 0
    for box, piece in dcp.row_pieces(tensor, count):
        rows = full[at : at + count]
        out = b"".join(_bytes(part, rows, files) for part in parts_of(piece, "int32"))
        assert (box.offsets[0], box.sizes, out) == (at, rows.shape, rows.tobytes())
        at += len(rows)
    assert at == len(full)


def _bytes(part: Copy | Band, full: np.ndarray, files: dict[int, np.ndarray]) -> bytes:
    if isinstance(part, Copy):
        data = files[int(part.source.name)].tobytes()
        return data[part.source_offset : part.source_offset + part.nbytes]
    return full[tuple(slice(o, o + n) for o, n in zip(part.box.offsets, part.box.sizes, strict=True))].tobytes()


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(4, 400))
def test_bands_are_bounded_and_follow_each_other(shape, band):
    tensor = Tensor(tuple(shape), "int32", (), "plain")
    with mock.patch.object(stream, "BAND", band):
        bands = list(stream._bands(Box.whole(shape), tensor, 4))
    assert [b.offset for b in bands] == [0, *accumulate(b.nbytes for b in bands)][:-1]
    assert sum(b.nbytes for b in bands) == tensor.nbytes
    assert all(b.nbytes <= max(band, 4) for b in bands)


def test_a_row_shard_is_one_copy_with_its_records_checksum():
    source = Source(FILE, 64, "float32", (3, 5), (5, 1), "data/0", (64, 60), 1234)
    tensor = Tensor((9, 5), "float32", (Shard(Box((3, 0), (3, 5)), 1, source),), "sharded_tensor")
    assert list(parts_of(tensor, "float32")) == [Copy(FILE, 64, 60, 60, RECORD)]


def test_a_view_of_a_larger_storage_knows_that_the_checksum_is_of_more():
    source = Source(FILE, 64, "float32", (1, 5), (5, 1), "data/0", (64, 60), 1234)
    tensor = Tensor((1, 5), "float32", (Shard(Box((0, 0), (1, 5)), 0, source),))
    assert list(parts_of(tensor, "float32")) == [Copy(FILE, 64, 0, 20, RECORD)]


def test_tensors_that_come_and_go_are_each_chosen_in_an_order_of_their_own() -> None:
    path = FIXTURES / "torch2.13.0-fsdp1-sharded-w4" / "rank0.pt"
    with OpenFiles() as files:
        picking = Picking(ckptools.open(path), ConsolidateOptions(unchecked=True), files, {})
        for count in (5, 2, 7, 3) * 20:  # the list of one that is gone leaves its id to a later one
            source = Source(path, 0, "float32", (1,), (1,), "data/0", (0, 4))
            shards = [Shard(Box((n,), (1,)), n, source) for n in range(count)]
            chosen = picking._preferred(Extents.of(shards, "float32"))
            assert sorted(shard.rank for shard in chosen) == [*range(count)]
