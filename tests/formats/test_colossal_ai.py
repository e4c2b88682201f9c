"""Colossal-AI's folders, made by hand as its checkpoint_io writes them: parts, lost files, an index that lies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.errors import NotWholeError, ReadError

MODEL = {name: torch.randn(4, 3, generator=torch.Generator().manual_seed(k)) for k, name in enumerate("ab")}


@pytest.fixture
def step(tmp_path) -> Path:
    folder = tmp_path / "epoch-0_step-10"
    (folder / "modeling").mkdir(parents=True)
    (folder / "optimizer").mkdir()
    models, states = {}, {}
    for number, (name, tensor) in enumerate(MODEL.items()):
        models[name], states[str(number)] = f"pytorch_model-{number:05d}.bin", f"pytorch_optim-{number:05d}.bin"
        torch.save({name: tensor}, folder / "modeling" / models[name])
        torch.save(
            {number: {"step": torch.tensor(3.0), "exp_avg": tensor * 2}}, folder / "optimizer" / states[str(number)]
        )
    index = {"metadata": {"total_size": 96}, "weight_map": models}
    (folder / "modeling/pytorch_model.bin.index.json").write_text(json.dumps(index))
    index = {"metadata": {"param_groups": "pytorch_optim_group.bin", "total_size": 96}, "weight_map": states}
    (folder / "optimizer/pytorch_optim.bin.index.json").write_text(json.dumps(index))
    torch.save({"param_groups": [{"lr": 0.1, "params": [0, 1]}]}, folder / "optimizer/pytorch_optim_group.bin")
    torch.save({"last_epoch": 3}, folder / "lr_scheduler")
    (folder / "running_states.json").write_text('{"epoch": 0, "step": 10}')
    return folder


def test_the_parts_are_one_checkpoint(step, tmp_path):
    ck = ckptools.open(step)
    assert (ck.format, ck.whole, ck.step.value) == ("colossal_ai", True, 10)
    ck.consolidate(tmp_path / "out.pt")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all(torch.equal(saved["model"][name], tensor) for name, tensor in MODEL.items())
    assert torch.equal(saved["optimizer"]["state"][1]["exp_avg"], MODEL["b"] * 2)
    assert (saved["lr_scheduler"]["last_epoch"], saved["optimizer"]["param_groups"][0]["lr"]) == (3, 0.1)


@pytest.mark.parametrize("harm", ["delete", "cut", "swap"])
def test_a_file_that_is_harmed_is_noticed(step, tmp_path, harm):
    names = sorted(p for part in ("modeling", "optimizer") for p in (step / part).glob("*.bin"))
    for file in names:
        kept = file.read_bytes()
        if harm == "delete":
            file.unlink()
        elif harm == "cut":
            file.write_bytes(kept[:-30])
        else:
            shutil.copy(names[names.index(file) - 1], file)
        assert not ckptools.open(step).whole, file.name
        with pytest.raises(NotWholeError):
            ckptools.consolidate(step, tmp_path / "out.pt")
        file.write_bytes(kept)


@pytest.mark.parametrize("name", ["../out.bin", "/etc/passwd", 7])
def test_an_index_that_leads_elsewhere_is_refused(step, name):
    path = step / "optimizer/pytorch_optim.bin.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": {"0": name}}))
    with pytest.raises(ReadError, match="weight_map"):
        ckptools.open(step)
