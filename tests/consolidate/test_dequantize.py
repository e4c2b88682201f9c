"""`--dequantize`: what is written of quantized tensors, with it and without it, and of damaged codes and scales."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import DamagedError, NotWholeError
from tests.other_classes import adam_state, of_class
from tests.truth import ASKED, FIXTURES, load_truth

INT8, ADAM = FIXTURES / "torchao-int8/ckpt/model.pt", FIXTURES / "torchao-fsdp2-adamw8bit-dcp/ckpt"
MOMENTS = [f"optim.state.block.{name}.weight.{slot}" for name in ("up", "down") for slot in ("exp_avg", "exp_avg_sq")]


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def truth_of(name):
    """The truth as torch has it."""
    return load_file(FIXTURES / name / "truth.safetensors")


@pytest.mark.parametrize("known", ASKED, ids=lambda k: k.name)
def test_a_model_equals_the_truth_bit_for_bit(known, tmp_path):
    known.open().consolidate(tmp_path / "m.safetensors", **known.written_with, check=True)
    found, truth = load_file(tmp_path / "m.safetensors"), truth_of(known.name)
    names = [n for n in found if f"model/{n}" in truth and not f"model/{n}".startswith(known.absent or "-")]
    assert [n for n in names if not torch.equal(found[n], truth[f"model/{n}"])] == []
    assert len(names) > 9


@pytest.mark.parametrize("form", ["pt", "dcp"])
def test_moments_equal_the_truth_in_every_format(form, tmp_path):
    ckptools.open(ADAM).consolidate(tmp_path / f"all.{form}", only="all", dequantize=True)
    written, truth = ckptools.open(tmp_path / f"all.{form}"), load_truth("torchao-fsdp2-adamw8bit-dcp")
    (state,) = (o.state for o in written.optimizers.values())
    for fqn, slots in state.items():
        for slot in ("exp_avg", "exp_avg_sq"):
            found = slots[slot].load()
            assert found.reshape(-1).view(torch.uint8).numpy().tobytes() == truth[f"optim/{fqn}/{slot}"][1]


def test_codes_are_never_written_as_values(tmp_path):
    with pytest.raises(NotWholeError, match=r"CK106  \S+exp_avg.*: quantized as torchao OptimState8bit"):
        ckptools.open(ADAM).consolidate(tmp_path / "all.pt")
    assert not list(tmp_path.iterdir())


def test_a_model_beside_quantized_moments_needs_no_option(tmp_path):
    ckptools.open(ADAM).consolidate(tmp_path / "model.safetensors")
    assert len(load_file(tmp_path / "model.safetensors")) == 12


def test_what_is_not_quantized_is_written_when_holes_are_allowed(tmp_path):
    done = ckptools.open(ADAM).consolidate(tmp_path / "all.pt", allow_missing=True)
    assert sorted(done.left_out) == sorted(MOMENTS)


def test_a_dry_run_plans_what_would_be_read(tmp_path):
    done = ckptools.open(INT8).consolidate(tmp_path / "m.pt", dequantize=True, dry_run=True, check=True)
    assert (done.tensors, done.checksums.right) == (10, 18)  # 6 plain ones; codes, scales and zero points of 4
    assert not list(tmp_path.iterdir())


def test_values_of_a_model_get_the_dtype_that_is_asked_for(tmp_path):
    ckptools.open(INT8).consolidate(tmp_path / "m.safetensors", dequantize=True, dtype="float32")
    found, truth = load_file(tmp_path / "m.safetensors"), truth_of("torchao-int8")
    assert all(torch.equal(found[k.removeprefix("model/")], v.float()) for k, v in truth.items())


def test_an_option_for_quantized_tensors_is_an_error_without_any(tmp_path):
    done = run("consolidate", FIXTURES / "torch2.4.1-fsdp2-w3", "-o", tmp_path / "o.safetensors", "--dequantize")
    assert done.exit_code == 2 and "--dequantize: nothing here is quantized" in done.stderr
    assert not list(tmp_path.iterdir())


def test_it_is_said_where_what_is_written_is_not_what_is_quantized(tmp_path):
    done = run("consolidate", ADAM, "-o", tmp_path / "model.safetensors", "--dequantize")
    assert done.exit_code == 0 and "note: --dequantize: nothing that is written is quantized" in done.stderr


def test_two_quantized_tensors_of_one_shape_are_not_tied(tmp_path, monkeypatch):
    one, other = adam_state(monkeypatch, (4, 256), seed=1), adam_state(monkeypatch, (4, 256), seed=2)
    torch.save({"a": one, "b": other, "tied": one}, tmp_path / "in.pt")
    done = ckptools.open(tmp_path / "in.pt").consolidate(tmp_path / "out.pt", dequantize=True)
    state = torch.load(tmp_path / "out.pt")
    assert not torch.equal(state["a"], state["b"]) and torch.equal(state["a"], state["tied"])
    assert done.tied == {"tied": "a"}


def test_an_unknown_class_is_refused_with_the_option_too(tmp_path, monkeypatch):
    torch.save({"w": of_class(monkeypatch, "mine.Packed", (4, 6), torch.float32, a=torch.ones(3))}, tmp_path / "in.pt")
    for asked in (False, True):
        with pytest.raises(NotWholeError, match=r"CK106  w: a tensor of class mine\.Packed, which holds a;"):
            ckptools.open(tmp_path / "in.pt").consolidate(tmp_path / "out.pt", dequantize=asked)


def damaged(tmp_path: Path, part: str) -> Path:
    """The int8 file with a flipped bit in a part of one tensor."""
    shutil.copy(INT8, tmp_path / "model.pt")
    (shard,) = ckptools.open(tmp_path / "model.pt").model["block.up.weight"].found
    source = dict(shard.encoded.parts)[part]
    data = bytearray((tmp_path / "model.pt").read_bytes())
    data[source.offset + 3] ^= 8
    (tmp_path / "model.pt").write_bytes(data)
    return tmp_path / "model.pt"


@pytest.mark.parametrize("part", ["qdata", "scale", "zero_point"])
def test_a_flipped_bit_in_any_part_is_noticed(tmp_path, part):
    path = damaged(tmp_path, part)
    with pytest.raises(DamagedError, match=r"block\.up\.weight"):
        ckptools.open(path).consolidate(tmp_path / "out.pt", dequantize=True)
    assert [(p.code, p.tensor) for p in ckptools.open(path).verify(deep=True).problems if p.code == "CK004"] == [
        ("CK004", "model.block.up.weight")
    ]


def test_a_tensor_with_a_damaged_scale_is_left_out_when_holes_are_allowed(tmp_path):
    path = damaged(tmp_path, "scale")
    done = ckptools.open(path).consolidate(tmp_path / "out.pt", dequantize=True, allow_missing=True)
    assert list(done.left_out) == ["model.block.up.weight"] and "is damaged" in done.left_out["model.block.up.weight"]


def test_replicas_whose_scales_differ_are_not_the_same(tmp_path, monkeypatch):
    for rank in range(2):
        state = adam_state(monkeypatch, (4, 256))
        state.scale = state.scale * (rank + 1)
        torch.save({"w": state, "own": torch.full((8,), rank)}, tmp_path / f"rank{rank}.pt")
    with pytest.raises(NotWholeError, match="CK105"):
        ckptools.open(tmp_path / "rank0.pt").consolidate(tmp_path / "out.pt", dequantize=True, only="w")


def test_quantized_tensors_that_are_each_ranks_own_are_kept_for_each(tmp_path, monkeypatch):
    states = [adam_state(monkeypatch, (4, 256), seed=rank) for rank in range(2)]
    for rank, state in enumerate(states):
        held = {"model": {"w": torch.ones(2)}, "sampler": {"weights": state, "at": rank}}
        torch.save(held, tmp_path / f"rank{rank}.pt")
    ckptools.open(tmp_path / "rank0.pt").consolidate(tmp_path / "out.pt", dequantize=True, only="all")
    kept = torch.load(tmp_path / "out.pt")["sampler"]
    assert [own["at"] for own in kept] == [0, 1] and not torch.equal(kept[0]["weights"], kept[1]["weights"])


def test_a_tensor_dequantizes_itself(tmp_path):
    tensor, truth = ckptools.open(INT8).model["block.up.weight"], truth_of("torchao-int8")
    assert torch.equal(tensor.dequantize(), truth["model/block.up.weight"])
    plain = ckptools.open(INT8).model["embed.weight"]
    assert torch.equal(plain.dequantize(), plain.load())
