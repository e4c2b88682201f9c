"""Where shards lie, and the elements of a slice."""

from __future__ import annotations

import shutil
from math import prod
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.contents.show import elements, holes, index_of, shard_rows
from ckptools.contents.text import element_lines
from ckptools.dtypes import ITEMSIZE
from ckptools.errors import NotWholeError, UsageError
from ckptools.files.opening import File
from ckptools.formats.dcp import locator
from ckptools.keys.entries import entries_of
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.read import read_box
from tests.display.made import plain, sharded
from tests.truth import FIXTURES, WHOLE

DCP = sorted(metadata.parent for metadata in FIXTURES.glob("*/**/.metadata"))
FSDP = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("known", WHOLE, ids=lambda known: f"{known.name}/{known.path}-{known.weights}")
def test_the_bytes_of_a_shard_are_where_its_row_says(known):
    ck = known.open(all_ranks=True)
    found = 0
    for tensor in [t for t in ck.model.values() if isinstance(t, Tensor) and not t.note][:12]:
        straight = {s.box for s in tensor.shards if s.source is None or s.source.contiguous}
        for row in shard_rows(tensor):
            box = Box(row.offsets, row.sizes)
            if row.offset is None or not box.numel or box not in straight or "zstd" in known.name:
                continue
            data = Path(row.file).read_bytes()[row.offset : row.offset + row.bytes]
            assert data == read_box(tensor, box).tobytes() and row.bytes == box.numel * ITEMSIZE[tensor.dtype]
            found += 1
    assert found > 0 or known.name in ("dcp-zstd", "megatron-tp2pp2-fp32"), "nothing was compared"


def test_what_no_file_here_holds_is_named(tmp_path):
    for rank in (0, 2):
        shutil.copy(FSDP / f"rank{rank}.pt", tmp_path)
    tensor = ckptools.open(tmp_path / "rank0.pt", all_ranks=True).model["emb.weight"]
    rows = shard_rows(tensor)
    assert [row.status for row in rows] == ["here", "missing", "here", "missing"]
    gaps, missing = holes(tensor, rows)
    assert missing == sum(prod(rows[rank].sizes) for rank in (1, 3)) and len(gaps) == 2
    assert gaps[0] == str(Box(rows[1].offsets, rows[1].sizes))


def test_a_tensor_that_is_here_has_no_holes():
    assert holes(plain(3, 4), shard_rows(plain(3, 4))) == ((), 0)
    one = sharded(8, 4, ranks=4)
    assert holes(one, shard_rows(one)) == (("[2:8, 0:4]",), 24)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_are_those_that_torch_has_in_every_dtype(dtype, tmp_path):
    values = (torch.arange(60).reshape(3, 4, 5) % 7).to(dtype)
    torch.save({"w": values, "t": values[0].t()}, tmp_path / "model.pt")
    ck = ckptools.open(tmp_path / "model.pt")

    def plainly(found):
        numbers = found.float() if "float8" in str(dtype) else found
        return numbers.numpy().astype(str).tolist() if dtype.is_complex else numbers.tolist()

    tried = {"1": 1, "0:2,:,3": (slice(0, 2), slice(None), 3), "-1,1:,-2:": (-1, slice(1, None), slice(-2, None))}
    for text, index in tried.items():
        assert elements(ck.model["w"], text) == plainly(values[index])
    assert elements(ck.model["t"], "1:3,:2") == plainly(values[0].t()[1:3, :2])


def test_only_the_bytes_of_the_slice_are_read():
    ck = ckptools.open(FSDP, all_ranks=True)
    tensor = ck.model["emb.weight"]
    before = File.total_read
    found = elements(tensor, "3:9,2:5")
    assert File.total_read - before == 6 * 3 * ITEMSIZE[tensor.dtype]
    assert found == tensor.load()[3:9, 2:5].tolist()


