"""transformers' distributed checkpoint: shards of the model and, beside them, the optimizer are one checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptools
from ckptools.errors import NotWholeError
from tests.truth import FIXTURES

FIXTURE = FIXTURES / "transformers-shards"
SHARD = "shard-0000{}-model-00001-of-00001.safetensors"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE / "ckpt", tmp_path / "ckpt"))


def test_model_and_optimizer_are_one_checkpoint_that_is_whole():
    ck = ckptools.open(FIXTURE / "ckpt")
    assert (ck.format, ck.whole, ck.world_size.value) == ("transformers_shards", True, 2)
    assert list(ck.tree) == ["model", "optimizer"] and not ck.problems
    (optimizer,) = ck.optimizers.values()
    assert [len(group.names) for group in optimizer.param_groups] == [9, 3]


def test_every_value_is_the_one_that_torch_gathered():
    truth, ck = load_file(FIXTURE / "truth.safetensors"), ckptools.open(FIXTURE / "ckpt", all_ranks=True)
    assert len(truth) == 4 * 12
    for name, value in truth.items():
        kind, fqn, *slot = name.split("/")
        key = fqn if kind == "model" else f"optimizer.state.{fqn}.{slot[0]}"
        assert torch.equal(ck[key].load(), value), name


def test_it_comes_home_to_the_config_that_is_in_it(tmp_path):
    from transformers import AutoModelForCausalLM

    ckptools.consolidate(FIXTURE / "ckpt", f"{tmp_path}/hf/", like=FIXTURE / "ckpt" / "config.json", check=True)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values())
    truth = load_file(FIXTURE / "truth.safetensors")
    assert all(torch.equal(value, truth[f"model/{name}"]) for name, value in model.state_dict().items())


def lose(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(folder: Path) -> None:
    file = folder / SHARD.format(2)
    file.write_bytes(file.read_bytes()[:-100])


def exchange(folder: Path) -> None:
    shutil.copy(folder / SHARD.format(1), folder / SHARD.format(2))


@pytest.mark.parametrize(
    ("damage", "code", "named"),
    [
        (lose(SHARD.format(2)), "CK101", "model.lm_head.weight"),
        (lose(SHARD.format(1)), "CK001", SHARD.format(1)),
        (lose("optimizer/.metadata"), "CK001", ".metadata"),
        (lose("optimizer/__1_0.distcp"), "CK001", "__1_0.distcp"),
        (cut, "CK002", SHARD.format(2)),
        (exchange, "CK009", SHARD.format(2)),
    ],
    ids=["last rank", "first rank", "metadata", "moments", "cut", "copy"],
)
def test_what_is_lost_is_named(damage, code, named, copy):
    damage(copy)
    ck = ckptools.open(copy, all_ranks=True)
    assert ck.format == "transformers_shards" and ck.whole is False
    assert any(code == p.code and named in f"{p} {p.tensor}" for p in ck.problems), list(map(str, ck.problems))
    with pytest.raises(NotWholeError):
        ckptools.consolidate(copy, copy / "x.pt", only="all")


def test_without_the_optimizer_s_moments_a_last_rank_may_be_missing(copy):
    shutil.rmtree(copy / "optimizer")
    ck = ckptools.open(copy)
    assert (ck.format, ck.whole) == ("dcp_safetensors", None)
