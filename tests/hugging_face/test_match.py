"""`match` beside a Hugging Face config or module: as `from_pretrained` loads it, and as `load_state_dict` does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from tests.hugging_face.toy_models import CONFIGS, loaded_strictly, toy_model


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request, tmp_path_factory) -> Path:
    """A model of each type as `save_pretrained` leaves it."""
    folder = tmp_path_factory.mktemp(request.param)
    toy_model(request.param).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    toy_model("qwen3-moe").save_pretrained(folder)
    return folder


def toy_moe():
    return toy_model("qwen3-moe")


def damaged(folder: Path, to: Path, **changes: torch.Tensor | None) -> Path:
    """A copy in which tensors are gone, or others."""
    state = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del state[name]
        else:
            state[name] = value
    save_file(state, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


@pytest.mark.slow
def test_what_from_pretrained_loads_is_said_to_load(saved):
    loaded_strictly(saved)
    found = ckptools.open(saved).match(saved / "config.json")
    assert found.loads and found.same + found.converted + sum(r.status == "tied" for r in found.rows) == len(
        [row for row in found.rows if row.name]
    )


def test_the_experts_that_transformers_joins_are_counted(moe):
    result = CliRunner().invoke(app, ["match", str(moe), "--to", str(moe / "config.json")])
    assert result.exit_code == 0
    said = " ".join(result.stdout.split())
    assert re.search(r"loads \d+ of \d+ names .*transformers joins 24 tensors of experts into 4 while loading", said)


def test_a_module_gets_the_command_that_writes_what_it_loads(moe, tmp_path):
    model = toy_model("qwen3-moe")
    found = ckptools.open(moe).match(model)
    assert not found.loads and found.found.startswith("with load_state_dict: ")
    assert found.found.endswith(
        "; the experts are one by one here and in one tensor there; from_pretrained converts them, "
        "Trainer's resume does not"
    )
    assert (found.converted, Path(found.like)) == (0, moe / "config.json")
    said = CliRunner().invoke(app, ["match", str(moe), "--to", "tests.hugging_face.test_match:toy_moe"]).output
    assert "-o converted.pt --like" in " ".join(said.split())
    ckptools.consolidate(moe, tmp_path / "converted.pt", like=found.like)
    assert ckptools.open(tmp_path / "converted.pt").match(model).loads
    assert not any(model.load_state_dict(torch.load(tmp_path / "converted.pt", weights_only=True)))


def test_a_tied_head_is_not_said_to_be_converted(tmp_path):
    model = toy_model("llama-tied")
    model.save_pretrained(tmp_path)
    found = ckptools.open(tmp_path).match(model)
    assert not found.loads and not found.apart
    assert [row.name for row in found.rows if row.status == "tied"] == ["lm_head.weight"]
    assert ckptools.open(tmp_path).match(tmp_path / "config.json").loads


EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({EXPERT.format(3, "down"): None}, "shape"),
        ({EXPERT.format(3, "gate"): None}, "unknown"),
        ({EXPERT.format(0, "down"): torch.ones(3, 3)}, "unknown"),
        ({EXPERT.format(7, "down"): torch.ones(32, 24)}, "shape"),
        ({"model.norm.weight": None}, "missing"),
        ({"model.other.weight": torch.ones(2)}, "unexpected"),
    ],
)
def test_experts_that_transformers_cannot_join_do_not_load(changes, status, moe, tmp_path):
    folder = damaged(moe, tmp_path, **changes)
    found = ckptools.open(folder).match(folder / "config.json")
    assert not found.loads and status in {row.status for row in found.rows}
    with pytest.raises((AssertionError, RuntimeError)):
        loaded_strictly(folder)


def test_the_base_model_s_names_and_old_buffers_load_as_transformers_takes_them(moe, tmp_path):
    state = load_file(moe / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in state.items()}
    save_file({**bare, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "model.safetensors")
    found = ckptools.open(tmp_path / "model.safetensors").match(moe / "config.json")
    assert found.loads and "leaves out 1 tensor while loading" in found.while_loading
    assert {row.status for row in found.rows} == {"same", "converted", "ignored"}


def gpt_oss(folder: Path, method: str = "mxfp4") -> Path:
    """gpt-oss with MXFP4 blocks and scales in the place of its experts."""
    import transformers

    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["full_attention"],
    }  # fmt: skip
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
    state = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        state[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 127, dtype=torch.uint8)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_dict(), "architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    return folder


def test_blocks_that_transformers_dequantizes_load(tmp_path):
    folder = gpt_oss(tmp_path)
    loaded_strictly(folder)
    found = ckptools.open(folder).match(folder / "config.json")
    assert found.loads and found.while_loading.startswith("transformers dequantizes (mxfp4) 4 tensors")


def test_what_a_quantizer_makes_of_codes_is_not_judged_where_it_is_not_known(tmp_path):
    folder = gpt_oss(tmp_path, "gptq")
    found = ckptools.open(folder).match(folder / "config.json")
    assert not found.loads and "is not judged: its config says that it is quantized (gptq)" in found.not_compared[0]


def test_a_user_s_model_keeps_its_values_when_it_is_compared(moe):
    model = toy_model("qwen3-moe")
    before = model.state_dict()["model.norm.weight"].clone()
    ckptools.open(moe).match(model)
    assert torch.equal(model.state_dict()["model.norm.weight"], before)
