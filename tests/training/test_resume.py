"""A run that goes on from a checkpoint ends bit for bit as one that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptools import api
from ckptools.cluster.rank_0 import made_by_rank_0
from ckptools.errors import ReadError
from tests.training.forked import run_ranks
from tests.training.resumed import WITHOUT, gone_on


@pytest.fixture(scope="session")
def fsdp2(folder: Path) -> dict[str, Any]:
    return gone_on(folder / "gone-on-fsdp2", "fsdp2", "composer", "composer-dcp", without=True)


@pytest.mark.parametrize("what", WITHOUT)
def test_whatever_is_not_restored_changes_the_losses(what: str, fsdp2: dict[str, Any]) -> None:
    assert not fsdp2[f"without {what}"]["losses"]
    assert fsdp2[f"without {what}"]["differ"]


@pytest.fixture(scope="session")
def ddp(folder: Path) -> dict[str, Any]:
    return gone_on(folder / "gone-on-ddp", "ddp", "composer", "snapshot", "lightning", "accelerate")


def test_what_a_layout_does_not_hold_is_said(ddp: dict[str, Any]) -> None:
    assert "not in this layout: random states, position in the epoch; starts anew" in ddp["snapshot"]["said"]
    assert ddp["snapshot"]["put otherwise"] == ["at"]
    assert not ddp["snapshot"]["losses"]


def read_what_is_gone(path: Path) -> None:
    """Be one rank; leaves a file of its own where it was told."""
    dist.init_process_group("gloo")
    saved = api.open(path).model["weight"]
    assert made_by_rank_0(saved.load).tolist() == [1, 1, 1]
    dist.barrier()
    if dist.get_rank() == 0:
        path.unlink()
    with pytest.raises(ReadError, match=path.name):
        made_by_rank_0(saved.load)
    (path.parent / f"told-{dist.get_rank()}").touch()


def test_what_rank_0_cannot_read_is_told_to_all(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "model.pt")
    run_ranks(2, read_what_is_gone, tmp_path / "model.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["told-0", "told-1"]
