"""The name that torch saved a file under, as a claim of the file; `tests/rules/test_files.py` has what follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptools.formats.shared.checkpoint_builder import archive_claims
from ckptools.pickles import reader


def held(path: Path) -> Any:
    return archive_claims(reader.read(path)).inside.get("file")


def save(folder: Path, name: str) -> Path:
    torch.save({"epoch": 1}, folder / name)
    return folder / name


def test_a_file_states_the_name_that_it_was_saved_under(tmp_path):
    path = save(tmp_path, "optim_rank_0.pt")
    assert held(path) == "optim_rank_0.pt"
    assert held(path.rename(tmp_path / "optim_rank_1.pt")) == "optim_rank_0.pt"


@pytest.mark.parametrize("new", ["ep0-ba9-rank0.pt", "ep1-ba5-rank0.pt", "latest-rank0.pt"])
def test_a_checkpoint_may_be_renamed_whole(tmp_path, new):
    path = save(tmp_path, "ep0-ba5-rank0.pt").rename(tmp_path / new)
    assert held(path) in (None, new)


def test_a_file_that_was_written_into_a_stream_says_nothing(tmp_path):
    with (tmp_path / "rank0.pt").open("wb") as file:
        torch.save({"rank": 0}, file)
    assert held((tmp_path / "rank0.pt").rename(tmp_path / "rank2.pt")) is None
