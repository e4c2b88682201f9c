"""The rows of what was written: every tensor with its place, and every name that was left out."""

from __future__ import annotations

import errno
import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptools
from ckptools.consolidate.publishing.publish import _reason


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = {"w": torch.arange(6.0).reshape(2, 3), "h": torch.ones(5).half(), "none": torch.empty(0, 2)}
    torch.save({"model": model, "args": functools.partial(int, base=2)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_each_tensor_has_a_row_with_its_place_in_the_output(saved, tmp_path):
    done = ckptools.consolidate(saved, out := tmp_path / "o.safetensors", dtype="bfloat16", provenance=False)
    data = out.read_bytes()
    rows = {row.name: row for row in done.rows}
    assert {n: (r.dtype, r.shape, r.file, r.bytes, r.missing, r.left_out) for n, r in rows.items()} == {
        "w": ("bfloat16", (2, 3), str(out), 12, (), ""),
        "h": ("bfloat16", (5,), str(out), 10, (), ""),
        "none": ("bfloat16", (0, 2), str(out), 0, (), ""),
    }
    w, h = (rows[name] for name in "wh")
    values = torch.frombuffer(bytearray(data[w.offset : w.offset + w.bytes]), dtype=torch.bfloat16)
    assert values.tolist() == [0, 1, 2, 3, 4, 5] and h.offset is not None
    assert torch.frombuffer(bytearray(data[h.offset : h.offset + 10]), dtype=torch.bfloat16).tolist() == [1] * 5
    assert done.converted == {("float32", "bfloat16"): 2, ("float16", "bfloat16"): 1}
    assert (done.files, done.data_files, done.tensors, done.nbytes) == ((out,), 1, 3, len(data))
    assert (done.dry_run, done.left_out, done.not_asked) == (False, {}, {"args": 0})


def test_what_is_left_out_has_a_row_that_says_why(saved, tmp_path):
    done = ckptools.consolidate(saved, tmp_path / "o.pt", dry_run=True)
    last = done.rows[-1]
    assert last._asdict() == {
        "name": "args", "dtype": "", "shape": None, "file": "", "offset": None, "bytes": 0, "missing": (),
        "left_out": "an object of class functools.partial",
    }  # fmt: skip
    assert done.dry_run and done.planned is not None and not (tmp_path / "o.pt").exists()
    assert (done.planned.nbytes, done.planned.files, done.planned.no_room) == (34, 1, None)
    assert [(copy.fqn, copy.nbytes) for copy in done.planned.copies] == [("model.w", 24), ("model.h", 10)]


def test_the_reason_of_a_failed_write_is_said_where_the_system_gives_one():
    assert _reason(OSError(errno.EROFS, "Read-only file system")) == "cannot write: read-only file system"
    assert _reason(OSError("no number")) == "cannot write: unknown error"


def test_no_file_of_one_tensor_is_written_twice(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    done = ckptools.consolidate(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert [(row.name, row.bytes) for row in done.rows] == [("a", 8)]
