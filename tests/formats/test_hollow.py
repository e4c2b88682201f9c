"""Tensors that lie in holes of sparse files: seen at opening, by every command, and told from zeros that were saved."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import NotWholeError
from ckptools.files.holes import Holes
from ckptools.formats.shared import hollow
from ckptools.formats.shared.hollow import crc_of_zeros
from ckptools.model.incidents import causes_of
from ckptools.model.tensor import Tensor
from tests.sparse_files import sparse

ELEMENTS = 1 << 18
"""A tensor of a megabyte, which no file system packs."""


def punched(path: Path, start: int, nbytes: int) -> Path:
    """A copy of a file in which some bytes are a hole."""
    data, copy = path.read_bytes(), path.with_name(f"hollow-{path.name}")
    with copy.open("wb") as file:
        file.write(data[:start])
        file.seek(start + nbytes)
        file.write(data[start + nbytes :])
        file.truncate(len(data))
    path.unlink()
    return copy


def torch_file(folder: Path, **tensors: torch.Tensor) -> Path:
    torch.save(tensors, folder / "x.pt")
    return folder / "x.pt"


def place_of(path: Path, name: str) -> tuple[int, int]:
    return ckptools.open(path).model[name].shards[0].source.record_span


def told(path: Path) -> list[tuple[str, str]]:
    return [(p.code, p.severity) for p in ckptools.open(path).problems]


@pytest.mark.parametrize(("name", "codes"), [("w3", ["CK017"]), ("w4", [])], ids=["ones", "zeros"])
def test_of_alike_items_those_are_hollow_that_were_not_zeros(tmp_path: Path, name: str, codes: list[str]) -> None:
    state = {f"w{n}": torch.full((ELEMENTS,), float(n in (1, 3))) for n in range(5)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "d")
    span = ckptools.open(tmp_path / "d", all_ranks=True).model[name].shards[0].source.record_span
    data = next((tmp_path / "d").glob("*.distcp"))
    punched(data, *span).rename(data)
    problems = ckptools.open(tmp_path / "d", all_ranks=True).problems
    assert [p.code for p in problems] == codes
    assert all(p.message.endswith(f"they hold model.{name}") for p in problems)


def test_a_hollow_tensor_is_an_error_in_every_command(tmp_path: Path) -> None:
    path = torch_file(tmp_path, a=torch.randn(ELEMENTS), b=torch.ones(ELEMENTS))
    path = punched(path, *place_of(path, "a"))
    for command in ("inspect", "verify", "doctor"):
        done = CliRunner().invoke(app, [command, str(path)])
        assert (command, done.exit_code, "CK017" in done.stdout) == (command, 1, True)
    listed = CliRunner().invoke(app, ["ls", str(tmp_path)])
    assert listed.exit_code == 1 and "CK017" in listed.stdout
    assert ckptools.open(path).whole is False


def test_a_part_of_a_tensor_is_enough(tmp_path: Path) -> None:
    path = torch_file(tmp_path, a=torch.randn(ELEMENTS), b=torch.randn(8 * ELEMENTS))
    start, nbytes = place_of(path, "a")
    path = punched(path, start + 8192, nbytes - 16384)
    assert told(path) == [("CK017", "error")]
    assert "they hold a" in ckptools.open(path).problems[0].message


def test_zeros_that_were_saved_are_no_holes_whatever_a_file_system_keeps(tmp_path: Path) -> None:
    path = torch_file(tmp_path, a=torch.zeros(ELEMENTS), b=torch.randn(ELEMENTS))
    assert told(path) == []
    assert told(punched(path, *place_of(path, "a"))) == []


def test_without_a_checksum_less_than_half_is_a_warning(tmp_path: Path) -> None:
    save_file({"a": torch.randn(ELEMENTS), "b": torch.randn(2 * ELEMENTS)}, tmp_path / "m.safetensors")
    path = punched(tmp_path / "m.safetensors", *place_of(tmp_path / "m.safetensors", "a"))
    assert told(path) == [("CK017", "warning")]
    notes = ckptools.consolidate(path, tmp_path / "out.safetensors").notes
    assert any(note.startswith("warning of the source: CK017 hollow-m.safetensors: ") for note in notes)
    (cause,) = causes_of(ckptools.open(path).problems)
    assert cause.remedy == "copy the file again from where it was saved"


def test_a_file_that_was_never_filled_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.randn(ELEMENTS), "b": torch.randn(2 * ELEMENTS)}, tmp_path / "m.safetensors")
    path = punched(tmp_path / "m.safetensors", *place_of(tmp_path / "m.safetensors", "b"))
    assert told(path) == [("CK017", "error")]


def test_what_lies_in_holes_is_refused_left_out_or_written_as_a_fill(tmp_path: Path) -> None:
    path = torch_file(tmp_path, a=torch.randn(ELEMENTS), b=torch.ones(ELEMENTS))
    path = punched(path, *place_of(path, "a"))
    with pytest.raises(NotWholeError, match="CK017"):
        ckptools.consolidate(path, tmp_path / "m.safetensors")
    done = ckptools.consolidate(path, tmp_path / "m.safetensors", allow_missing=True)
    assert list(done.left_out) == ["a"] and list(load_file(tmp_path / "m.safetensors")) == ["b"]
    options = {"allow_missing": True, "fill": "zero", "unchecked": True}
    ckptools.consolidate(path, tmp_path / "filled.safetensors", **options)
    (problem,) = ckptools.open(tmp_path / "filled.safetensors").problems
    assert (problem.code, problem.tensor, problem.severity) == ("CK019", "a", "error")


def test_a_sparse_safetensors_file_is_not_whole(tmp_path: Path) -> None:
    opened = ckptools.open(sparse(tmp_path / "m.safetensors", 1 << 24))
    assert opened.whole is False and {one.name for one in opened.hollow} == {"a", "b"}


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 7, 4096, 1_000_003])
def test_the_checksum_of_zeros_needs_no_zeros(nbytes: int) -> None:
    assert crc_of_zeros(nbytes) == zlib.crc32(bytes(nbytes))


def test_what_lies_in_spans_is_counted() -> None:
    holes = Holes([10, 20, 30, 40])
    ends = ((0, 10), (0, 11), (12, 15), (19, 31), (20, 30), (0, 100), (39, 99))
    assert [holes.overlap(*place) for place in ends] == [0, 1, 3, 2, 0, 20, 1]


def test_opening_a_sound_file_asks_no_file_system_for_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = torch_file(tmp_path, a=torch.randn(ELEMENTS))
    monkeypatch.delattr(os, "SEEK_HOLE")
    assert told(path) == []


SPAN = st.tuples(st.integers(1, 9), st.integers(1, 9))


@given(st.lists(SPAN, min_size=1, max_size=6), st.lists(st.tuples(st.integers(0, 120), st.integers(0, 60)), min_size=1))
def test_the_bytes_of_any_extents_in_any_spans_are_counted(gaps, extents):
    spans, at = [], 0
    for gap, length in gaps:
        spans += (at + gap, at + gap + length)
        at += gap + length
    inside = {at for first, last in zip(spans[::2], spans[1::2], strict=True) for at in range(first, last)}
    counts = [len(inside & {*range(start, start + length)}) for start, length in extents]
    columns = [start for start, _ in extents], [start + length for start, length in extents]
    assert [Holes(spans).overlap(start, end) for start, end in zip(*columns, strict=True)] == counts
    assert Holes(spans).overlaps(*map(np.array, columns)).tolist() == counts


EXTENT = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 60), st.integers(0, 60))


@given(st.lists(EXTENT, max_size=12))
def test_the_bytes_of_each_tensor_in_holes_are_those_of_its_extents_each_once(extents):
    listed, found = hollow._Extents(), [hollow._Hollow(Path(str(n)), Holes([10, 20, 30, 40]), 50) for n in range(3)]
    for file, tensor, start, length in sorted(extents, key=lambda one: one[1]):
        listed.add(file, tensor, start, start + length)
    for file, of_file in listed.by_file():
        found[file].look_at(of_file)
    inside = {one: found[0].holes.overlap(one[2], one[2] + one[3]) for one in set(extents)}
    tensors = {str(n): Tensor((100,), "uint8", (), "plain") for n in range(4)}
    counts = {str(n): sum(n_bytes for one, n_bytes in inside.items() if one[1] == n) for n in range(4)}
    filled = {one.name: one.elements for one in hollow._filled(tensors, found)}
    assert filled == {name: min(count, 100) for name, count in counts.items() if count}
    for number, one in enumerate(found):
        assert one.unproven == sum(n_bytes for extent, n_bytes in inside.items() if extent[0] == number)
        assert one.nbytes_seen == sum(extent[3] for extent in set(extents) if extent[0] == number)
