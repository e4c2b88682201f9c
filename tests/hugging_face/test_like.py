"""`consolidate --like`: what is as in ORIGINAL, what is cut or left out and why, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptools
from ckptools.errors import CkptoolsError, NotWholeError, OutputExistsError, RefusedError, UsageError
from tests.hugging_face.toy_models import loaded_strictly, logits, save_original, toy_model
from tests.hugging_face.trainer_names import save_megatron, torchtitan_state

EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return save_original("llama", tmp_path / "original")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A Llama as FSDP's users save it: a DCP with the model under its own names."""
    return saved(toy_model("llama").state_dict(), tmp_path)


def saved(state: Any, tmp_path: Path, name: str = "run") -> Path:
    dcp.save({"model": dict(state)}, checkpoint_id=tmp_path / name)
    return tmp_path / name


def home(run: Path, original: Path | str, **options: Any) -> Any:
    return ckptools.consolidate(run, f"{run.parent / 'hf'}/", like=original, **options)


def refused(run: Path, original: Path | str, kind: type[CkptoolsError] = RefusedError, **options: Any) -> str:
    """The message of a refusal, which leaves nothing behind."""
    with pytest.raises(kind) as error:
        home(run, original, **options)
    assert not list(run.parent.glob("*hf*")), "something was written"
    return str(error.value)


# -- as there ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_config_and_tokenizer_are_copied_as_they_are(run, original):
    from transformers import AutoTokenizer

    done = home(run, original)
    assert done.like.copied[-1] == "config.json"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (run.parent / "hf" / name).read_bytes() == (original / name).read_bytes()
    assert AutoTokenizer.from_pretrained(run.parent / "hf")("w5 w7")["input_ids"] == [5, 7]


def test_every_tensor_is_in_the_file_in_which_it_is_there(run, tmp_path):
    original = save_original("llama", tmp_path / "original", max_shard_size="30KB")
    home(run, original, check=True)
    there = json.loads((original / "model.safetensors.index.json").read_text())["weight_map"]
    here = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    assert here == there and len(set(there.values())) > 2
    assert torch.equal(logits(loaded_strictly(tmp_path / "hf")), logits(toy_model("llama")))


def test_dtypes_are_those_there(run, tmp_path):
    original = save_original("llama", tmp_path / "original", torch.bfloat16)
    done = home(run, original, check=True)
    assert done.converted == {("float32", "bfloat16"): 21}
    toy_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "by transformers")
    assert torch.equal(*(logits(loaded_strictly(tmp_path / name)) for name in ("hf", "by transformers")))


# transformers 5 has all experts in one tensor in memory, and saves each expert; it renames other models. ckptools has
# a table for the first models only.
BY_TABLE = ("llama", "llama-tied", "gpt2", "qwen3-moe", "mixtral", "phi3")
BY_TRANSFORMERS = ("deepseek-v3", "minimax-m2", "granitemoe")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BY_TABLE, *BY_TRANSFORMERS])
def test_a_config_alone_is_enough_for_what_save_pretrained_writes(name, tmp_path):
    model, config = toy_model(name), save_original(name, tmp_path / "original") / "config.json"
    done = home(saved(model.state_dict(), tmp_path), config, check=True)
    assert done.like.copied == ("config.json",)
    assert not [rule for rule in done.like.rules if rule.old == rule.new], "a rename that renames nothing"
    model.save_pretrained(tmp_path / "by transformers")
    here, there = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "by transformers"))
    assert here.keys() == there.keys() and all(torch.equal(here[key], there[key]) for key in here)
    weights, own = loaded_strictly(tmp_path / "hf").state_dict(), model.state_dict()
    assert weights.keys() == own.keys() and all(torch.equal(weights[key], own[key]) for key in own)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe", "mixtral", *BY_TRANSFORMERS])
