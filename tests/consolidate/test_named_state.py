"""Optimizer state under the names of its parameters, in outputs where a number means nothing."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptools
from tests.truth import FIXTURES, WHOLE, Known, load_truth

BY_NUMBER = next(known for known in WHOLE if known.name == "dcp-ddp-number-plain-w2")
SNAPSHOT = next(known for known in WHOLE if known.name == "torch2.13.0-ddp-w4")


def moments(known: Known) -> dict[str, bytes]:
    truth = load_truth(known.name)
    found = {k.removeprefix("optim/"): v for k, v in truth.items() if k.startswith("optim/")}
    return {f"state.{k.replace('/', '.')}": data for k, (_, data, _) in found.items()}


@pytest.mark.parametrize("known", (BY_NUMBER, SNAPSHOT), ids=lambda k: k.name)
def test_safetensors_hold_an_optimizers_state_by_name(known, tmp_path):
    done = known.open().consolidate(tmp_path / "o.safetensors", only="optimizer")
    written = {k: v.numpy().tobytes() for k, v in load_file(tmp_path / "o.safetensors").items()}
    assert written == moments(known)
    values = json.loads((tmp_path / "o.safetensors.json").read_text())["values"]
    names = [name for group in values["param_groups"] for name in group["params"]]
    assert all(f"state.{name}.exp_avg" in written for name in names) and len(names) == len(set(names)) > 3
    assert any("keyed by number" in note for note in done.notes)


def test_what_is_assumed_is_said_in_the_last_lines(tmp_path):
    done = SNAPSHOT.open().consolidate(tmp_path / "o.safetensors", only="optimizer")
    assert any("11 named in the order of the model, assumed" in note for note in done.notes)


@pytest.mark.parametrize("output", ["o.safetensors", "o.dcp"])
def test_without_names_the_numbers_stay_and_it_is_said_what_to_do(output, tmp_path):
    layout = "flat" if output == "o.dcp" else "saved"
    done = ckptools.consolidate(BY_NUMBER.file, tmp_path / output, only="optimizer", layout=layout)
    assert {job.fqn.split("state.")[1].split(".")[0] for job in done.layout.jobs} == set("0123")
    assert any("names FROM" in note for note in done.notes)
    assert any("under its number (4)" in note for note in done.notes)


def test_a_dcp_with_names_that_were_given_loads_by_name(tmp_path):
    BY_NUMBER.open().consolidate(tmp_path / "o.dcp", layout="flat")
    truth = load_truth(BY_NUMBER.name)
    state = {f"{n}.weight": {"exp_avg": torch.zeros(8, 8)} for n in range(4)}
    dcp.load({"optimizer": {"state": state}}, checkpoint_id=tmp_path / "o.dcp")
    assert all(s["exp_avg"].numpy().tobytes() == truth[f"optim/{k}/exp_avg"][1] for k, s in state.items())


def test_a_pt_keeps_the_numbers_that_load_state_dict_takes(tmp_path):
    BY_NUMBER.open().consolidate(tmp_path / "all.pt")
    assert list(torch.load(tmp_path / "all.pt")["optim"]["state"]) == [0, 1, 2, 3]


def test_what_is_left_out_is_listed_under_its_name(tmp_path):
    known = next(k for k in WHOLE if k.name == "verl-fsdp2-bf16")
    folder = tmp_path / "actor"
    folder.mkdir()
    for file in (FIXTURES / known.name / known.path).parent.glob("*_world_size_4_rank_[012].pt"):
        (folder / file.name).write_bytes(file.read_bytes())
    ck = ckptools.open(folder)
    done = ck.consolidate(tmp_path / "o.safetensors", only="optimizer", allow_missing=True)
    assert done.left_out and all(name.split(".")[1] in ("model", "lm_head") for name in done.missing)


def test_of_two_optimizers_in_a_list_the_one_by_number_gets_names(tmp_path):
    model = torch.nn.Linear(3, 2)
    model(torch.ones(3)).sum().backward()
    numbered = torch.optim.Adam(model.parameters())
    numbered.step()
    named = {"state": {"weight": {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1, "params": ["weight"]}]}
    torch.save({"model": model.state_dict(), "optimizers": [named, numbered.state_dict()]}, tmp_path / "saved.pt")
    ckptools.consolidate(tmp_path / "saved.pt", tmp_path / "o.safetensors", only="all")
    state = {k: v for k, v in load_file(tmp_path / "o.safetensors").items() if "exp_avg" in k and "sq" not in k}
    assert sorted(state) == [
        "optimizers.0.state.weight.exp_avg",
        "optimizers.1.state.bias.exp_avg",
        "optimizers.1.state.weight.exp_avg",
    ]
