"""torchao's tensors in safetensors, part by part: their values are its own, and none is whole without a part of it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptools
from ckptools.errors import NotWholeError
from tests.truth import FIXTURES
from tests.versions import torch_with

FLATTENED = FIXTURES / "torchao-flattened"
LLAMA, OTHERS = FLATTENED / "ckpt", FLATTENED / "others"
VALUES = {n.removeprefix("model/"): t for n, t in load_file(FLATTENED / "others" / "truth.safetensors").items()}
NOT_FLATTENED = {"nf4.weight", "nf4_float.weight"}
INT4, UP = "int4.weight", "model.layers.0.mlp.up_proj.weight"


def saved(tmp_path, source, without=(), **metadata):
    """A safetensors file again, without some of its tensors or with other texts in `__metadata__`."""
    with safe_open(source, "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys() if name not in without}  # noqa: SIM118
        told = {**file.metadata(), **metadata}
    save_file(state, tmp_path / "in.safetensors", {name: text for name, text in told.items() if text is not None})
    return ckptools.open(tmp_path / "in.safetensors")


def test_values_are_those_of_torchao_bit_for_bit():
    model = ckptools.open(OTHERS / "model.safetensors").model
    assert model.keys() == VALUES.keys() - NOT_FLATTENED
    for key, tensor in model.items():
        assert tensor.dtype == str(VALUES[key].dtype).removeprefix("torch.")
        assert torch.equal(tensor.dequantize(), VALUES[key]), key


def test_parts_are_not_written_as_tensors(tmp_path):
    ck = ckptools.open(LLAMA)
    assert not [name for name in ck.model if "_weight_" in name]
    with pytest.raises(NotWholeError, match=r"quantized as torchao Float8Tensor \(qdata, scale\)"):
        ck.consolidate(tmp_path / "out.safetensors")


def test_a_tied_weight_is_described_and_need_not_be_here():
    ck = ckptools.open(LLAMA)
    assert ck.verdict.whole
    assert [p.message for p in ck.problems if "lm_head" in p.message] == [
        "__metadata__ describes lm_head.weight, which is not here; of tied weights only one is written"
    ]


@pytest.mark.parametrize("part", ["qdata", "scale", "per_tensor_scale"])
def test_a_tensor_that_lacks_a_part_is_not_whole(tmp_path, part):
    torch_with("float8_e8m0fnu")
    lacking = f"nvfp4_tiled._weight_{part}"
    ck = saved(tmp_path, OTHERS / "model.safetensors", without=[lacking])
    assert not ck.verdict.whole
    assert f"CK107  nvfp4_tiled.weight  without {lacking}, a part of it by __metadata__" in str(ck.problems[0])
    out = tmp_path / "out.safetensors"
    ck.consolidate(out, dequantize=True, allow_missing=True)
    assert load_file(out).keys() == VALUES.keys() - NOT_FLATTENED - {"nvfp4_tiled.weight"}


def split(tmp_path, part):
    """The Llama with a part of a weight moved into the other file; the files in their order."""
    shutil.copytree(LLAMA, tmp_path / "m")
    (tmp_path / "m/model.safetensors.index.json").unlink()
    files = [tmp_path / f"m/model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    states = [load_file(file) for file in files]
    states[1][part] = states[0].pop(part)
    for file, state in zip(files, states, strict=True):
        save_file(state, file, safe_open(file, "pt").metadata())
    return files


def test_parts_may_lie_in_several_files(tmp_path):
    split(tmp_path, UP.replace("weight", "_weight_scale"))
    truth = load_file(FLATTENED / "truth.safetensors")[f"model/{UP}"]
    assert torch.equal(ckptools.open(tmp_path / "m").model[UP].dequantize(), truth)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_part_in_a_file_that_is_missing_is_missed(tmp_path, gone):
    split(tmp_path, UP.replace("weight", "_weight_scale"))[gone].unlink()
    ck = ckptools.open(tmp_path / "m")
    assert not ck.verdict.whole and UP in [p.tensor for p in ck.problems if "a part of it" in p.message]
    with pytest.raises(NotWholeError):
        ck.consolidate(tmp_path / "out.safetensors", dequantize=True)


@pytest.mark.parametrize("text", ["{", "[]", '{"_type": "Int4Tensor"}', '{"_type": "A", "_data": {}}'])
def test_a_description_that_cannot_be_read_is_an_error(tmp_path, text):
    ck = saved(tmp_path, OTHERS / "int4.safetensors", **{INT4: text})
    assert not ck.verdict.whole and ck.problems[0].code == "CK007"
    assert f"a description of {INT4} that cannot be read" in ck.problems[0].message


def test_files_that_describe_a_tensor_in_two_ways_are_not_joined(tmp_path):
    shutil.copytree(LLAMA, tmp_path / "m")
    one = tmp_path / "m/model-00002-of-00002.safetensors"
    told = json.loads(safe_open(one, "pt").metadata()[UP])
    told["_data"]["block_size"] = [40, 32]
    saved(tmp_path, one, **{UP: json.dumps(told)})
    (tmp_path / "in.safetensors").rename(one)
    ck = ckptools.open(tmp_path / "m")
    assert not ck.verdict.whole
    assert any(f"describe {UP} in two ways" in p.message for p in ck.problems)


def test_a_class_that_torchao_itself_does_not_dequantize_is_refused_by_name():
    tensor = ckptools.open(OTHERS / "int4.safetensors").model[INT4]
    assert (tensor.shape, tensor.dtype) == ((4, 32), "bfloat16")
    with pytest.raises(ckptools.errors.ReadError) as error:
        tensor.dequantize()
    held = "which holds qdata, scale, zero_point for blocks of [1, 16]"
    assert f"a tensor of class torchao.Int4Tensor, {held}; torchao has no dequantize() for it" in str(error.value)


def test_safetensors_of_others_keep_their_tensors(tmp_path):
    ck = saved(tmp_path, OTHERS / "int4.safetensors", tensor_names=None)
    assert ck.model.keys() == {"int4._weight_qdata", "int4._weight_scale", "int4._weight_zero_point"}