def test_a_pt_like_a_config_is_what_load_state_dict_takes(name, tmp_path):
    model, original = toy_model(name), tmp_path / "original"
    model.save_pretrained(original)
    done = ckptools.consolidate(original, tmp_path / "hf.pt", like=original / "config.json", check=True)
    assert done.like.copied == () and {path.name for path in tmp_path.iterdir()} == {"original", "hf.pt"}
    state, own = torch.load(tmp_path / "hf.pt", weights_only=True), model.state_dict()
    assert state.keys() == own.keys() and all(torch.equal(state[key], own[key]) for key in own)
    assert not any(toy_model(name, seed=1).load_state_dict(state))


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_experts_come_home_to_a_folder_in_either_form(name, tmp_path):
    original, state = save_original(name, tmp_path / "original"), toy_model(name).state_dict()
    home(saved({f"module.{key}": value for key, value in state.items()}, tmp_path), original, check=True)
    weights = loaded_strictly(tmp_path / "hf").state_dict()
    assert all(torch.equal(weights[key], value) for key, value in state.items())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"n_routed_experts": 8}, r"down_proj: \[4, 32, 24\] here and \[8, 32, 24\] there"),
        ({"num_hidden_layers": 3}, "lacks"),
        ({"moe_intermediate_size": 32}, "down_proj"),
    ],
)
def test_a_config_of_another_size_is_refused(changes, why, tmp_path):
    config = save_original("deepseek-v3", tmp_path / "original") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    said = refused(saved(toy_model("deepseek-v3").state_dict(), tmp_path), config)
    assert re.search(why, said), said


@pytest.mark.parametrize("gone", [EXPERT.format(3, "down"), EXPERT.format(0, "gate")])
def test_experts_that_are_not_complete_are_not_joined(gone, tmp_path):
    config = save_original("deepseek-v3", tmp_path / "original") / "config.json"
    state = load_file(config.parent / "model.safetensors")
    del state[gone]
    run = saved(state, tmp_path)
    with pytest.raises(RefusedError, match=r"lacks 1 name .*experts\.(down|gate_up)_proj"):
        ckptools.consolidate(run, tmp_path / "x.pt", like=config)
    assert gone in refused(run, config)


def test_the_config_states_the_dtype_that_is_written(run, original, tmp_path):
    stated = json.loads((original / "config.json").read_text())
    done = home(run, original, dtype="bf16")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written == {**stated, "dtype": "bfloat16"} != stated
    assert any(note.startswith("config.json states bfloat16") for note in done.notes)
    assert {value.dtype for value in loaded_strictly(tmp_path / "hf").state_dict().values()} == {torch.bfloat16}


def test_a_config_of_quantized_weights_is_not_written_beside_values(run, original, tmp_path):
    config, stated = original / "config.json", json.loads((original / "config.json").read_text())
    config.write_text(json.dumps({**stated, "quantization_config": {"quant_method": "fp8"}}))
    done = home(run, config)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == stated
    assert any("without its quantization_config" in note for note in done.notes)


def test_a_prefix_is_found_as_match_finds_it_and_stated(original, tmp_path):
    state = {f"module._orig_mod.{name}": value for name, value in toy_model("llama").state_dict().items()}
    (rule,) = home(saved(state, tmp_path), original).like.rules
    assert (rule.words, rule.tensors, rule.assumed) == ("drop prefix 'module._orig_mod.'", 21, False)


# -- left out, cut ----------------------------------------------------------------------------------------------------


def test_a_tied_head_is_left_out_where_it_has_the_same_values(tmp_path):
    original, state = save_original("llama-tied", tmp_path / "original"), toy_model("llama-tied").state_dict()
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    done = home(saved(state, tmp_path), original)
    assert done.like.left["lm_head.weight"].startswith("tied: the same values as model.embed_tokens.weight")
    assert "lm_head.weight" not in load_file(tmp_path / "hf" / "model.safetensors")


def test_a_tied_head_that_only_the_original_has_by_name_is_the_embedding(tmp_path):
    from safetensors.torch import save_file

    original, state = save_original("gpt2", tmp_path / "original"), toy_model("gpt2").state_dict()
    there = load_file(original / "model.safetensors")
    save_file({**there, "lm_head.weight": there["transformer.wte.weight"].clone()}, original / "model.safetensors")
    del state["lm_head.weight"]
    home(saved(state, tmp_path), original)
    assert torch.equal(logits(loaded_strictly(tmp_path / "hf")), logits(toy_model("gpt2")))


