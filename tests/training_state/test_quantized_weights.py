"""Weights in codes: they are found, named, counted, and taken for weights by nothing."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import NotWholeError, RefusedError, UsageError
from ckptools.model.facts import ModelConfig
from ckptools.training_state.quantized_weights import method_of
from tests.quantized import COLUMNS, DECODED, FP8, LAYERS, ROWS, WAYS, WITHOUT_CONFIG, codes, folder, made
from tests.truth import FIXTURES

EACH = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
BLOCKS, PACKED = WAYS["fp8 blocks"], WAYS["pack-quantized"]
INT4 = {"model_type": "llama", "quantization_config": PACKED.config}


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def problems_of(path):
    return [(p.code, p.severity, p.tensor, p.message) for p in ckptools.open(path).problems if p.severity != "note"]


@EACH
def test_the_way_is_named_as_config_json_states_it(tmp_path, way):
    ck = ckptools.open(folder(tmp_path / "m", way))
    (found,) = ck.quantized
    assert (found.words, found.weights, found.stated_by) == (way.words, LAYERS, "config.json")
    assert not ck.problems and ck.verdict.whole


@EACH
def test_codes_are_known_without_a_config_by_what_lies_beside_them(tmp_path, way):
    torch.save(made(way), tmp_path / "model.pt")
    ck = ckptools.open(tmp_path / "model.pt")
    assert [(one.weights, one.stated_by) for one in ck.quantized] == [(LAYERS, "")]
    assert ck.verdict.whole and not ck.problems


@EACH
def test_parameters_are_those_of_the_weights_and_not_of_codes(tmp_path, way):
    found = json.loads(run("inspect", folder(tmp_path / "m", way), "--json").stdout)
    (model,) = found["sections"]
    plain = 8 * COLUMNS + LAYERS * COLUMNS
    scales = LAYERS * sum(key in way.parts for key in ("input_scale", "output_scale"))
    assert model["params"] == plain + scales + LAYERS * (way.weights or 0)
    assert model["quantized"] == {way.words: LAYERS} and found["quantized"][0]["words"] == way.words
    assert ("params without 3 weights in packed codes" in model["holds"]) is (way.weights is None)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("config", [True, False])
def test_codes_are_never_cast_nor_dequantized_in_silence(tmp_path, name, config):
    way = WAYS[name]
    path = folder(tmp_path / "m", way, config)
    known = name in (DECODED if config else WITHOUT_CONFIG)
    done = run("consolidate", path, "-o", tmp_path / "o.safetensors", "--dtype", "bf16")
    assert done.exit_code == 4 and f"{LAYERS} weights in codes of" in done.stderr
    assert ("add --dequantize" in done.stderr) is known and (not config or way.words in done.stderr)
    for option in (["--dequantize"], ["--dequantize", "--dtype", "fp32"]):
        done = run("consolidate", path, "-o", tmp_path / "o.safetensors", *option)
        assert (done.exit_code, "in codes of" in done.stderr.replace("CK007", "")) == (
            (0, not config) if known else (4, True)
        )
        assert [one.name for one in tmp_path.iterdir()] == ["m", *(["o.safetensors"] if known else [])]
        if known:
            assert "dequantized, as" in done.stderr and len(load_file(tmp_path / "o.safetensors")) == 1 + 2 * LAYERS
            (tmp_path / "o.safetensors").unlink()


@EACH
def test_codes_are_written_as_they_are_with_their_config_named(tmp_path, way):
    done = run("consolidate", folder(tmp_path / "m", way), "-o", tmp_path / "o.safetensors")
    assert f"{LAYERS} weights written as codes of {way.words}; config.json says how to read them" in done.stderr
    found, expected = load_file(tmp_path / "o.safetensors"), made(way)
    assert found.keys() == expected.keys()
    assert all(found[k].view(torch.uint8).equal(v.view(torch.uint8)) for k, v in expected.items() if v.shape)


@EACH
def test_no_figures_are_made_of_codes(tmp_path, way):
    ck = ckptools.open(folder(tmp_path / "m", way))
    rows = {row.name: row for row in ck.stats().rows}
    names = [name for name, tensor in ck.model.items() if tensor.are_codes]
    assert len(names) == LAYERS
    assert all(rows[name].rms is None and f"codes of {way.words}" in rows[name].problem for name in names)
    assert rows["embed.weight"].rms is not None


def test_a_part_of_the_model_without_codes_may_be_cast(tmp_path):
    path = folder(tmp_path / "m", BLOCKS)
    ckptools.open(path).consolidate(tmp_path / "o.safetensors", only="embed.*", dtype="bf16")
    assert load_file(tmp_path / "o.safetensors")["embed.weight"].dtype == torch.bfloat16


def test_a_tensor_of_codes_does_not_dequantize_itself(tmp_path):
    tensor = ckptools.open(folder(tmp_path / "m", BLOCKS)).model["layers.0.mlp.weight"]
    with pytest.raises(RefusedError, match=r"layers\.0\.mlp\.weight holds codes of fp8, block scales 16 x 16"):
        tensor.dequantize()
    assert tensor.load().dtype == FP8


@EACH
def test_values_of_codes_are_not_judged(tmp_path, way):
    found = ckptools.verify(folder(tmp_path / "m", way), values=True)
    (check,) = (one for one in found.checks if one.name == "values in line")
    assert check.looked_at <= check.of - LAYERS and check.result != "ok" and found.ok
    (check,) = (one for one in found.checks if one.name == "finite values")
    assert (check.result, check.of - check.looked_at) == ("partly", LAYERS)


@pytest.mark.parametrize("name", ["fp8 blocks", "pack-quantized", "gptq", "gpt-oss"])
def test_a_model_that_wants_weights_does_not_load_codes_and_is_told_of_them(tmp_path, name):
    way = WAYS[name]
    weight = "gate_up_proj" if name == "gpt-oss" else "weight"
    plain = {k: v for k, v in made(way).items() if ".mlp." not in k}
    plain |= {f"layers.{n}.mlp.{weight}": torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16) for n in range(LAYERS)}
    found = ckptools.open(folder(tmp_path / "m", way)).match(plain)
    rows = {row.name: row for row in found.rows if row.name}
    assert not found.loads and found.same == len(plain) - LAYERS
    said = [rows[f"layers.{n}.mlp.{weight}"] for n in range(LAYERS)]
    assert all(row.reason == "quantized" and f"codes of {way.words}" in row.note for row in said)
    assert all(row.note for row in found.rows if row.status == "unexpected")


def test_codes_are_compared_bit_for_bit_and_never_with_weights(tmp_path):
    one, same = folder(tmp_path / "one", BLOCKS), folder(tmp_path / "same", BLOCKS)
    name = "layers.1.mlp.weight"
    other = folder(tmp_path / "other", BLOCKS, **{name: codes(ROWS, COLUMNS, dtype=FP8)})
    plain = folder(tmp_path / "plain", BLOCKS, **{name: torch.ones(ROWS, COLUMNS)})
    assert ckptools.diff(one, same, values=True).same
    for path in (other, plain):
        (row,) = (row for row in ckptools.diff(one, path, values=True).tensors if row.verdict != "same")
        assert (row.name, row.verdict, row.change, row.max, row.cosine) == (name, "differs", None, None, None)
        assert "A: codes of fp8, block scales 16 x 16" in row.detail


def test_a_quantized_model_loads_into_one_that_is_quantized_alike(tmp_path):
    path = folder(tmp_path / "m", BLOCKS)
    assert ckptools.open(path).match(path).loads and ckptools.open(path).match(made(BLOCKS)).loads


# -- other places -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [BLOCKS, PACKED, WAYS["gpt-oss"]])
def test_codes_in_files_of_ranks_and_in_dcp_are_refused_too(tmp_path, way):
    state = made(way)
    for rank in range(2):
        torch.save({"model": state, "step": 4}, tmp_path / f"model-rank{rank}.pt")
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save({"state_dict": {"net": {"layer": made(way)}}}, tmp_path / "nested.bin")
    for path in (tmp_path / "model-rank0.pt", tmp_path / "dcp"):
        with pytest.raises(RefusedError, match="3 weights in codes of"):
            ckptools.open(path).consolidate(tmp_path / "o.pt", only="model", dtype="float32")
    assert [one.weights for one in ckptools.open(tmp_path / "nested.bin").quantized] == [LAYERS]


def test_codes_and_scales_in_different_files_of_an_index_belong_together(tmp_path):
    state = made(BLOCKS)
    parts = [{k: v for k, v in state.items() if k.endswith("scale_inv") is one} for one in (True, False)]
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, tmp_path / name)
    weights = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    index = {"metadata": {}, "weight_map": weights}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": BLOCKS.config}))
    ck = ckptools.open(tmp_path)
    assert ck.verdict.whole and not ck.problems and ck.quantized[0].weights == LAYERS
    (tmp_path / names[0]).unlink()
    assert not any("without the" in p.message for p in ckptools.open(tmp_path).problems)


def test_of_several_groups_of_a_config_each_names_the_weights_that_it_is_of(tmp_path):
    groups = {**PACKED.config["config_groups"], "group_1": WAYS["float-quantized"].config["config_groups"]["group_0"]}
    attention = {f"layers.{n}.attn.weight": codes(8, 8, dtype=FP8) for n in range(LAYERS)}
    attention |= {f"layers.{n}.attn.weight_scale": torch.ones(8, 1) for n in range(LAYERS)}
    for stated, second in ((groups, WAYS["float-quantized"].words), (PACKED.config["config_groups"], "fp8 e4m3")):
        config = {"quantization_config": {**PACKED.config, "config_groups": stated, "format": "mixed-precision"}}
        found = ckptools.open(folder(tmp_path / str(len(stated)), PACKED, config, **attention)).quantized
        assert {PACKED.words, second} == {one.words.removesuffix(", scales per channel") for one in found}


def test_modelopt_states_the_way_in_a_file_of_its_own(tmp_path):
    path = folder(tmp_path / "m", WAYS["modelopt"], {"model_type": "llama"})
    (path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}})
    )
    (found,) = ckptools.open(path).quantized
    assert (found.words, found.stated_by) == ("modelopt NVFP4, groups of 16", "hf_quant_config.json")


def test_the_text_model_inside_of_a_larger_one_may_state_the_way(tmp_path):
    config = {"model_type": "llava", "text_config": {"quantization_config": BLOCKS.config}}
    assert ckptools.open(folder(tmp_path / "m", BLOCKS, config)).quantized[0].words == BLOCKS.words


# -- parts without each other ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [BLOCKS, PACKED, WAYS["float-quantized"], WAYS["gptq"], WAYS["modelopt"]])
@pytest.mark.parametrize("lost", ["codes", "scales"])
def test_a_part_that_other_weights_have_is_lost_with_and_without_a_config(tmp_path, way, lost):
    ends = [name for name in way.parts if name in ("weight", "weight_packed", "qweight")] if lost == "codes" else [
        name for name in way.parts if name in ("weight_scale", "weight_scale_inv", "scales")
    ]  # fmt: skip
    gone = {f"layers.1.mlp.{ends[0]}": None}
    for config in (True, False):
        path = folder(tmp_path / f"m{config}", way, config, **gone)
        ck = ckptools.open(path)
        assert ck.verdict.whole is False and "CK107" in {p.code for p in ck.problems if p.severity == "error"}
        assert any("layers.1.mlp" in (p.tensor or "") for p in ck.problems)
        with pytest.raises(NotWholeError):
            ck.consolidate(tmp_path / "o.safetensors")


def test_a_companion_beside_the_scales_may_be_lost_too(tmp_path):
    for name, end in (("modelopt", "weight_scale_2"), ("pack-quantized", "weight_shape"), ("gptq", "qzeros")):
        path = folder(tmp_path / name, WAYS[name], False, **{f"layers.1.mlp.{end}": None})
        (lost,) = (p for p in ckptools.open(path).problems if p.severity == "error")
        assert lost.code == "CK107" and "which 2 other weights have" in lost.message
        assert lost.tensor.startswith("layers.1.mlp.")


@pytest.mark.parametrize("content", [[1], {"quantization_config": [1]}, {"quantization_config": {"quant_method": 5}}])
def test_a_config_of_another_form_says_nothing(tmp_path, content):
    path = folder(tmp_path / "m", BLOCKS, False)
    (path / "config.json").write_text(json.dumps(content))
    (found,) = ckptools.open(path).quantized
    assert (found.words, found.stated_by) == ("fp8 e4m3, block scales", "")


def test_all_scales_may_be_lost_and_the_config_shows_it(tmp_path):
    gone = {f"layers.{n}.mlp.weight_scale_inv": None for n in range(LAYERS)}
    gone["layers.0.mlp.weight"] = codes(ROWS, COLUMNS, dtype=FP8)
    ((code, severity, _, text),) = problems_of(folder(tmp_path / "m", BLOCKS, **gone))
    assert (code, severity) == ("CK107", "error")
    assert text == "config.json says fp8, block scales 16 x 16, and no scales lie beside 3 tensors of fp8e4m3"


def test_codes_that_no_config_tells_of_are_a_warning(tmp_path):
    for config, says in (({"model_type": "llama"}, "config.json does not say so"), (False, "there is no config.json")):
        path = folder(tmp_path / f"m{bool(config)}", BLOCKS, config)
        ((code, severity, _, text),) = problems_of(path)
        assert (code, severity) == ("CK007", "warning") and says in text
        assert "3 weights in codes of fp8 e4m3, block scales (with weight_scale_inv)" in text


def test_scales_that_are_left_beside_cast_codes_are_a_warning(tmp_path):
    cast = {f"layers.{n}.mlp.weight": torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16) for n in range(LAYERS)}
    ((code, severity, tensor, text),) = problems_of(folder(tmp_path / "m", BLOCKS, {"model_type": "llama"}, **cast))
    assert (code, severity, tensor) == ("CK007", "warning", "layers.0.mlp.weight_scale_inv")
    assert "scales beside weights that are no codes" in text


def test_a_config_that_tells_of_codes_beside_plain_weights_is_a_warning(tmp_path):
    path = tmp_path / "m"
    path.mkdir()
    save_file({"a.weight": torch.ones(4, 4)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(INT4))
    ((code, severity, _, text),) = problems_of(path)
    assert (code, severity) == ("CK007", "warning") and text.endswith("and no tensor here holds codes")


# -- what only looks alike --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        {"norm.scale": torch.ones(4), "norm.weight": torch.ones(4)},
        {"norm.scale": torch.ones(4), "a.weight": torch.ones(4, 4)},
        {"ls1.gamma": torch.ones(4), "logit_scale": torch.ones(()), "a.weight": torch.ones(4, 4)},
        {"a.weight": torch.ones(4, 4), "a.weight_scale": torch.ones(4, 1)},
        {"attn.k_scale": torch.ones(1), "attn.v_scale": torch.ones(1), "attn.k": torch.ones(4, 4)},
        {"mask": torch.ones(4, 4, dtype=torch.uint8), "mask_scale": torch.ones(1), "a.weight": torch.ones(4)},
        {"a.scales": torch.ones(4), "a.weight": torch.ones(4, 4), "codes": torch.ones(4, dtype=torch.int64)},
        {"s": torch.ones(1), "B": torch.ones(4, 4), "a.input_scale": torch.ones(1)},
        {"a.weight": codes(4, 4, dtype=FP8), "b.weight": codes(4, 4, dtype=FP8)},
    ],
)  # fmt: skip
def test_ordinary_modules_with_scales_hold_no_codes(tmp_path, state):
    torch.save(state, tmp_path / "m.pt")
    ck = ckptools.open(tmp_path / "m.pt")
    assert ck.quantized == () and not ck.problems and ck.verdict.whole
    assert not any(tensor.coded for tensor in ck.tree.values())


def test_scales_of_the_cache_and_of_activations_are_no_parts_of_weights(tmp_path):
    scales = {f"layers.{n}.attn.{name}_scale": torch.ones(1) for n in range(LAYERS) for name in "kvq"}
    ck = ckptools.open(folder(tmp_path / "m", WAYS["fp8 tensor"], **scales))
    assert not ck.problems and all(ck.model[name].coded is None for name in scales)


def test_plain_fp8_is_cast_as_values_and_that_is_said(tmp_path):
    state = {"a.weight": codes(4, 4, dtype=FP8)}
    save_file(state, tmp_path / "model.safetensors")
    done = run("consolidate", tmp_path / "model.safetensors", "-o", tmp_path / "o.safetensors", "--dtype", "fp32")
    assert "note: 1 tensor of fp8e4m3 taken for values: no scales lie beside them" in done.stderr
    assert load_file(tmp_path / "o.safetensors")["a.weight"].equal(state["a.weight"].float())


def test_a_config_that_asks_to_dequantize_while_loading_wants_no_codes(tmp_path):
    plain = {f"layers.{n}.mlp.gate_up_proj_{end}": None for n in range(LAYERS) for end in ("blocks", "scales")}
    config = {"quantization_config": {"quant_method": "mxfp4", "dequantize": True}}
    assert problems_of(folder(tmp_path / "m", WAYS["gpt-oss"], config, **plain)) == []


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch 2.8 has it")
@pytest.mark.parametrize("scale", [{}, {"a.weight_scale": torch.ones(4, 1)}])
def test_numbers_that_share_an_element_are_not_cast(tmp_path, scale):
    torch.save({"a.weight": codes(4, 4).view(torch.float4_e2m1fn_x2), "b": torch.ones(3), **scale}, tmp_path / "m.pt")
    done = run("consolidate", tmp_path / "m.pt", "-o", tmp_path / "o.pt", "--dtype", "bf16")
    said = "1 weight in codes of float4_e2m1fn_x2" if scale else "a.weight has several numbers to an element"
    assert done.exit_code == 4 and said in done.stderr
    assert json.loads(run("inspect", tmp_path / "m.pt", "--json").stdout)["sections"][0]["params"] == (
        3 + 32 if scale else 3 + 16
    )


def test_fake_quantized_weights_may_have_scales(tmp_path):
    state = {"a.weight": torch.ones(4, 4), "a.weight_scale": torch.ones(4, 1)}
    config = {"quantization_config": {**PACKED.config, "quantization_status": "frozen"}}
    path = tmp_path / "m"
    path.mkdir()
    save_file(state, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    assert problems_of(path) == []


def test_dequantize_without_anything_quantized_is_a_mistake(tmp_path):
    torch.save({"a.weight": torch.ones(4, 4)}, tmp_path / "m.pt")
    with pytest.raises(UsageError, match="dequantize=True: nothing here is quantized"):
        ckptools.open(tmp_path / "m.pt").consolidate(tmp_path / "o.pt", dequantize=True)


def test_a_class_that_holds_its_own_scales_is_named_beside_the_dtypes():
    found = json.loads(run("inspect", FIXTURES / "torchao-int8/ckpt/model.pt", "--json").stdout)
    (model,) = (section for section in found["sections"] if section["kind"] == "model")
    assert model["quantized"] == {"torchao Int8Tensor": 4} and found["quantized"] == []
    assert "bf16; quantized" in run("inspect", FIXTURES / "torchao-int8/ckpt/model.pt").stdout


@pytest.mark.parametrize("name", ["gptq", "awq", "gpt-oss", "nvfp4-pack-quantized", "mxfp4-pack-quantized"])
def test_packed_codes_are_counted_by_the_shapes_of_their_companions_where_no_config_is(tmp_path, name):
    torch.save(made(WAYS[name]), tmp_path / "m.pt")
    found = json.loads(run("inspect", tmp_path / "m.pt", "--json").stdout)
    assert found["sections"][0]["params"] == 8 * COLUMNS + LAYERS * COLUMNS + LAYERS * (WAYS[name].weights or 0)


def test_packed_codes_beside_one_scale_of_no_dimension_are_not_counted(tmp_path):
    torch.save({"a.weight": codes(4, 4), "a.weight_scale": torch.tensor(1.0)}, tmp_path / "m.pt")
    done = run("inspect", tmp_path / "m.pt", "--json")
    assert (done.exit_code, json.loads(done.stdout)["sections"][0]["quantized"]) == (0, {"int8, one scale": 1})


@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit", "_load_in_4bit"])
def test_a_config_of_an_older_transformers_says_bitsandbytes_by_other_keys(key):
    assert method_of(ModelConfig("config.json", {}, {key: True})) == "bitsandbytes"
