"""An output beside its source: one line says that every element is the source's, through renames, cuts and casts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.keys.pairing import Proof
from tests.hugging_face.toy_models import save_original, toy_model
from tests.hugging_face.trainer_names import save_megatron, torchtitan_state


@pytest.fixture
def run(tmp_path: Path) -> Path:
    dcp.save(torchtitan_state(toy_model("llama")), checkpoint_id=tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def hub(run: Path, tmp_path: Path) -> Path:
    """The output of a run with torchtitan's names, in bfloat16."""
    original = save_original("llama", tmp_path / "original", torch.bfloat16)
    ckptools.consolidate(run, f"{tmp_path / 'hf'}/", like=original)
    return tmp_path / "hf"


def changed(folder: Path, name: str, at: tuple[int, ...]) -> None:
    """Change one element of an output by its last bit."""
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    weights = load_file(file)
    weights[name].view(torch.int16)[at] ^= 1
    save_file(weights, file, metadata)


def test_check_says_how_many_elements_and_through_what_they_came(run, tmp_path):
    from ckptools.consolidate.record import summary

    original = save_original("llama", tmp_path / "original", torch.bfloat16)
    done = ckptools.consolidate(run, f"{tmp_path / 'hf'}/", like=original, check=True)
    assert done.proof == Proof(21, 21_664, renamed=21, rearranged=4, cast=21)
    assert list(summary(done))[-1].endswith(
        "all equal: every element is the source's: 21664 elements (21 renamed, 4 rearranged, 21 cast)"
    )


def test_diff_says_that_every_element_is_the_sources(hub, run):
    found = ckptools.diff(hub, run, values=True)
    assert found.same and found.proof == Proof(21, 21_664, renamed=21, rearranged=4, cast=21)
    assert {row.verdict for row in found.tensors} == {"same"}


def test_one_bit_in_a_permuted_and_cast_tensor_is_found_with_its_place(hub, run):
    changed(hub, "model.layers.1.self_attn.q_proj.weight", (5, 7))
    found = ckptools.diff(hub, run, values=True)
    (wrong,) = [row for row in found.tensors if row.verdict != "same"]
    assert (found.same, wrong.name, wrong.first) == (False, "model.layers.1.self_attn.q_proj.weight", (5, 7))


def test_a_cut_vocabulary_is_counted(tmp_path):
    original, model = save_original("llama", tmp_path / "original"), toy_model("llama")
    run = save_megatron(model, tmp_path / "run", padded=128, make_vocab_size_divisible_by=64)
    ckptools.consolidate(run, f"{tmp_path / 'hf'}/", like=original)
    found = ckptools.diff(tmp_path / "hf", run, values=True)
    assert found.same and found.proof == Proof(21, 21_664, renamed=21, rearranged=10, cut=2)


def test_the_command_prints_the_line_and_ends_with_0(hub, run):
    result = CliRunner().invoke(app, ["diff", str(hub), str(run), "--values"])
    line = result.stdout.splitlines()[0]
    assert result.exit_code == 0
    assert line.startswith("every element of A is B's: 21 tensors, 21664 elements (21 renamed, 4 rearranged, 21 cast)")


def test_an_output_under_new_names_is_compared_through_them(tmp_path):
    dcp.save({"model": dict(toy_model("llama").state_dict())}, checkpoint_id=tmp_path / "run")
    ckptools.consolidate(tmp_path / "run", tmp_path / "m.safetensors", rename=["=net."], dtype="bf16")
    found = ckptools.diff(tmp_path / "m.safetensors", tmp_path / "run", values=True)
    assert found.same and found.proof == Proof(21, 21_664, renamed=21, cast=21)


def test_an_output_of_another_run_is_compared_key_by_key(hub, tmp_path):
    dcp.save(torchtitan_state(toy_model("llama", seed=5)), checkpoint_id=tmp_path / "other")
    assert ckptools.diff(hub, tmp_path / "other", values=True).proof is None


def test_a_source_that_has_changed_since_is_different(hub, run):
    dcp.save(torchtitan_state(toy_model("llama", seed=5)), checkpoint_id=run)
    found = ckptools.diff(hub, run, values=True)
    assert found.same is False and found.subjects[0].different == 21


def test_what_the_source_has_besides_is_named(tmp_path):
    state = {"model": dict(toy_model("llama").state_dict()), "optimizer": {"state": {}, "lr": 0.1}}
    torch.save(state, tmp_path / "run.pt")
    ckptools.consolidate(tmp_path / "run.pt", tmp_path / "m.safetensors")
    found = ckptools.diff(tmp_path / "m.safetensors", tmp_path / "run.pt", values=True)
    assert found.same and any("only in B" in note and "optimizer" in note for note in found.notes)


def test_without_values_and_with_a_tolerance_keys_are_compared_one_by_one(hub, run):
    assert ckptools.diff(hub, run).proof is None
    assert ckptools.diff(hub, run, rtol=1e-2).proof is None


def test_json_has_the_counts(hub, run):
    result = CliRunner().invoke(app, ["diff", str(hub), str(run), "--values", "--json"])
    assert json.loads(result.stdout)["proof"]["elements"] == 21_664
