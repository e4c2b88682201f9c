"""LoRA adapters: found by names, said in the first lines, and what is wrong with them."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptools
from ckptools.inspect.record import inspect_report
from ckptools.inspect.sections import report_json
from ckptools.training_state.adapters import adapters_of, matches
from tests.truth import FIXTURES

RUN = FIXTURES / "peft-lora-fsdp2" / "ckpt"
ADAPTERS = FIXTURES / "peft-adapters"
Q, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qv")


def lines(path: Path) -> list[str]:
    """What `inspect` says of adapters, one line for each."""
    rows = [" ".join(line.split()) for line in str(ckptools.open(path)).splitlines()]
    return [row.removeprefix("adapter ") for row in rows if "LoRA" in row or "DoRA" in row]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            RUN / "rank0.pt",
            ["LoRA r=4, alpha not stated on q_proj, v_proj, down_proj of 2 layers; lm_head.weight trained in full; "
             "base weights here, frozen"],
        ),
        (
            ADAPTERS / "rslora",
            ["rsLoRA r=3, alpha=5 on q_proj, v_proj of 2 layers; base weights not here; adapter_config.json"],
        ),
        (
            ADAPTERS / "ranks",
            ["LoRA r=2 to 3, alpha=5 to 10 on q_proj, v_proj of 2 layers; base weights not here; adapter_config.json"],
        ),
        (
            ADAPTERS / "dora_embeddings",
            ["DoRA r=3, alpha=5 on embed_tokens; base weights not here; adapter_config.json"],
        ),
        (
            ADAPTERS / "two_adapters.pt",
            ["LoRA r=3, alpha not stated on q_proj of 2 layers; base weights here",
             "LoRA other: r=2, alpha not stated on q_proj, v_proj of 2 layers; base weights here"],
        ),
    ],
)  # fmt: skip
def test_an_adapter_is_said_in_the_first_lines(path, said):
    assert lines(path) == said


def test_a_base_without_an_adapter_has_none():
    assert not adapters_of(ckptools.open(ADAPTERS / "base")) and not lines(ADAPTERS / "base")


def test_json_lists_the_adapters():
    (found,) = json.loads(report_json(inspect_report(ckptools.open(ADAPTERS / "trained")), ()))["adapters"]
    assert (found["kind"], found["ranks"], found["alphas"], found["in_full"]) == ("LoRA", [4], [6], ["lm_head.weight"])
    assert found["base_weights"] == 0 and len(found["modules"]) == 6


def test_base_weights_that_the_optimizer_trains_are_not_called_frozen(tmp_path):
    names = ["base_model.model.q.base_layer.weight", "base_model.model.q.lora_A.default.weight",
             "base_model.model.q.lora_B.default.weight"]  # fmt: skip
    model = {name: torch.randn(4, 4) for name in names}
    state = {name: {"exp_avg": torch.ones(4, 4), "exp_avg_sq": torch.ones(4, 4)} for name in names}
    for trained, frozen in ((names, False), (names[1:], True)):
        groups = [{"lr": 0.1, "params": list(trained)}]
        optimizer = {"state": {name: state[name] for name in trained}, "param_groups": groups}
        torch.save({"model": model, "optimizer": optimizer}, tmp_path / "x.pt")
        (adapter,) = adapters_of(ckptools.open(tmp_path / "x.pt"))
        assert adapter.frozen is frozen


# -- damage ------------------------------------------------------------------------------------------------------------


def copy_of(tmp_path: Path, name: str, lost: str = "", **stated: Any) -> Path:
    """A copy of an adapter without the tensors whose names contain a text, and with another config."""
    folder = tmp_path / name
    shutil.copytree(ADAPTERS / name, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    kept = {key: value for key, value in tensors.items() if not lost or lost not in key}
    save_file(kept, folder / "adapter_model.safetensors", {"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **stated}))
    return folder


def errors(path: Path) -> list[str]:
    return [f"{p.code} {p.message}" for p in ckptools.open(path).problems if p.severity == "error"]


@pytest.mark.parametrize(("lost", "here", "gone"), [("lora_A", "B", "A"), ("lora_B", "A", "B")])
def test_one_half_of_a_pair_without_the_other_is_an_error(tmp_path, lost, here, gone):
    folder = copy_of(tmp_path, "ranks", f"layers.1.self_attn.q_proj.{lost}")
    module = "model.layers.1.self_attn.q_proj"
    assert errors(folder) == [f"CK107 of {module} its lora_{here} is here, and its lora_{gone} is not"]
    with pytest.raises(ckptools.CkptoolsError, match=f"its lora_{gone} is not"):
        ckptools.open(folder).consolidate(f"{tmp_path}/out/", only="lora")


@pytest.mark.parametrize(
    ("key", "shape", "why"),
    [
        ("lora_B.weight", (8, 2), r"lora_A \[3, 8\] and lora_B \[8, 2\] of .*q_proj have no common r"),
        ("lora_magnitude_vector", (5,), r"lora_magnitude_vector \[5\] of .*q_proj does not fit lora_B \[8, 3\]"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_an_error(tmp_path, key, shape, why):
    folder = copy_of(tmp_path, "dora")
    path = folder / "adapter_model.safetensors"
    name = f"base_model.model.model.layers.0.self_attn.q_proj.{key}"
    save_file(load_file(path) | {name: torch.ones(shape)}, path, {"format": "pt"})
    (error,) = errors(folder)
    assert error.startswith("CK007 ") and re.search(why, error)


def test_a_base_weight_of_another_shape_is_an_error(tmp_path):
    state = torch.load(ADAPTERS / "two_adapters.pt")
    state["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"] = torch.ones(6, 8)
    torch.save(state, tmp_path / "x.pt")
    assert "CK007 the base weight of model.layers.0.self_attn.q_proj is [6, 8], and B·A of it is [8, 8]" in errors(
        tmp_path / "x.pt"
    )


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ({"r": 4}, "states r 4 for {Q}, and its lora_A has 3 rows"),
        (
            {"r": 4, "rank_pattern": {"q_proj": 3}},
            "states r 4 for {V}, and its lora_A has 3 rows",
        ),
        ({"target_modules": ["q_proj"]}, "does not select {V}, of which a lora_A is here"),
        (
            {"target_modules": r".*\.q_proj"},
            "does not select {V}, of which a lora_A is here",
        ),
        ({"use_dora": True}, "states use_dora True, and no magnitudes are here"),
        ({"peft_type": "IA3"}, "states peft_type IA3, and the tensors here are of LoRA"),
    ],
)
def test_a_config_that_the_tensors_contradict_is_an_error(tmp_path, stated, why):
    folder = copy_of(tmp_path, "rslora", **stated)
    assert errors(folder) == [f"CK007 adapter_config.json {why.format(Q=Q, V=V)}"]
    with pytest.raises(ckptools.CkptoolsError, match="adapter_config"):
        ckptools.open(folder).consolidate(f"{tmp_path}/out/", only="lora")


@pytest.mark.parametrize("name", ["trained", "dora", "ranks", "embeddings", "conv1d", "half", "rslora", "dora_bf16"])
def test_what_peft_wrote_has_nothing_wrong(name):
    assert ckptools.open(ADAPTERS / name).whole and not errors(ADAPTERS / name)


@pytest.mark.parametrize("method", ["ADALORA", "XLORA"])
def test_another_method_with_these_names_is_called_by_its_own_and_not_written(tmp_path, method):
    folder = copy_of(tmp_path, "rslora", peft_type=method, r=12)
    assert errors(folder) == [] and lines(folder) == [] and method in str(ckptools.open(folder))
    with pytest.raises(ckptools.CkptoolsError, match=f"states peft_type '{method}': no rule here covers it"):
        ckptools.open(folder).consolidate(f"{tmp_path}/out/", only="lora")


def test_tensors_of_no_known_rule_are_not_called_lora(tmp_path):
    folder = copy_of(tmp_path, "rslora")
    path = folder / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_E"
    save_file(load_file(path) | {name: torch.ones(3, 1)}, path, {"format": "pt"})
    assert "another kind of LoRA, r=3" in str(ckptools.open(folder))
    assert [one.to_dict()["kind"] for one in adapters_of(ckptools.open(folder))] == ["another kind of LoRA"]
    with pytest.raises(ckptools.CkptoolsError, match="lora_E: no rule here covers it"):
        ckptools.open(folder).consolidate(f"{tmp_path}/out/", only="lora")


def test_a_parameter_of_experts_has_r_rows_for_each_and_no_wrong_r(tmp_path):
    begin = "base_model.model.mlp.experts"
    state = {f"{begin}.base_layer.up": torch.ones(4, 6, 8), f"{begin}.lora_A.default.weight": torch.ones(8, 6),
             f"{begin}.lora_B.default.weight": torch.ones(8, 8)}  # fmt: skip
    torch.save(state, tmp_path / "x.pt")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_parameters": ["mlp.experts.up"]})
    )
    assert errors(tmp_path / "x.pt") == []
    assert lines(tmp_path / "x.pt") == ["LoRA r=?, alpha=4 on experts; base weights here; adapter_config.json"]
    with pytest.raises(ckptools.CkptoolsError, match="target_parameters, with which PEFT merges by another rule"):
        ckptools.open(tmp_path / "x.pt").consolidate(tmp_path / "m.safetensors", merge_lora=True)


def test_a_lost_rank_is_not_an_adapter_in_halves(tmp_path):
    shutil.copy(RUN / "rank1.pt", tmp_path)
    assert all("lora_" not in error for error in errors(tmp_path))


def test_b_that_is_zero_is_said_where_values_are_read(tmp_path):
    folder = copy_of(tmp_path, "rslora")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({k: torch.zeros_like(v) if "lora_B" in k else v for k, v in tensors.items()}, path, {"format": "pt"})
    found = [p.message for p in ckptools.open(folder).verify(values=True).problems]
    assert len(found) == 4 and all(
        "all zero, as PEFT starts it: this adapter changes nothing here" in one for one in found
    )


# -- patterns of a config ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("q_proj", True), ("v_proj", False), (r"layers\.0\.self_attn\.q_proj", True), (r".*\.self_attn\..*", True),
        ("proj", False), ("(", None), ("a*b*c*", None), ("(a+)+", None), ("q" * 300, None),
    ],
)  # fmt: skip
def test_a_pattern_fits_as_in_peft_or_is_not_tried(pattern, fits):
    assert matches(pattern, "model.layers.0.self_attn.q_proj") is fits


def test_no_pattern_takes_long():
    begun = time.perf_counter()
    for pattern in ("(a|a)*b", "(a*)*", ".*.*.*x", "a{1,9}{1,9}", "(.*)+x", ".*.*x", "(?:a?){90}", "[a-z]+[a-z]+!"):
        matches(pattern, "a" * 190)
    assert time.perf_counter() - begun < 2
