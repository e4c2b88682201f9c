"""Folders of Accelerate and the Trainer under FSDP: their parts, and what is wrong with one of them."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptools
from ckptools.errors import NotWholeError
from ckptools.formats.shared.companions import step_of_accelerate
from ckptools.model.facts import Fact
from tests.state_dicts import raw
from tests.truth import FIXTURES

SAMPLE = FIXTURES / "accelerate-fsdp2" / "ckpt"
MODEL = {"w": torch.arange(12.0).reshape(4, 3), "b": torch.arange(3, dtype=torch.int64)}
OPTIMIZER = {
    "state": {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(4, 3)}},
    "param_groups": [{"lr": 0.1, "params": ["w"]}],
}


def save(folder: Path, state: dict[str, Any]) -> Path:
    """Let torch write a DCP folder in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=False))
    return folder


@pytest.fixture
def sample(tmp_path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "ckpt"))


@pytest.mark.parametrize("part", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_a_part_without_its_metadata_is_missing_and_nothing_is_written_without_it(sample, tmp_path, part):
    (sample / part / ".metadata").unlink()
    ck = ckptools.open(sample)
    errors = [p.code for p in ck.problems if p.severity == "error"]
    assert (ck.format, ck.whole, errors) == ("accelerate", False, ["CK001"])
    assert f"no file {part}/.metadata" in ck.problems[0].message
    with pytest.raises(NotWholeError, match=part):
        ckptools.consolidate(sample, tmp_path / "out.pt")


def test_an_optimizer_that_is_gone_is_missed_where_its_scheduler_is_here(sample):
    shutil.rmtree(sample / "optimizer_0")
    (problem,) = (p for p in ckptools.open(sample).problems if p.severity == "warning")
    assert (problem.code, problem.tensor) == ("CK001", "optimizer") and "scheduler is here" in problem.message
    (sample / "scheduler.bin").unlink()
    assert "CK001" not in {p.code for p in ckptools.open(sample).problems}


def test_the_scheduler_of_all_processes_suggests_the_step_which_is_called_assumed():
    ck = ckptools.open(SAMPLE)
    assert (ck.schedulers["scheduler"]["last_epoch"], ck.step.value) == (20, 5)
    assert ck.step.sources == ("scheduler.last_epoch / 4 processes, assumed",)
    counted = {int(s["step"].load()) for s in ck.optimizers["optimizer"].state.values()}
    assert counted == {5}


@pytest.mark.parametrize(
    ("last_epoch", "own", "step", "sources"),
    [
        (20, 0, 5, ("scheduler.last_epoch / 4 processes, assumed",)),
        (20, 5, 5, ("scheduler.last_epoch / 4 processes, assumed", "rng.0.step")),
        (21, 5, 5, ("rng.0.step, assumed to count from the start",)),
        (3, 0, None, ()),
        (0, 0, None, ()),
        (None, 7, 7, ("rng.0.step, assumed to count from the start",)),
        (None, None, None, ()),
    ],
)
def test_the_step_is_what_accelerates_files_suggest(last_epoch, own, step, sources):
    tree = {"rng": {rank: {"step": own} for rank in range(4)}, "scheduler": {"last_epoch": last_epoch}}
    found = step_of_accelerate(tree, Fact(4, ("RNG files",)))
    assert (found.value, found.sources) == (step, sources)


def test_a_model_of_accelerate_without_fsdp_has_no_step_of_all_processes(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"last_epoch": 20, "base_lrs": [0.1], "_step_count": 21}, tmp_path / "scheduler.bin")
    for rank in range(4):
        torch.save({"step": 0, "torch_manual_seed": torch.get_rng_state()}, tmp_path / f"random_states_{rank}.pkl")
    ck = ckptools.open(tmp_path)
    assert (ck.format, ck.step.value) == ("hugging_face", 5) and "assumed" in ck.step.sources[0]


@pytest.mark.parametrize("form", ["fsdp", "plain"])
def test_the_number_of_a_save_is_no_step(tmp_path, form):
    folder = tmp_path / "checkpoints" / "checkpoint_1"
    shutil.copytree(SAMPLE, folder)
    if form == "plain":
        save_file(MODEL, folder / "model.safetensors")
        shutil.rmtree(folder / "pytorch_model_fsdp_0")
        shutil.rmtree(folder / "optimizer_0")
    ck = ckptools.open(folder)
    assert (ck.step.value, ck.step.agree) == (5, True)
    assert not any("name" in source for source in ck.step.sources)


def test_a_damaged_item_is_called_by_its_name_in_the_whole_tree(sample):
    file = sample / "pytorch_model_fsdp_0" / "__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:900] + bytes(900) + content[1800:])
    assert {p.tensor for p in ckptools.open(sample).problems} == {"model.embed.weight"}


def test_a_missing_optimizer_does_not_keep_the_model_from_being_written(sample, tmp_path):
    (sample / "optimizer_0" / "__2_0.distcp").unlink()
    ckptools.open(sample).consolidate(tmp_path / "m.pt", only="model")
    assert torch.load(tmp_path / "m.pt")["embed.weight"].shape == ckptools.open(SAMPLE).model["embed.weight"].shape


@pytest.mark.parametrize("rank", [1, 3])
def test_a_missing_rng_state_is_an_error_and_consolidate_says_that_it_is_lost(sample, rank, tmp_path):
    (sample / f"random_states_{rank}.pkl").unlink()
    ck = ckptools.open(sample)
    assert [(p.code, p.severity, p.rank) for p in ck.problems] == [("CK001", "error", rank)]
    assert (ck.verdict.whole, ck.verdict.recoverable, ck.world_size.value) == (False, True, 4)
    done = ck.consolidate(tmp_path / "all.pt")
    assert done.left_out == {f"rng.{rank}": f"what rank {rank} had for itself: no file random_states_{rank}.pkl"}
    assert not any("shared" in note for note in done.notes)  # no other rank has it
    assert ck.consolidate(tmp_path / "model.pt", only="model").left_out == {}


