"""`consolidate --like`: what a trainer saved becomes a folder that transformers loads, and says the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptools
from tests.hugging_face.toy_models import loaded_strictly, logits, save_original, toy_model
from tests.hugging_face.trainer_names import save_megatron, torchtitan_state

TRAINED = ("llama", "llama-tied", "gpt2", "qwen2-moe", "qwen3-moe", "mixtral", "deepseek-v3", "phi3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one for each model that two ranks trained; `NAME/run` is its checkpoint."""
    out = tmp_path_factory.mktemp("trained")
    command = [sys.executable, "-m", "tests.hugging_face.train_with_fsdp", str(out), *TRAINED]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=250)
    return out


def save_torchtitan(model: Any, folder: Path, newer: bool) -> Path:
    dcp.save(torchtitan_state(model, newer), checkpoint_id=folder)
    return folder


def home(run: Path, original: Path, **options: Any) -> Any:
    return ckptools.consolidate(run, f"{run.parent / 'hf'}/", like=original, check=True, **options)


def is_same(model: Any, folder: Path) -> bool:
    """Whether transformers loads the same weights, bit for bit, which say the same.

    Logits of experts differ in their last bit, as their kernel adds up in another order where memory is aligned so.
    """
    found = loaded_strictly(folder)
    weights, own = found.state_dict(), model.state_dict()
    same = weights.keys() == own.keys() and all(torch.equal(weights[name], own[name]) for name in own)
    return same and torch.allclose(logits(found), logits(model), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_model_trained_with_fsdp_comes_home(name, trained, tmp_path):
    model = toy_model(name)
    model.load_state_dict(torch.load(trained / name / "trained.pt"))
    home(trained / name / "run", save_original(name, tmp_path / "original"))
    assert is_same(model, trained / name / "hf")
    assert not torch.equal(logits(model), logits(toy_model(name))), "training has changed nothing"


@pytest.mark.slow
@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_torchtitan_names_come_home(name, newer, tmp_path):
    model = toy_model(name)
    home(save_torchtitan(model, tmp_path / "run", newer), save_original(name, tmp_path / "original"))
    assert is_same(model, tmp_path / "hf")


@pytest.mark.slow
@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2-moe", "qwen3-moe"])
def test_megatron_names_come_home(name, te, tmp_path):
    model = toy_model(name)
    run = save_megatron(model, tmp_path / "run", te=te)
    home(run, save_original(name, tmp_path / "original"))
    assert is_same(model, tmp_path / "hf")
