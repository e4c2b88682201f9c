"""Files of one checkpoint that torch saved under other names than they have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptools.formats.shared.checkpoint_builder import swapped_files
from ckptools.pickles import reader


def found(folder: Path, *names: str, placed: bool = True) -> list[tuple[str, str]]:
    saved = [reader.read(folder / name) for name in names]
    return [(p.code, p.message.partition(" was saved as ")[2]) for p in swapped_files(saved, placed)]


def save(folder: Path, *names: str) -> None:
    for name in names:
        torch.save({"epoch": 1}, folder / name)


@pytest.mark.parametrize(("placed", "code"), [(True, "CK009"), (False, "CK010")])
def test_a_copy_over_another_file_is_an_error_where_names_place_what_is_in_them(tmp_path, placed, code):
    save(tmp_path, "layer_03.pt", "layer_04.pt")
    (tmp_path / "layer_04.pt").write_bytes((tmp_path / "layer_03.pt").read_bytes())
    ((told, text),) = found(tmp_path, "layer_03.pt", "layer_04.pt", placed=placed)
    assert (told, text) == (code, "layer_03.pt, which is here too: swapped with it, or a copy of it")


def test_files_that_were_numbered_anew_are_a_warning(tmp_path):
    save(tmp_path, "rank4.pt", "rank5.pt")
    for old, new in ((4, 0), (5, 1)):
        (tmp_path / f"rank{old}.pt").rename(tmp_path / f"rank{new}.pt")
    assert found(tmp_path, "rank0.pt", "rank1.pt") == [("CK010", "rank4.pt"), ("CK010", "rank5.pt")]


@pytest.mark.parametrize("new", ["ep0-ba9-rank{}.pt", "ep1-ba5-rank{}.pt", "latest-rank{}.pt"])
def test_a_checkpoint_may_be_renamed_whole(tmp_path, new):
    save(tmp_path, "ep0-ba5-rank0.pt", "ep0-ba5-rank1.pt")
    for rank in (0, 1):
        (tmp_path / f"ep0-ba5-rank{rank}.pt").rename(tmp_path / new.format(rank))
    assert found(tmp_path, new.format(0), new.format(1)) == []


def test_a_file_that_was_written_into_a_stream_says_nothing(tmp_path):
    for rank in (0, 1):
        with (tmp_path / f"rank{rank}.pt").open("wb") as file:
            torch.save({"rank": rank}, file)
    (tmp_path / "rank0.pt").rename(tmp_path / "rank2.pt")
    assert found(tmp_path, "rank1.pt", "rank2.pt") == []
