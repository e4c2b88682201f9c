"""`consolidate --only lora` and `--merge-lora`, against what PEFT saved and merged."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptools
from ckptools.errors import NotWholeError, RefusedError, UsageError
from tests.truth import FIXTURES

RUN = FIXTURES / "peft-lora-fsdp2" / "ckpt"
ADAPTERS = FIXTURES / "peft-adapters"
TRAINED = ADAPTERS / "trained"
BASES = {
    "trained": "base", "dora": "base_fp32", "dora_bf16": "base", "rslora": "base", "ranks": "base_fp32",
    "embeddings": "base", "dora_embeddings": "base_fp32", "half": "base", "conv1d": "gpt2", "dora_conv1d": "gpt2",
}  # fmt: skip
"""The base of each adapter."""

ROUNDED_ONCE_MORE = ("half", "embeddings")
"""Adapters of which PEFT rounds B·A before it adds it."""

IN_FLOAT64 = ("dora", "dora_conv1d", "dora_embeddings")
"""Adapters of a float32 base with DoRA, whose lengths of rows PEFT sums in float32."""


def merged(source: Path | ckptools.Checkpoint, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    opened = source if isinstance(source, ckptools.Checkpoint) else ckptools.open(source)
    opened.consolidate(out, merge_lora=True, check=True, **options)
    return load_file(out)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(found[name].equal(value) for name, value in expected.items())


def ulp(values: torch.Tensor) -> torch.Tensor:
    """The distance of the numbers around each value in its dtype."""
    bits = {torch.bfloat16: 7, torch.float32: 23}[values.dtype]
    return torch.exp2(torch.floor(torch.log2(values.double().abs().clamp(min=2.0**-100))) - bits)


# -- the merged model --------------------------------------------------------------------------------------------------


def what_peft_merged(name: str) -> dict[str, torch.Tensor]:
    state = load_file(ADAPTERS / "merged" / f"{name}.safetensors")
    # A tied output layer lies under one name in the base.
    return {key: value for key, value in state.items() if key != "lm_head.weight" or "conv1d" not in name}


@pytest.mark.parametrize("name", [name for name in BASES if name not in (*ROUNDED_ONCE_MORE, *IN_FLOAT64)])
def test_an_adapter_is_merged_bit_for_bit_as_peft_merges_it(tmp_path, name):
    found = merged(ADAPTERS / name, tmp_path / "m.safetensors", base=ADAPTERS / BASES[name])
    assert same(found, what_peft_merged(name))


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_lengths_of_dora_differ_from_those_of_peft_by_roundings_of_float32(tmp_path, name):
    found, expected = (
        merged(ADAPTERS / name, tmp_path / "m.safetensors", base=ADAPTERS / BASES[name]),
        what_peft_merged(name),
    )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert ((found[key].double() - value.double()).abs() <= 4 * ulp(value)).all(), key


@pytest.mark.parametrize("name", ROUNDED_ONCE_MORE)
def test_a_sum_is_rounded_once_where_peft_rounds_twice(tmp_path, name):
    found = merged(ADAPTERS / name, tmp_path / "m.safetensors", base=ADAPTERS / BASES[name])
    expected, base = what_peft_merged(name), load_file(ADAPTERS / BASES[name] / "model.safetensors")
    adapter = load_file(ADAPTERS / name / "adapter_model.safetensors")
    changed = {key for key in base if not expected[key].equal(base[key])}
    assert found.keys() == expected.keys() and changed
    assert all(found[key].equal(base[key]) for key in base.keys() - changed)
    for key in changed:
        stem = f"base_model.model.{key.removesuffix('.weight')}"
        part = "lora_embedding_{}" if "embed" in key else "lora_{}.weight"
        a, b = (adapter[f"{stem}.{part.format(ab)}"].double() for ab in "AB")
        delta = (b @ a * 5 / 3).T if "embed" in key else b @ a * 5 / 3
        assert ((found[key].double() - base[key].double() - delta).abs() <= ulp(found[key]) / 2 * (1 + 1e-4)).all()
        once = ulp(delta.bfloat16()) / 2 + ulp(expected[key])
        assert ((found[key].double() - expected[key].double()).abs() <= once).all()


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "dcp"])
def test_base_weights_in_the_checkpoint_are_taken_from_there(tmp_path, suffix):
    out = tmp_path / f"m.{suffix}"
    done = ckptools.open(RUN).consolidate(out, merge_lora=True, like=TRAINED, check=True)
    expected = load_file(ADAPTERS / "merged" / "trained.safetensors")
    assert same({name: value.load() for name, value in ckptools.open(out).model.items()}, expected)
    assert done.proof.merged == 6 and "LoRA r=4, alpha=6 merged into 6 weights" in "".join(done.notes)


@pytest.mark.parametrize("name", ["dora", "dora_conv1d", "embeddings"])
def test_a_weight_that_is_computed_in_many_bands_is_the_same(tmp_path, monkeypatch, name):
    whole = merged(ADAPTERS / name, tmp_path / "whole.safetensors", base=ADAPTERS / BASES[name])
    monkeypatch.setattr("ckptools.tensor_io.stream.BAND", 24)
    monkeypatch.setattr("ckptools.tensor_io.low_rank.BAND", 5)
    banded = merged(ADAPTERS / name, tmp_path / "banded.safetensors", base=ADAPTERS / BASES[name])
    for key, value in whole.items():  # the last bit of float32 depends on the order of sums
        assert torch.allclose(banded[key].double(), value.double(), rtol=3e-7, atol=1e-7), key


def test_a_base_in_several_files_is_merged_into_as_many(tmp_path):
    several = tmp_path / "base"
    ckptools.open(ADAPTERS / "base").consolidate(f"{several}/", max_shard_size=1500)
    shutil.copy(ADAPTERS / "base" / "config.json", several)
    ckptools.open(TRAINED).consolidate(f"{tmp_path}/out/", merge_lora=True, base=several)
    out = tmp_path / "out"
    assert len(list(out.glob("*.safetensors"))) > 1 and (out / "config.json").exists()
    expected = load_file(ADAPTERS / "merged" / "trained.safetensors")
    assert all(value.load().equal(expected[name]) for name, value in ckptools.open(out).model.items())


def test_a_folder_merged_onto_a_base_is_one_that_transformers_loads(tmp_path):
    transformers = pytest.importorskip("transformers")
    done = ckptools.open(TRAINED).consolidate(f"{tmp_path}/out/", merge_lora=True, base=ADAPTERS / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    expected = load_file(ADAPTERS / "merged" / "trained.safetensors")
    assert all(value.equal(expected[name]) for name, value in model.state_dict().items())
    assert "AutoModelForCausalLM" in done.load


def test_the_config_beside_a_merged_model_states_the_dtype_that_is_written(tmp_path):
    done = ckptools.open(TRAINED).consolidate(f"{tmp_path}/out/", merge_lora=True, base=ADAPTERS / "base", dtype="fp16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    assert f"and not the dtype of {ADAPTERS / 'base'}" in "".join(done.notes)


def test_the_output_says_what_it_was_made_of(tmp_path):
    merged(TRAINED, tmp_path / "m.safetensors", base=ADAPTERS / "base")
    assert [one.name for one in ckptools.open(tmp_path / "m.safetensors").provenance.sources] == ["trained", "base"]


def test_one_of_several_adapters_is_chosen_by_name(tmp_path):
    ck = ckptools.open(ADAPTERS / "two_adapters.pt")
    (tmp_path / "alpha.json").write_text('{"lora_alpha": 4}')
    found = merged(ck, tmp_path / "m.safetensors", adapter="other", like=tmp_path / "alpha.json")
    expected = load_file(ADAPTERS / "merged" / "other.safetensors")
    assert same(found, expected)
    with pytest.raises(UsageError, match=r"holds default, other; choose one with adapter='NAME'"):
        ck.consolidate(tmp_path / "x.safetensors", merge_lora=True)


def test_a_weight_that_is_tied_to_a_changed_one_changes_with_it(tmp_path):
    table, a, b = torch.randn(6, 4), torch.randn(2, 6), torch.randn(4, 2)
    begin = "base_model.model."
    state = {f"{begin}embed.base_layer.weight": table, f"{begin}lm_head.weight": table,
             f"{begin}embed.lora_embedding_A.default": a, f"{begin}embed.lora_embedding_B.default": b}  # fmt: skip
    torch.save(state, tmp_path / "x.pt")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    found = merged(tmp_path / "x.pt", tmp_path / "m.safetensors")
    assert found["lm_head.weight"].equal(found["embed.weight"]) and found["embed.weight"].equal(table + (b @ a).T)


def test_two_adapters_on_tied_weights_are_refused(tmp_path):
    table, begin = torch.randn(6, 4), "base_model.model."
    state = {f"{begin}{name}.base_layer.weight": table for name in ("embed", "lm_head")}
    for name in ("embed", "lm_head"):
        state[f"{begin}{name}.lora_A.default.weight"] = torch.randn(2, 4)
        state[f"{begin}{name}.lora_B.default.weight"] = torch.randn(6, 2)
    torch.save(state, tmp_path / "x.pt")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    with pytest.raises(RefusedError, match=r"lm_head.weight is tied to another weight with an adapter"):
        merged(tmp_path / "x.pt", tmp_path / "m.safetensors")


def test_names_of_wrappers_and_of_old_versions_are_the_same_weights(tmp_path):
    w, a, b = torch.randn(4, 6), torch.randn(2, 6), torch.randn(4, 2)
    for number, (begin, base, word) in enumerate([
        ("module.base_model.model.", "base_layer.", ".default"),
        ("_orig_mod.base_model.model.", "base_layer.", ".default"),
        ("base_model.model.model._fsdp_wrapped_module.", "base_layer.", ".default"),
        ("", "base_layer.", ".default"),
        ("base_model.model.", "", ".default"),
    ]):  # fmt: skip
        state = {f"{begin}q.{base}weight": w, f"{begin}q.lora_A{word}.weight": a, f"{begin}q.lora_B{word}.weight": b}
        torch.save(state, tmp_path / f"{number}.pt")
        (tmp_path / "a.json").write_text('{"lora_alpha": 2}')
        found = merged(tmp_path / f"{number}.pt", tmp_path / f"{number}.safetensors", like=tmp_path / "a.json")
        name = "model.q.weight" if "_fsdp_" in begin else "q.weight"
        assert list(found) == [name] and found[name].equal(w + b @ a)


# -- PEFT's own folder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BASES)
def test_an_adapter_that_is_written_again_is_the_same(tmp_path, name):
    ckptools.open(ADAPTERS / name).consolidate(f"{tmp_path}/out/", only="lora", check=True)
    out, original = tmp_path / "out", ADAPTERS / name
    found, expected = (load_file(folder / "adapter_model.safetensors") for folder in (out, original))
    assert same(found, expected)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config == json.loads((ADAPTERS / name / "adapter_config.json").read_text())


def test_rank_files_become_the_folder_that_peft_writes(tmp_path):
    done = ckptools.open(RUN).consolidate(f"{tmp_path}/out/", only="lora", like=TRAINED)
    found, expected = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "out", TRAINED))
    assert same(found, expected)
    assert "PeftModel.from_pretrained" in done.load
    assert ckptools.open(tmp_path / "out").verify().ok


@pytest.mark.parametrize("like", ["folder", "alpha"])
def test_peft_loads_the_folder_and_merges_what_it_merged(tmp_path, like):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "alpha.json").write_text('{"lora_alpha": 6}')
    given = TRAINED if like == "folder" else tmp_path / "alpha.json"
    ckptools.open(RUN).consolidate(f"{tmp_path}/out/", only="lora", like=given)
    base = transformers.AutoModelForCausalLM.from_pretrained(ADAPTERS / "base", dtype="auto")
    found = peft.PeftModel.from_pretrained(base, tmp_path / "out").merge_and_unload().state_dict()
    expected = load_file(ADAPTERS / "merged" / "trained.safetensors")
    assert same(found, expected)


def test_a_config_is_made_of_what_the_tensors_prove(tmp_path):
    (tmp_path / "alpha.json").write_text('{"lora_alpha": 5}')
    shutil.copy(ADAPTERS / "ranks" / "adapter_model.safetensors", tmp_path / "x.safetensors")
    ckptools.open(tmp_path / "x.safetensors").consolidate(f"{tmp_path}/out/", only="lora", like=tmp_path / "alpha.json")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["r"] == 3 and config["rank_pattern"] == {r"model\.layers\.1\.self_attn\.q_proj": 2}
    assert config["peft_type"] == "LORA" and config["use_dora"] is False and len(config["target_modules"]) == 4


def test_a_second_output_replaces_a_folder_only_by_force(tmp_path):
    for _ in range(2):
        ckptools.open(TRAINED).consolidate(f"{tmp_path}/out/", only="lora", force=True)
    with pytest.raises(ckptools.CkptoolsError, match="exists"):
        ckptools.open(TRAINED).consolidate(f"{tmp_path}/out/", only="lora")


# -- sources of other trainers -----------------------------------------------------------------------------------------


def test_the_settings_of_verl_give_alpha(tmp_path):
    for rank in range(2):
        state = torch.load(RUN / f"rank{rank}.pt", weights_only=False)["model"]
        torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    (tmp_path / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"}')
    found = merged(tmp_path / "model_world_size_2_rank_0.pt", tmp_path / "m.safetensors")
    expected = load_file(ADAPTERS / "merged" / "trained.safetensors")
    assert same(found, expected)


def test_an_adapter_alone_in_a_dcp_is_merged_onto_its_base(tmp_path):
    dcp.save({"model": load_file(TRAINED / "adapter_model.safetensors")}, checkpoint_id=tmp_path / "ckpt")
    found = merged(tmp_path / "ckpt", tmp_path / "m.safetensors", base=ADAPTERS / "base", like=TRAINED)
    expected = load_file(ADAPTERS / "merged" / "trained.safetensors")
    assert all(found[name].equal(expected[name]) for name in expected)


# -- refusals ----------------------------------------------------------------------------------------------------------


def changed(tmp_path: Path, name: str = "dora", **stated: Any) -> Path:
    """A copy of an adapter whose config states something else."""
    folder = tmp_path / "changed"
    shutil.copytree(ADAPTERS / name, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **stated}))
    return folder


def test_alpha_that_no_file_states_is_asked_for(tmp_path):
    for how in ({"merge_lora": True}, {"only": "lora"}):
        with pytest.raises(RefusedError, match=r"no file states alpha of .*q_proj; like='ADAPTER' takes it from"):
            ckptools.open(RUN).consolidate(f"{tmp_path}/x/", **how)


def test_a_setting_that_two_files_may_state_is_blamed_on_both(tmp_path):
    (tmp_path / "a.json").write_text('{"alpha_pattern": {}}')
    why = rf"adapter_config.json with {tmp_path / 'a.json'} states r 99 for"
    with pytest.raises(RefusedError, match=why):
        ckptools.open(changed(tmp_path, r=99)).consolidate(f"{tmp_path}/x/", only="lora", like=tmp_path / "a.json")


def test_base_weights_that_are_not_here_are_asked_for_by_name(tmp_path):
    folder = changed(tmp_path, base_model_name_or_path="meta/llama")
    with pytest.raises(RefusedError, match=r"is not here; base='HF' gives the base model, that is 'meta/llama'"):
        ckptools.open(folder).consolidate(tmp_path / "x.safetensors", merge_lora=True)


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens, with which PEFT merges by another rule"),
        ({"init_lora_weights": "pissa"}, "began with init_lora_weights 'pissa', which changes the base weights"),
        ({"alpha_pattern": {"(a+)+": 1}}, "alpha of .* in a form that is tried"),
        ({"lora_alpha": None}, "no file states alpha"),
        ({"lora_alpha": math.inf}, "no file states alpha"),
    ],
)
def test_a_rule_that_is_not_known_is_refused_by_name(tmp_path, stated, why):
    with pytest.raises(RefusedError, match=why):
        ckptools.open(changed(tmp_path, **stated)).consolidate(
            tmp_path / "x.safetensors", merge_lora=True, base=ADAPTERS / "base_fp32"
        )


@pytest.mark.parametrize("what", ["shape", "name", "adapter", "here"])
def test_a_base_that_does_not_fit_is_refused(tmp_path, what):
    state, base = load_file(ADAPTERS / "base" / "model.safetensors"), tmp_path / "base.safetensors"
    name = "model.layers.1.mlp.down_proj.weight"
    source = TRAINED
    if what == "shape":
        save_file(state | {name: torch.zeros(8, 10)}, base)
        why = r"base.safetensors: the base weight of .*down_proj is \[8, 10\], and B·A of it is \[8, 12\]"
    elif what == "name":
        save_file({key: value for key, value in state.items() if key != name}, base)
        why = f"has no {name}, which the adapter changes"
    elif what == "adapter":
        base, why = TRAINED, "holds a LoRA adapter, and is no base model"
    else:
        save_file(state, base)
        source, why = RUN, "the base weights are here; leave it out"
    with pytest.raises(ckptools.CkptoolsError, match=why):
        like = TRAINED if what == "here" else None
        ckptools.open(source).consolidate(tmp_path / "x.safetensors", merge_lora=True, base=base, like=like)


def test_a_base_in_codes_is_refused_and_one_that_is_not_is_taken_in_its_place(tmp_path):
    w = torch.zeros(8, 8, dtype=torch.float8_e4m3fn)
    begin = "base_model.model.q."
    adapter = {f"{begin}lora_A.default.weight": torch.ones(2, 8), f"{begin}lora_B.default.weight": torch.ones(8, 2)}
    state = {f"{begin}base_layer.weight": w, f"{begin}base_layer.weight_scale_inv": torch.ones(1, 1), **adapter}
    save_file(state, tmp_path / "x.safetensors")
    (tmp_path / "a.json").write_text('{"lora_alpha": 2}')
    ck, like = ckptools.open(tmp_path / "x.safetensors"), tmp_path / "a.json"
    with pytest.raises(RefusedError, match=r"is in codes of fp8.*; base='HF' gives the base model"):
        ck.consolidate(tmp_path / "m.safetensors", merge_lora=True, like=like)
    save_file({"q.weight": torch.ones(8, 8)}, tmp_path / "base.safetensors")
    found = merged(ck, tmp_path / "m.safetensors", like=like, base=tmp_path / "base.safetensors")
    assert same(found, {"q.weight": torch.full((8, 8), 3.0)})


def test_codes_of_a_base_are_not_converted_as_if_they_were_values(tmp_path):
    codes = torch.ones(8, 8).to(torch.float8_e4m3fn)
    base = {"q.weight": torch.ones(8, 8), "k.weight": codes, "k.weight_scale_inv": torch.ones(1, 1)}
    save_file(base, tmp_path / "base.safetensors")
    save_file({"q.lora_A.weight": torch.ones(2, 8), "q.lora_B.weight": torch.ones(8, 2)}, tmp_path / "x.safetensors")
    (tmp_path / "a.json").write_text('{"lora_alpha": 2}')
    ck = ckptools.open(tmp_path / "x.safetensors")
    given = {"like": tmp_path / "a.json", "base": tmp_path / "base.safetensors"}
    why = r"base.safetensors: dtype='fp16': it holds 1 weight in codes of fp8.*without it they are written as they are"
    with pytest.raises(RefusedError, match=why):
        merged(ck, tmp_path / "m.safetensors", dtype="fp16", **given)
    assert same(merged(ck, tmp_path / "m.safetensors", **given), base | {"q.weight": torch.full((8, 8), 3.0)})


def test_a_lost_rank_is_refused(tmp_path):
    shutil.copy(RUN / "rank0.pt", tmp_path)
    for how, out in (({"merge_lora": True}, "m.safetensors"), ({"only": "lora"}, "a/")):
        with pytest.raises(NotWholeError, match="rank 1"):
            ckptools.open(tmp_path).consolidate(f"{tmp_path}/{out}", like=TRAINED, **how)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"only": "lora", "out": "x.safetensors"}, "writes a folder that PEFT loads: -o DIR/"),
        ({"merge_lora": True, "only": "all"}, "writes the model: leave out only"),
        ({"merge_lora": True, "rename": ("a.=b.",)}, "does not go with rename"),
        ({"merge_lora": True, "allow_missing": True}, "does not go with allow_missing"),
        ({"base": "somewhere"}, "base needs merge_lora"),
        ({"adapter": "default"}, "adapter needs merge_lora=True or only='lora'"),
        ({"merge_lora": True, "adapter": "none"}, "adapter='none': holds default"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path, options, why):
    out = tmp_path / options.pop("out", "x.pt")
    with pytest.raises(UsageError, match=why):
        ckptools.open(RUN).consolidate(out, **options)


def test_a_checkpoint_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no LoRA adapter"):
        ckptools.open(ADAPTERS / "base").consolidate(tmp_path / "x.safetensors", merge_lora=True)
