"""A run that goes on from a checkpoint ends bit for bit as one that was never interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptools.training.options import CreateOptions, ModelSize
from ckptools.training.parallel_options import ParallelOptions
from ckptools.training.resume_options import ResumeOptions
from tests.training.forked import run_ranks
from tests.training.resumed import go_on_from_each

SMALL = ModelSize(vocab=31, width=20, layers=1, context=7)
WITHOUT = ("python", "numpy", "torch", "position", "scheduler", "moments")


def gone_on(folder: Path, strategy: str, *layouts: str, world_size: int = 2, **parallel: Any) -> dict[str, Any]:
    """Train six steps over the end of an epoch, and go on from the third in each layout."""
    out = folder / "-".join((strategy, *layouts))
    options = CreateOptions(
        out,
        strategy,
        world_size,
        steps=6,
        batch=128,
        size=SMALL,
        parallel=ParallelOptions(**parallel),
        resuming=ResumeOptions(save_every=3),
    )
    run_ranks(world_size, go_on_from_each, options, layouts)
    found: dict[str, Any] = json.loads((out / "resumed.json").read_text())
    return found


def equal(found: dict[str, Any]) -> bool:
    return bool(found["losses"] and found["groups"] and found["random"] and not found["differ"])


@pytest.fixture(scope="session")
def fsdp2(folder: Path) -> dict[str, Any]:
    return gone_on(folder, "fsdp2", "composer", "composer-dcp")


@pytest.mark.parametrize("layout", ["composer", "composer-dcp"])
def test_the_losses_and_weights_are_those_of_a_run_that_was_not_interrupted(layout: str, fsdp2: dict[str, Any]) -> None:
    assert equal(fsdp2[layout]), fsdp2[layout]


def test_it_does_not_matter_whether_each_rank_reads_or_one_for_all(fsdp2: dict[str, Any]) -> None:
    assert equal(fsdp2["broadcast"]), fsdp2["broadcast"]


@pytest.mark.parametrize("what", WITHOUT)
def test_whatever_is_not_restored_changes_the_losses(what: str, fsdp2: dict[str, Any]) -> None:
    assert not fsdp2[f"without {what}"]["losses"]
    assert fsdp2[f"without {what}"]["differ"]


@pytest.fixture(scope="session")
def ddp(folder: Path) -> dict[str, Any]:
    return gone_on(folder, "ddp", "composer", "snapshot", "lightning")


@pytest.mark.parametrize("layout", ["composer", "lightning"])
def test_one_file_for_all_ranks_goes_on_as_well(layout: str, ddp: dict[str, Any]) -> None:
    assert equal(ddp[layout]), ddp[layout]


def test_what_a_layout_does_not_hold_is_said(ddp: dict[str, Any]) -> None:
    assert "not in this layout: scheduler, random states, position in the epoch; starts anew" in ddp["snapshot"]["said"]
    assert not ddp["snapshot"]["losses"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "layouts", "world_size", "parallel"),
    [
        ("fsdp1", ("composer", "accelerate", "composer-dcp", "lightning"), 2, {}),
        ("fsdp1", ("verl",), 2, {"dtensor": True}),
        ("fsdp2", ("verl", "accelerate", "fabric", "composer-dcp"), 2, {}),
        ("ddp", ("accelerate",), 2, {}),
        ("tp", ("composer",), 2, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_strategy_goes_on_from_every_layout(
    strategy: str, layouts: tuple[str, ...], world_size: int, parallel: dict[str, Any], folder: Path
) -> None:
    found = gone_on(folder, strategy, *layouts, world_size=world_size, **parallel)
    assert [name for name in (*layouts, "broadcast") if not equal(found[name])] == []
