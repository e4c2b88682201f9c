"""NeMo Automodel's step folders: their parts, what is wrong with one, and what the optimizer tells of shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import ckptools
from ckptools.errors import NotWholeError
from tests.truth import FIXTURES

SAMPLE = FIXTURES / "nemo-automodel-fsdp2" / "ckpt" / "epoch_0_step_5"
SHARD = "model/shard-0000{}-model-00001-of-00001.safetensors"


@pytest.fixture
def step(tmp_path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "run" / "epoch_0_step_5"))


def errors(ck: ckptools.Checkpoint) -> set[tuple[str, int | None]]:
    return {(p.code, p.rank) for p in ck.problems if p.severity == "error"}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 2, 4])
def test_a_lost_shard_is_named_also_that_of_the_last_rank(step, lost, tmp_path):
    (step / SHARD.format(lost)).unlink()
    ck = ckptools.open(step)
    assert ck.whole is False and "CK101" in {code for code, _ in errors(ck)}
    with pytest.raises(NotWholeError):
        ckptools.consolidate(step, tmp_path / "out.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["rng/rng_global_rank_3.pt", "dataloader/dataloader_dp_rank_3.pt"])
@pytest.mark.parametrize("harm", ["missing", "cut"])
def test_a_lost_state_of_a_rank_is_named(step, file, harm):
    data = (step / file).read_bytes()
    (step / file).unlink() if harm == "missing" else (step / file).write_bytes(data[:100])
    ck = ckptools.open(step)
    assert errors(ck) == {("CK001" if harm == "missing" else "CK002", 3)} and ck.whole is False
    ckptools.consolidate(step, step.parent / "model.safetensors")


@pytest.mark.parametrize("part", ["model", "optim"])
def test_a_lost_part_is_named(step, part):
    shutil.rmtree(step / part)
    ck = ckptools.open(step)
    assert ck.whole is False and f"no folder {part}" in ck.problems[0].message


@pytest.mark.parametrize("harm", ["missing", "cut"])
def test_a_lost_metadata_of_the_optimizer_leaves_the_model(step, harm, tmp_path):
    path = step / "optim/.metadata"
    path.unlink() if harm == "missing" else path.write_bytes(path.read_bytes()[:5000])
    ck = ckptools.open(step)
    assert ck.whole is False and "optim/.metadata" in ck.problems[0].message
    ck.consolidate(tmp_path / "model.safetensors")
    assert len(load_file(tmp_path / "model.safetensors")) == 21


def test_a_name_that_is_listed_and_in_no_shard_is_missing(step):
    path = step / "model/.hf_metadata/fqn_to_file_index_mapping.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model.extra.weight": 1}))
    ck = ckptools.open(step)
    assert ck.whole is None and "model.extra.weight" in ck.problems[0].message


def test_an_interrupted_save_is_not_called_whole(step):
    (step / ".incomplete").touch()
    assert ckptools.open(step).whole is None


def test_of_an_export_beside_the_shards_the_shards_are_read(step):
    out = step / "model/consolidated/model.safetensors"
    out.parent.mkdir()
    ckptools.consolidate(SAMPLE, out)
    ck = ckptools.open(step)
    assert ck.model["lm_head.weight"].sharded and "model/consolidated" in ck.problems[-1].message
    before = ck.model["lm_head.weight"].numpy()
    for shard in step.glob("model/shard-*"):
        shard.unlink()
    exported = ckptools.open(step)
    assert (exported.whole, exported.model["lm_head.weight"].sharded) == (True, False)
    assert (exported.model["lm_head.weight"].numpy() == before).all()


def test_an_adapter_is_the_model(step):
    shutil.rmtree(step / "model")
    (step / "model").mkdir()
    weights = load_file(SAMPLE / SHARD.format(1))
    save_file(
        {"base_model.model.lora_A.weight": weights["model.norm.weight"]}, step / "model/adapter_model.safetensors"
    )
    ck = ckptools.open(step)
    assert (ck.format, list(ck.model), ck.step.value) == ("nemo_automodel", ["base_model.model.lora_A.weight"], 5)


@pytest.mark.parametrize("text", [True, False])
def test_of_several_steps_the_pointer_names_the_one_that_is_opened(step, text):
    shutil.copytree(step, step.with_name("epoch_0_step_10"))
    if text:
        (step.parent / "LATEST.txt").write_text("epoch_0_step_5")
    else:
        (step.parent / "LATEST").symlink_to("epoch_0_step_5")
    assert ckptools.open(step.parent).step.value == 5
