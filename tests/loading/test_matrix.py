"""Every kind of checkpoint in every layout: the bits that were saved, and the steps of the run that was not stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptools
from tests.loading.spread import Source, load_all, train_on, write
from tests.training.forked import run_ranks
from tests.versions import torch_that_trains

LOCAL = {"state_dict_type": "local"}

SOURCES = (
    Source("fsdp1", "composer", 3),
    Source("fsdp1", "composer", 3, LOCAL, needs="shapes"),
    Source("fsdp1", "composer-dcp", 3),
    Source("fsdp2", "composer", 3),
    Source("fsdp2", "verl", 3),
    Source("fsdp2", "dcp", 3),
    Source("fsdp2", "torchtitan", 3),
    Source("fsdp2", "lightning", 3),
    Source("fsdp2", "accelerate", 3),
    Source("fsdp2", "huggingface", 3, complete=False),
    Source("ddp", "composer", 3),
    Source("ddp", "lightning", 3),
    Source("ddp", "accelerate", 3, needs="names"),
    Source("hsdp", "composer", 4),
    Source("fsdp2-tp", "composer", 4),
    Source("fsdp2-tp", "dcp", 4),
)
"""What is written by runs in one of these layouts each."""

CONSOLIDATED = (
    Source("fsdp2", "consolidated.pt", 1),
    Source("fsdp2", "consolidated.dcp", 1),
    Source("fsdp2", "consolidated.safetensors", 1, complete=False),
)
"""What `consolidate` makes of the rank files of FSDP2."""

EVERY = (*SOURCES, *CONSOLIDATED)

TARGETS = {"ddp": 2, "fsdp2": 2, "meta": 2, "hsdp": 4, "fsdp2-tp": 4}
"""The layouts that are loaded into, and their ranks; `meta` is FSDP2 of a model on the meta device."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every source, written once."""
    torch_that_trains("fsdp2")
    out = tmp_path_factory.mktemp("loading")
    run_ranks(2, train_on, out)
    for world_size in sorted({source.world_size for source in SOURCES}):
        run_ranks(world_size, write, out, [source for source in SOURCES if source.world_size == world_size])
    ranks = next(source for source in SOURCES if (source.strategy, source.layout) == ("fsdp2", "composer"))
    for source in CONSOLIDATED:
        only = None if source.complete else "model"
        ckptools.consolidate(out / "sources" / ranks.name, out / "sources" / source.name, only=only)
    return out


@pytest.fixture(scope="module")
def found(folder: Path, request: pytest.FixtureRequest) -> dict[str, dict[str, list[str]]]:
    """What came of loading every source in one layout."""
    target: str = request.param
    run_ranks(TARGETS[target], load_all, folder, target, list(EVERY))
    answer: dict[str, dict[str, list[str]]] = json.loads((folder / f"{target}.json").read_text())
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("source", EVERY, ids=lambda source: source.name)
@pytest.mark.parametrize("found", TARGETS, indirect=True)
def test_what_is_loaded_has_the_bits_that_were_saved_and_trains_on_as_if_never_stopped(
    source: Source, found: dict[str, dict[str, list[str]]]
) -> None:
    # A source without an optimizer is put where the weights were, and nothing is said of what follows.
    nothing: dict[str, list[str]] = {"put": [], "after": []} if source.complete else {"put": []}
    assert found[source.name] == nothing


def test_the_matrix_has_ten_formats_in_four_layouts_with_the_optimizer() -> None:
    assert len({(s.strategy, s.layout, *s.parallel) for s in EVERY if s.complete}) >= 10 and len(TARGETS) >= 4