def test_a_slice_of_what_is_here_is_read_and_another_one_is_refused(tmp_path):
    shutil.copy(FSDP / "rank0.pt", tmp_path)
    tensor = ckptools.open(tmp_path / "rank0.pt", all_ranks=True).model["emb.weight"]
    assert elements(tensor, "0") == ckptools.open(FSDP).model["emb.weight"][0].tolist()
    rows, columns = tensor.shape
    with pytest.raises(
        NotWholeError, match=rf"holds {columns} of the {columns} .*: \[{rows - 1}:{rows}, 0:{columns}\]"
    ):
        elements(tensor, "-1")
    with pytest.raises(NotWholeError, match="holds 2 of the 4 elements"):
        first = tensor.on_rank(0)[0].box.sizes[0]
        elements(tensor, f"{first - 1}:{first + 1},:2")


def test_three_dots_stand_for_the_dimensions_that_are_left():
    model = ckptools.open(FSDP, all_ranks=True).model
    assert elements(model["seen"], "...") == 123456789012
    assert elements(model["emb.weight"], "...,:1") == elements(model["emb.weight"], ":,:1")
    with pytest.raises(UsageError):
        elements(model["seen"], "...,...")


@pytest.mark.parametrize("text", ["", "a", "0:4:2", "1,,2", "0:4,x", "1e3", "--", "9" * 30])
def test_what_is_no_slice_is_refused(text):
    with pytest.raises(UsageError, match="is no index; write slices such as '0:4,:8'"):
        index_of(text)


def test_a_slice_that_does_not_fit_is_refused():
    tensor = ckptools.open(FSDP, all_ranks=True).model["emb.weight"]
    with pytest.raises(UsageError, match="3 indices for a tensor of shape"):
        elements(tensor, "0,0,0")
    with pytest.raises(UsageError, match="out of range"):
        elements(tensor, "100000")
    with pytest.raises(UsageError, match="at most 10000"):
        elements(plain(200, 100), ":")


def test_a_dtype_that_is_not_decoded_is_named(tmp_path):
    torch.save({"w": torch.zeros(6, dtype=torch.float16).view(torch.complex32)}, tmp_path / "model.pt")
    with pytest.raises(UsageError, match="complex32 is not decoded; load it with torch"):
        elements(ckptools.open(tmp_path / "model.pt").model["w"], "0")


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point], ids=str)
def test_printed_elements_are_told_from_their_neighbours(dtype, tmp_path):
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    first = torch.tensor([1.0, 1.7, 3.1e-2]).to(dtype).view(bits)
    values = torch.stack([first, first + 1, first + 2]).view(dtype)
    torch.save({"w": values}, tmp_path / "model.pt")
    printed = [
        line.split()
        for line in element_lines(
            elements(ckptools.open(tmp_path / "model.pt").model["w"], ":"), str(dtype).removeprefix("torch.")
        )
    ]
    again = torch.tensor([[float(cell) for cell in row] for row in printed], dtype=torch.float64).to(dtype)
    assert torch.equal(again.view(bits), values.view(bits))


def test_an_index_is_spelled_as_python_does():
    assert index_of("0:4,:8") == (slice(0, 4), slice(None, 8))
    assert index_of("[ 3, -1:, : ]") == (3, slice(-1, None), slice(None))


@pytest.mark.slow
@pytest.mark.parametrize("folder", DCP, ids=lambda folder: str(folder.relative_to(FIXTURES)))
def test_a_tensor_of_many_items_is_shown_as_one_of_a_few(folder, monkeypatch):
    ck = ckptools.open(folder)
    names = [entry.name for entry in entries_of(ck) if isinstance(entry.value, Tensor)]
    names = names[:: len(names) // 6 + 1]
    few = ckptools.open(folder, all_ranks=True).show(*names, all_ranks=True).to_dict()
    monkeypatch.setattr(locator, "MAX_LOCATED", 0)
    many = ckptools.open(folder).show(*names).to_dict()
    assert names and many["rows"] == few["rows"]