def test_buffers_that_a_model_computes_are_left_out(original, tmp_path):
    state = {**toy_model("llama").state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    done = home(saved(state, tmp_path), original)
    assert done.like.left == {"model.layers.0.self_attn.rotary_emb.inv_freq": "a buffer that the model computes anew"}


def test_no_cast_to_a_dtype_of_8_bits_is_made(run, original):
    from safetensors.torch import save_file

    weights = load_file(original / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(weights, original / "model.safetensors")
    assert "model.norm.weight is float32 here and float8_e4m3fn there" in refused(run, original)


def test_a_head_of_other_values_is_not_left_out_for_a_tied_model(tmp_path):
    original, state = save_original("llama-tied", tmp_path / "original"), toy_model("llama-tied").state_dict()
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    state["lm_head.weight"][3, 4] += 1
    assert "no place for 1 tensor: lm_head.weight" in refused(saved(state, tmp_path), original)


def padded_run(fill: float, tmp_path: Path) -> Path:
    state = toy_model("llama").state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name], torch.full((32, 32), fill)])
    return saved(state, tmp_path)


def test_rows_of_zeros_behind_the_vocabulary_are_cut(original, tmp_path):
    done = home(padded_run(0, tmp_path), original, check=True)
    assert [(c.name, c.rows, c.kept) for c in done.like.cut] == [
        ("lm_head.weight", 128, 96),
        ("model.embed_tokens.weight", 128, 96),
    ]
    assert torch.equal(logits(loaded_strictly(tmp_path / "hf")), logits(toy_model("llama")))


def test_rows_that_may_be_tokens_are_cut_only_where_that_is_assumed(original, tmp_path):
    run = padded_run(0.1, tmp_path)
    assert "nothing proves that its last rows are padding" in refused(run, original)
    assert {cut.why for cut in home(run, original, assume=True).like.cut} == {"assumed (assume)"}


def test_megatrons_arguments_prove_its_padding(original, tmp_path):
    model = toy_model("llama")
    run = save_megatron(model, tmp_path / "run", padded=128, make_vocab_size_divisible_by=64)
    done = home(run, original, check=True)
    assert {cut.why for cut in done.like.cut} == {
        "args.padded_vocab_size is 128, which is 96 rounded up to a multiple of 128"
    }
    assert torch.equal(logits(loaded_strictly(tmp_path / "hf")), logits(model))


def test_arguments_that_do_not_add_up_prove_nothing(original, tmp_path):
    run = save_megatron(toy_model("llama"), tmp_path / "run", padded=128, make_vocab_size_divisible_by=8)
    assert "nothing proves that its last rows are padding" in refused(run, original)


# -- refused ----------------------------------------------------------------------------------------------------------


def test_another_architecture_is_refused_and_both_sides_are_named(run, tmp_path):
    said = refused(run, save_original("gpt2", tmp_path / "gpt2"))
    assert "lacks 28 names" in said and "no place for 21 tensors: model.embed_tokens.weight" in said


def test_another_size_is_refused_by_name(run, original):
    from transformers import LlamaConfig, LlamaForCausalLM

    other = LlamaConfig.from_pretrained(original, intermediate_size=56)
    LlamaForCausalLM(other).save_pretrained(original)
    assert "model.layers.0.mlp.down_proj.weight is [32, 48] here and [32, 56] there" in refused(run, original)


def test_more_layers_are_refused(run, original):
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig.from_pretrained(original, num_hidden_layers=3)).save_pretrained(original)
    assert "lacks 9 names" in refused(run, original)


@pytest.mark.parametrize(
    ("gone", "added", "why"),
    [
        ("tokenizer.json", {}, "tokenizer_config.json and no vocabulary"),
        ("tokenizer.json", {"vocab.json": "{}"}, "there is no merges.txt"),
        ("tokenizer.json", {"merges.txt": "a b"}, "there is no vocab.json"),
    ],
)
def test_half_a_tokenizer_is_refused(gone, added, why, run, original):
    (original / gone).unlink()
    for name, text in added.items():
        (original / name).write_text(text)
    assert f"half a tokenizer: {why}" in refused(run, original)


