"""Of copies that ranks hold of one region every one is compared, whichever of them differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptools.files.opening import OpenFiles
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Shard, Source
from ckptools.tensor_io import replicas
from ckptools.tensor_io.numbers import digits
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


def found(shards: list[Shard]) -> list[tuple[int | None, str]]:
    """Who is the odd one in the regions that differ, and what is said of it."""
    with OpenFiles() as files:
        problems = [copies.problem("w", files) for copies in differing_boxes(shards, files).values()]
        return [(problem.rank, problem.message) for problem in problems]


@pytest.mark.parametrize("strides", [(2, 1), (1, 2)], ids=["in a row", "transposed"])
@pytest.mark.parametrize("odd", range(RANKS))
def test_a_copy_that_differs_is_named_whichever_it_is(tmp_path, strides, odd):
    ((rank, text),) = found(copies(tmp_path, strides, odd, byte=15))
    assert rank == odd and f"rank {odd} holds other bytes than rank {int(odd == 0)} (first at [1, 1]: " in text
    assert found(copies(tmp_path, strides)) == []


@pytest.mark.parametrize("strides", [(2, 1), (1, 2)], ids=["in a row", "transposed"])
def test_the_first_index_that_differs_is_that_in_the_tensor(tmp_path, strides):
    (text,) = [text for _, text in found(copies(tmp_path, strides, 2, byte=4))]
    assert f"first at {[0, 1] if strides == (2, 1) else [1, 0]}" in text


@pytest.mark.parametrize("byte", [0, 6, 7, 15])
def test_copies_are_compared_to_their_last_byte(tmp_path, monkeypatch, byte):
    monkeypatch.setattr(replicas, "CHUNK", 4)
    ((rank, text),) = found(copies(tmp_path, (2, 1), 2, byte))
    assert rank == 2 and f"first at [{byte // 8}, {byte // 4 % 2}]" in text


def test_two_against_two_copies_blame_no_rank(tmp_path):
    shards = [s._replace(rank=s.rank + 2 * n) for n in (0, 1) for s in copies(tmp_path, (2, 1), 1)[:2]]
    assert [rank for rank, _ in found(shards)] == [None]


@pytest.mark.parametrize(
    ("dtype", "element", "shown"),
    [
        ("bfloat16", b"\x80\x3f", "1.0"),
        ("float16", b"\x66\x2e", "0.1"),
        ("bool", b"\x01", "True"),
        ("int64", bytes(7) + b"\x80", "-9223372036854775808"),
        ("complex64", b"\0\0\x80\x3f\0\0\0\x40", "(1+2j)"),
        ("float4_e2m1fn_x2", b"\x3f", "0x3f"),
    ],
)
def test_an_element_is_shown_as_its_dtype_has_it(dtype, element, shown):
    assert digits(element, dtype) == shown
