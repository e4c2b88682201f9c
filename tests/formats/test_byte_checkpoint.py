"""ByteCheckpoint: bare bytes with the pickle of each tensor, and a step's parts as one checkpoint."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptools
from ckptools.errors import NotWholeError
from tests.truth import FIXTURES

REAL = FIXTURES / "bytecheckpoint-fsdp2" / "ckpt" / "global_step_3"


@pytest.fixture
def step(tmp_path) -> Path:
    """The real model beside extra states, and an optimizer folder that is a copy of the model's."""
    folder = Path(shutil.copytree(REAL, tmp_path / "global_step_3"))
    (folder / "extra_state").mkdir()
    for rank in range(2):
        torch.save({"step": 3, "rank": rank}, folder / "extra_state" / f"extra_state_rank_{rank}.pt")
    shutil.copytree(folder / "model", folder / "optimizer")
    return folder


def codes(path: Path) -> set[tuple[str, int | None]]:
    return {(p.code, p.rank) for p in ckptools.open(path, all_ranks=True).problems if p.severity == "error"}


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        ("extra_state/extra_state_rank_1.pt", ("CK001", 1)),
        ("model/.metadata", ("CK001", None)),
        ("model/__1_0.distcp", ("CK001", 1)),
        ("optimizer/__0_0.distcp", ("CK001", 0)),
    ],
)
def test_a_lost_file_is_named(step, lost, found, tmp_path):
    (step / lost).unlink()
    assert found in codes(step)
    with pytest.raises(NotWholeError):
        ckptools.consolidate(step, tmp_path / "out.pt")


def test_a_pickle_of_another_dtype_than_its_chunk_is_refused(step, tmp_path):
    path = step / "model/.metadata"
    path.write_bytes(path.read_bytes().replace(b"FloatStorage", b"ShortStorage"))
    assert not ckptools.open(step, all_ranks=True).whole
    with pytest.raises(NotWholeError):
        ckptools.consolidate(step, tmp_path / "out.pt")


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("ran",))


def test_the_pickle_of_a_tensor_runs_nothing(step, capsys):
    path = step / "model/.metadata"
    data = path.read_bytes()
    start = data.index(b"\x80\x02ctorch._utils")
    end = start + data[start - 1]  # the pickle is a short string of bytes, behind its length
    path.write_bytes(data[:start] + pickle.dumps(Evil(), 2).ljust(end - start, b"\0") + data[end:])
    assert not ckptools.open(step, all_ranks=True).whole
    assert "ran" not in capsys.readouterr().out
