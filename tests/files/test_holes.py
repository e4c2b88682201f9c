"""A hole is told from bytes that were written, whatever they are."""

from __future__ import annotations

from pathlib import Path

from ckptools.files.holes import holes


def unwritten(path: Path) -> int:
    """Bytes of a file that are holes."""
    edges = holes(path)
    return sum(edges[1::2]) - sum(edges[::2])


def test_a_file_whose_end_was_never_written_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cut.bin"
    with path.open("wb") as file:
        file.write(b"x" * 10_000)
        file.truncate(1_000_000)
    assert 980_000 <= unwritten(path) <= 990_000


def test_zeros_that_were_written_are_no_hole(tmp_path: Path) -> None:
    path = tmp_path / "zeros.bin"
    path.write_bytes(bytes(1_000_000))
    assert unwritten(path) == 0


def test_a_file_that_is_gone_has_no_holes(tmp_path: Path) -> None:
    assert unwritten(tmp_path / "gone") == 0


def test_what_a_file_system_may_pack_is_no_hole(tmp_path: Path) -> None:
    path = tmp_path / "small.bin"
    with path.open("wb") as file:
        file.truncate(60_000)
    assert unwritten(path) == 0
