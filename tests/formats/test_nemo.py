"""NeMo's `.nemo`: weights in a tar are read where they lie; several ranks' are joined by given rules. Made by hand."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.errors import NotWholeError, ReadError

WEIGHTS = {"encoder.weight": torch.arange(12.0).reshape(3, 4), "decoder.bias": torch.ones(3, dtype=torch.bfloat16)}


def nemo(path: Path, mode: str, *weights: str, config: str = "model_config.yaml", says: bytes = b"target: x\n") -> Path:
    """A `.nemo` as `_make_nemo_file_from_folder` packs it: names begin with `./`."""
    buffer = io.BytesIO()
    torch.save(WEIGHTS, buffer)
    with tarfile.open(path, mode) as tar:
        for name, data in ((config, says), *((w, buffer.getvalue()) for w in weights), ("vocab.txt", b"a\n")):
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


ONE_RANK = b"target: x\ntensor_model_parallel_size: 1\npipeline_model_parallel_size: 1\n"


@pytest.mark.parametrize("weights", ["model_weights.ckpt", "mp_rank_00/model_weights.ckpt"])
@pytest.mark.parametrize("mode", ["w:", "w:gz"])
def test_the_weights_of_one_rank_are_read_without_unpacking(tmp_path, mode, weights):
    path = nemo(tmp_path / "asr.nemo", mode, weights, says=ONE_RANK)
    for opened in (path, tmp_path):
        assert ckptools.open(opened).whole
    ckptools.consolidate(path, tmp_path / "out.safetensors")
    model = ckptools.open(tmp_path / "out.safetensors").model
    assert all(torch.equal(model[name].load(), tensor) for name, tensor in WEIGHTS.items())


RANKS = tuple(f"mp_rank_0{rank}/model_weights.ckpt" for rank in range(2))


@pytest.mark.parametrize("mode", ["w:", "w:gz"])
def test_several_ranks_are_shown_side_by_side_and_never_whole(tmp_path, mode):
    opened = ckptools.open(nemo(tmp_path / "gpt.nemo", mode, *RANKS))
    assert not opened.whole
    assert list(opened.tree) == ["mp_rank_00", "mp_rank_01"]
    assert "mp_rank_00/model_weights.ckpt, mp_rank_01" in str(opened.problems[0])
    with pytest.raises(NotWholeError, match="part of 2 files"):
        ckptools.consolidate(tmp_path / "gpt.nemo", tmp_path / "out.safetensors")


@pytest.mark.parametrize("mode", ["w:", "w:gz"])
def test_several_ranks_are_joined_by_rules_without_unpacking(tmp_path, mode):
    path, rules = nemo(tmp_path / "gpt.nemo", mode, *RANKS), tmp_path / "rules.json"
    rules.write_text(json.dumps({"*.weight": {"dim": 1}, "*": "replicated"}))
    ckptools.open(path, rules=rules).consolidate(tmp_path / "out.safetensors")
    model = ckptools.open(tmp_path / "out.safetensors").model
    assert torch.equal(model["encoder.weight"].load(), torch.cat([WEIGHTS["encoder.weight"]] * 2, 1))
    assert torch.equal(model["decoder.bias"].load(), WEIGHTS["decoder.bias"])


@pytest.mark.parametrize("says", [b"target: x\n", ONE_RANK.replace(b"1", b"2"), b"  tensor_model_parallel_size: 1\n"])
def test_a_lone_rank_is_a_part_unless_the_configuration_says_that_there_is_one(tmp_path, says):
    opened = ckptools.open(nemo(tmp_path / "gpt.nemo", "w:", RANKS[0], says=says))
    assert not opened.whole
    assert "of which this one is here" in str(opened.problems[0])


@pytest.mark.parametrize(("stated", "codes"), [(1, ["CK103"]), (2, []), (3, ["CK001"])])
def test_the_configuration_says_how_many_ranks_are_joined(tmp_path, stated, codes):
    path, rules = tmp_path / "gpt.nemo", tmp_path / "rules.json"
    nemo(path, "w:", *RANKS, says=b"tensor_model_parallel_size: %d\n" % stated)
    rules.write_text(json.dumps({"*": "replicated"}))
    opened = ckptools.open(path, rules=rules)
    assert [problem.code for problem in opened.problems] == codes
    assert opened.whole is not bool(codes)


def test_a_rank_that_is_lost_from_the_middle_is_missed(tmp_path):
    path, rules = nemo(tmp_path / "gpt.nemo", "w:", RANKS[0], "mp_rank_02/model_weights.ckpt"), tmp_path / "rules.json"
    rules.write_text(json.dumps({"*": {"dim": 0}}))
    assert any("rank 1" in str(problem) for problem in ckptools.open(path, rules=rules).problems)


def test_a_tar_without_its_configuration_is_no_nemo(tmp_path):
    with pytest.raises(ReadError, match="a tar of 3 files"):
        ckptools.open(nemo(tmp_path / "x.nemo", "w:", "model_weights.ckpt", config="other.yaml"))


def test_a_lone_rank_in_a_tar_of_another_name_is_not_called_whole(tmp_path):
    with pytest.raises(ReadError, match=r"model-parallel ranks, as a \.nemo does: call it \.nemo"):
        ckptools.open(nemo(tmp_path / "gpt.tar", "w:", RANKS[0]))