def test_random_states_that_changed_places_do_not_keep_the_model_from_being_written(sample, tmp_path):
    one, other = (sample / f"random_states_{rank}.pkl" for rank in (1, 2))
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)
    ck = ckptools.open(sample)
    errors = [(p.code, p.rank, p.tensor) for p in ck.problems if p.severity == "error"]
    assert sorted(errors) == [("CK009", 1, "rng"), ("CK009", 2, "rng")]
    with pytest.raises(NotWholeError):
        ck.consolidate(tmp_path / "all.pt", only="all")
    assert ck.consolidate(tmp_path / "m.pt", only="model").left_out == {}


def test_a_second_model_has_a_number(tmp_path):
    for index in (0, 1):
        save(tmp_path / f"pytorch_model_fsdp_{index}", {"model": {"w": torch.full((2,), float(index))}})
        save(tmp_path / f"optimizer_{index}", {"optimizer": OPTIMIZER})
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert list(ck.tree) == ["model", "model_1", "optimizer", "optimizer_1"] and ck.whole
    assert ck.model["model_1.w"].load().tolist() == [1.0, 1.0]


def test_the_trainers_counters_tell_the_step(tmp_path):
    folder = tmp_path / "checkpoint-30"
    save(folder / "pytorch_model_fsdp_0", {"model": MODEL})
    save(folder / "optimizer_0", {"optimizer": OPTIMIZER})
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 30, "epoch": 0.5}))
    torch.save({"last_epoch": 30, "base_lrs": [0.1]}, folder / "scheduler.pt")
    ck = ckptools.open(folder)
    assert (ck.step.value, ck.step.agree, ck.format) == (30, True, "accelerate")
    assert ck.step.sources[0] == "file name" and "trainer_state.global_step" in ck.step.sources


def test_a_full_state_dict_is_read_with_the_optimizer_beside(tmp_path):
    torch.save(MODEL, tmp_path / "pytorch_model_fsdp.bin")
    torch.save(OPTIMIZER, tmp_path / "optimizer.bin")
    torch.save({"step": 0, "torch_manual_seed": torch.get_rng_state()}, tmp_path / "random_states_0.pkl")
    ck = ckptools.open(tmp_path)
    assert [s.kind for s in ck.sections] == ["model", "optimizer", "rng"]
    assert raw(ck.model["w"].load()) == raw(MODEL["w"]) and ck.optimizers["optimizer"].state["w"]["exp_avg"].shape == (
        4,
        3,
    )


@pytest.mark.slow
def test_a_local_state_dict_takes_its_shapes_from_the_optimizer(local_states, tmp_path):
    folder = local_states / "accelerate"
    ck = ckptools.open(folder, all_ranks=True)
    weights = torch.load(local_states / "flat_named.pt")
    moments = torch.load(local_states / "flat_named-moments.pt")
    assert {k: raw(t.load()) for k, t in ck.model.items()} == {k: raw(t) for k, t in weights.items()}
    found = {(k, s): raw(t.load()) for k, slots in ck.optimizers["optimizer"].state.items() for s, t in slots.items()}
    assert found == {(k, s): raw(t) for k, slots in moments.items() for s, t in slots.items()}
    ck.consolidate(tmp_path / "m.safetensors")
    assert (ck.whole, ck.world_size.value) == (True, 4)


def test_a_tensor_of_a_local_state_dict_is_loaded_without_all_ranks(local_states):
    ck = ckptools.open(local_states / "accelerate")
    weights = torch.load(local_states / "flat_named.pt")
    assert raw(ck.model["head.weight"].load()) == raw(weights["head.weight"])


def test_a_local_state_dict_without_an_optimizer_asks_for_shapes(local_states, tmp_path):
    for rank in range(4):
        shutil.copy(local_states / "accelerate" / f"pytorch_model_fsdp_rank{rank}.bin", tmp_path)
    ck = ckptools.open(tmp_path)
    assert any("give them with shapes (" in p.message for p in ck.problems)
    told = ckptools.open(tmp_path, shapes=local_states / "flat_named.pt")
    assert told.problems == () and told.model["head.weight"].shape == (11, 7)


def test_tensors_of_a_registered_object_are_not_the_model(sample, tmp_path):
    torch.save({"averages": {"w": torch.ones(3)}, "decay": 0.9}, sample / "custom_checkpoint_0.pkl")
    ck = ckptools.open(sample)
    assert [s.name for s in ck.sections if s.kind == "model"] == ["model"]
    ck.consolidate(tmp_path / "model.safetensors")
    assert ckptools.open(tmp_path / "model.safetensors").tree.keys() == ck.model.keys()
    ck.consolidate(tmp_path / "all.pt", only="all")
    assert torch.load(tmp_path / "all.pt")["custom_checkpoint_0"]["averages"]["w"].tolist() == [1.0, 1.0, 1.0]


def test_a_model_of_which_nothing_was_saved_is_an_error(sample, tmp_path):
    """transformers 5.24 with PEFT 0.21 leaves an adapter under FSDP1 so."""
    shutil.rmtree(sample / "pytorch_model_fsdp_0")
    save(sample / "pytorch_model_fsdp_0", {"model": {}})
    (problem,) = (p for p in ckptools.open(sample).problems if p.severity == "error")
    assert (problem.code, problem.tensor) == ("CK107", "model") and "holds no tensors" in problem.message
    with pytest.raises(NotWholeError):
        ckptools.consolidate(sample, tmp_path / "all.pt", only="all")
