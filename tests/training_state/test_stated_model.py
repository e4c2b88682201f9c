"""What names count and config.json states takes part in the verdict; what differs by design is whole."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptools
from ckptools.errors import NotWholeError
from ckptools.training_state.modules import absent_layers, lacking_layers, stacks_of

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_hidden_layers": 4,
    "vocab_size": 12, "tie_word_embeddings": False,
}  # fmt: skip
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


def model(layers: int = 4) -> dict[str, torch.Tensor]:
    of_layers = {f"model.layers.{n}.{m}.weight": torch.ones(8, 8) for n in range(layers) for m in MODULES}
    return {"model.embed_tokens.weight": torch.ones(12, 8), **of_layers, "lm_head.weight": torch.ones(12, 8)}


def saved(folder: Path, tensors: dict[str, torch.Tensor], config: dict | None = None) -> ckptools.Checkpoint:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return ckptools.open(folder)


def without(tensors: dict[str, torch.Tensor], *parts: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if not any(part in name for part in parts)}


def told(ck: ckptools.Checkpoint) -> list[tuple[str, str | None, str]]:
    return [(p.code, p.tensor, p.severity) for p in ck.problems if p.severity != "note"]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_layer_that_the_config_counts_and_no_tensor_is_of_is_lost(tmp_path, number):
    ck = saved(tmp_path / "x", without(model(), f".layers.{number}."), LLAMA)
    assert told(ck) == [("CK107", f"model.layers.{number}", "error")] and ck.whole is False
    assert f"model.layers.{number}" in ck.verdict.headline and "config.json states 4 layers" in str(ck.problems[0])
    with pytest.raises(NotWholeError, match="CK107"):
        ck.consolidate(tmp_path / "out.safetensors")


def test_without_a_config_a_hole_between_layers_is_a_warning(tmp_path):
    ck = saved(tmp_path / "x", without(model(), ".layers.1."))
    assert told(ck) == [("CK107", "model.layers.1", "warning")] and ck.whole is None


@pytest.mark.parametrize(
    ("config", "severity"), [(None, "warning"), (LLAMA, "error"), ({"model_type": "own"}, "warning")]
)
def test_a_layer_that_lacks_what_the_others_have_is_told(tmp_path, config, severity):
    ck = saved(tmp_path / "x", without(model(), ".layers.2.self_attn.q", ".layers.2.self_attn.k"), config)
    assert told(ck) == [("CK107", "model.layers.2", severity)]
    assert "lacks self_attn.k_proj.weight, self_attn.q_proj.weight" in ck.problems[0].message


@pytest.mark.parametrize("form", ["pt", "nested"])
def test_a_config_counts_beside_any_file(tmp_path, form):
    tensors = without(model(), ".layers.1.")
    torch.save(tensors if form == "pt" else {"model": tensors, "step": 3}, tmp_path / "x.pt")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ckptools.open(tmp_path / "x.pt").whole is False


def test_the_counts_of_a_text_and_a_vision_model_are_held_against_their_own_layers(tmp_path):
    vision = {f"vision_tower.encoder.layers.{n}.{m}.weight": torch.ones(4, 4) for n in range(3) for m in MODULES}
    config = {
        "model_type": "both",
        "text_config": LLAMA,
        "vision_config": {"model_type": "clip", "hidden_size": 4, "num_hidden_layers": 3},
    }
    assert told(saved(tmp_path / "whole", {**model(), **vision}, config)) == []
    ck = saved(tmp_path / "cut", without({**model(), **vision}, "tower.encoder.layers.1."), config)
    assert told(ck) == [("CK107", "vision_tower.encoder.layers.1", "error")]


@pytest.mark.parametrize(
    ("table", "lost"),
    [("lm_head", "lm_head"), ("embed_tokens", "embeddings"), ("embed_tokens|lm_head", "embeddings")],
)
def test_an_output_layer_that_is_not_tied_or_an_embedding_cannot_be_absent(tmp_path, table, lost):
    assert told(saved(tmp_path / "x", without(model(), *table.split("|")), LLAMA)) == [("CK107", lost, "error")]


def test_a_smaller_vocabulary_or_another_hidden_size_than_the_config_states_is_a_warning(tmp_path):
    ck = saved(tmp_path / "x", {**model(), "model.embed_tokens.weight": torch.ones(10, 8)}, LLAMA)
    assert told(ck) == [("CK007", "model.embed_tokens.weight", "warning")] and ck.whole


def experts(rows: int = 4) -> dict[str, torch.Tensor]:
    gates = {f"model.layers.{n}.mlp.gate.weight": torch.ones(rows, 8) for n in range(3)}
    return {
        **gates,
        **{
            f"model.layers.{n}.mlp.experts.{e}.{m}.weight": torch.ones(8, 8)
            for n in range(3)
            for e in range(rows)
            for m in ("up", "down")
        },
    }


@pytest.mark.parametrize("number", [1, 3])
def test_an_expert_that_a_router_has_a_row_for_is_lost(tmp_path, number):
    ck = saved(tmp_path / "x", without(experts(), f".1.mlp.experts.{number}."))
    assert ("CK107", "model.layers.1.mlp.experts", "error") in told(ck) and ck.whole is False
    assert saved(tmp_path / "whole", experts()).whole


def adapter(*layers: int) -> dict[str, torch.Tensor]:
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    return {name.format(n, ab): torch.ones(2, 2) for n in layers for ab in "AB"}


def saved_adapter(folder: Path, tensors: dict[str, torch.Tensor], config: dict | None) -> ckptools.Checkpoint:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    return ckptools.open(folder)


LISTS_ANOTHER = {"layers_to_transform": [0, 2, 3, 5]}


@pytest.mark.parametrize(
    ("config", "number"), [(None, 1), ({}, 1), ({"target_modules": ["q_proj", "fc1"]}, 1), (LISTS_ANOTHER, 5)]
)
def test_a_layer_that_an_adapter_should_have_and_has_not_is_a_warning(tmp_path, config, number):
    ck = saved_adapter(tmp_path / "x", adapter(0, 2, 3), config)
    assert told(ck) == [("CK107", f"base_model.model.model.layers.{number}", "warning")] and ck.whole is None


@pytest.mark.parametrize(
    ("layers", "config"),
    [
        ((0, 1, 2, 3), None),
        ((0, 2, 4), {}),
        ((0, 2, 3), {"layers_to_transform": [0, 2, 3]}),
        ((5,), {"layers_to_transform": 5}),
        ((0, 2, 3), {"target_modules": r".*layers\.(0|2|3)\..*q_proj"}),
        ((0, 2, 3), {"target_modules": [f"layers.{n}.self_attn.q_proj" for n in (0, 2, 3)]}),
        ((0, 2, 3), {"layers_to_transform": "none that can be"}),
    ],
)
def test_an_adapter_of_layers_that_its_user_chose_is_whole(tmp_path, layers, config):
    ck = saved_adapter(tmp_path / "x", adapter(*layers), config)
    assert told(ck) == [] and ck.whole


DENSE_FIRST = {
    f"model.layers.{n}.{m}.weight": torch.ones(8, 8)
    for n in range(4)
    for m in (("attn.q", "mlp.up") if n == 0 else ("attn.q", "mlp.experts.0.up", "mlp.experts.1.up"))
}
HYBRID = {
    f"model.layers.{n}.{m}.weight": torch.ones(8, 8)
    for n in range(6)
    for m in (("attn.q", "attn.k", "mlp.up") if n in (2, 5) else ("mamba.a", "mamba.b", "mlp.up"))
}
CONVOLUTIONS = {f"features.{n}.{w}": torch.ones(3, 3) for n in (0, 2, 5, 7, 10) for w in ("weight", "bias")}
DROPOUT = {f"net.{n}.{m}.weight": torch.ones(3, 3) for n in (0, 2, 4) for m in ("attn", "mlp")}


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({**model(), "model.embed_tokens.weight": torch.ones(16, 8), "lm_head.weight": torch.ones(16, 8)}, LLAMA),
        (model(), {**LLAMA, "tie_word_embeddings": True}),
        (model(5), {**LLAMA, "num_nextn_predict_layers": 1}),
        (without(model(), "lm_head"), {**LLAMA, "architectures": ["LlamaModel"]}),
        ({"projector.weight": torch.ones(8, 8)}, LLAMA),
        (model(1), {**LLAMA, "model_type": "albert", "num_hidden_groups": 1, "num_hidden_layers": 1}),
        (DENSE_FIRST, None),
        (HYBRID, {**LLAMA, "model_type": "jamba", "num_hidden_layers": 6, "architectures": []}),
        (CONVOLUTIONS, None),
        (DROPOUT, None),
    ],
    ids=[
        "padded vocabulary",
        "tied and stored",
        "layer for more tokens",
        "without a head",
        "projector alone",
        "shared",
        "first layer dense",
        "hybrid",
        "between activations",
        "between dropouts",
    ],
)
def test_what_differs_by_design_is_whole(tmp_path, tensors, config):
    ck = saved(tmp_path / "x", {name: value.clone() for name, value in tensors.items()}, config)
    assert (ck.whole, told(ck)) == (True, [])


def test_layers_that_were_trained_alone_are_not_called_lost(tmp_path):
    ck = saved(tmp_path / "x", without(model(), "embed", "lm_head", ".layers.0.", ".layers.1."), LLAMA)
    assert ck.whole is not False


def test_the_numbers_of_100_000_names_take_no_noticeable_time():
    names = [f"model.layers.{n}.mlp.experts.{e}.{m}.weight" for n in range(60) for e in range(560) for m in "abc"]
    began = time.process_time()
    stacks = stacks_of(names)
    assert not any(absent_layers(stack) or lacking_layers(stack) for stack in stacks)
    assert time.process_time() - began < 2