def test_a_tokenizer_that_was_cut_short_is_refused(run, original):
    text = (original / "tokenizer.json").read_bytes()
    (original / "tokenizer.json").write_bytes(text[:-9])
    assert "tokenizer.json: is no JSON" in refused(run, original, CkptoolsError)


def test_an_original_that_lacks_a_file_is_refused(run, tmp_path):
    original = save_original("llama", tmp_path / "original", max_shard_size="30KB")
    next(original.glob("model-00002-*")).unlink()
    assert "its names are not all known" in refused(run, original)


def test_what_is_no_hugging_face_model_is_a_mistake(run, original, tmp_path):
    assert "no config.json" in refused(run, run, UsageError)
    assert "takes a Hugging Face folder" in refused(run, original / "model.safetensors", UsageError)
    (tmp_path / "config.json").write_text("{}")
    assert "states no model_type" in refused(run, tmp_path / "config.json", CkptoolsError)


def test_a_run_that_is_not_whole_is_refused(run, original):
    next(run.glob("__0_*")).unlink()
    refused(run, original, NotWholeError)


def test_an_extra_tensor_is_named(original, tmp_path):
    state = {**toy_model("llama").state_dict(), "value_head.weight": torch.ones(1, 32)}
    assert "no place for 1 tensor: value_head.weight" in refused(saved(state, tmp_path), original)


@pytest.mark.parametrize("name", ["rotary_interleaved", "apply_layernorm_1p"])
def test_settings_of_megatron_without_a_rule_are_refused(name, original, tmp_path):
    if name == "rotary_interleaved":
        run = save_megatron(toy_model("llama"), tmp_path / "run")
        for file in run.rglob("*.pt"):
            tree = torch.load(file, weights_only=False)
            tree["args"].rotary_interleaved = True
            torch.save(tree, file)
    else:
        run = save_megatron(toy_model("llama"), tmp_path / "run", apply_layernorm_1p=True)
    assert f"args.{name} is set" in refused(run, original)


def test_megatrons_defaults_are_assumed_only_if_that_is_allowed(original, tmp_path):
    from tests.hugging_face.trainer_names import megatron_state

    run = saved(megatron_state(toy_model("llama")), tmp_path)
    assert "assume takes the defaults" in refused(run, original)
    home(run, original, assume=True)
    assert torch.equal(logits(loaded_strictly(tmp_path / "hf")), logits(toy_model("llama")))


def test_names_of_a_trainer_are_not_renamed_for_a_model_without_a_rule(tmp_path):
    run = saved(torchtitan_state(toy_model("llama")), tmp_path)
    original = save_original("mixtral", tmp_path / "original")
    assert "no documented rule turns them into a model of type 'mixtral'" in refused(run, original)


@pytest.mark.parametrize(
    "options",
    [
        {"rename": ["a=b"]},
        {"fill_from": "older"},
        {"strip_prefix": "a"},
        {"allow_missing": True},
        {"only": "all"},
        {"tied": "drop"},
    ],
)
def test_options_that_contradict_it_are_a_mistake(options, run, original):
    refused(run, original, UsageError, **options)


def test_the_output_is_a_new_folder(run, original, tmp_path):
    with pytest.raises(UsageError, match="-o DIR/"):
        ckptools.consolidate(run, tmp_path / "out.safetensors", like=original)
    with pytest.raises(OutputExistsError, match="the folder of like itself"):
        ckptools.consolidate(run, original, like=original, force=True)
    home(run, original)
    with pytest.raises(OutputExistsError, match="force=True replaces it"):
        home(run, original)
    home(run, original, force=True)
    (tmp_path / "hf" / "thesis.tex").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"holds 'thesis\.tex'"):
        home(run, original, force=True)


def test_an_empty_folder_is_filled(run, original, tmp_path):
    (tmp_path / "hf").mkdir()
    home(run, original)
    assert len(load_file(tmp_path / "hf" / "model.safetensors")) == 21


def test_a_dry_run_says_the_same_and_writes_nothing(run, original, tmp_path):
    done = home(run, original, dry_run=True)
    assert done.like.elements == 21_664 and not (tmp_path / "hf").exists()
