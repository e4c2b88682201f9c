"""NeMo's `.nemo`: the weights in a tar are read where they lie; several ranks' are refused by name. Made by hand."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.errors import ReadError

WEIGHTS = {"encoder.weight": torch.arange(12.0).reshape(3, 4), "decoder.bias": torch.ones(3, dtype=torch.bfloat16)}


def nemo(path: Path, mode: str, *weights: str, config: str = "model_config.yaml") -> Path:
    """A `.nemo` as `_make_nemo_file_from_folder` packs it: names begin with `./`."""
    buffer = io.BytesIO()
    torch.save(WEIGHTS, buffer)
    with tarfile.open(path, mode) as tar:
        for name, data in ((config, b"target: x\n"), *((w, buffer.getvalue()) for w in weights), ("vocab.txt", b"a\n")):
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("weights", ["model_weights.ckpt", "mp_rank_00/model_weights.ckpt"])
@pytest.mark.parametrize("mode", ["w:", "w:gz"])
def test_the_weights_of_one_rank_are_read_without_unpacking(tmp_path, mode, weights):
    path = nemo(tmp_path / "asr.nemo", mode, weights)
    for opened in (path, tmp_path):
        assert ckptools.open(opened).whole
    ckptools.consolidate(path, tmp_path / "out.safetensors")
    model = ckptools.open(tmp_path / "out.safetensors").model
    assert all(torch.equal(model[name].load(), tensor) for name, tensor in WEIGHTS.items())


def test_several_ranks_are_refused_by_name(tmp_path):
    path = nemo(tmp_path / "gpt.nemo", "w:", *(f"mp_rank_0{r}/model_weights.ckpt" for r in range(2)))
    with pytest.raises(ReadError, match=r"a \.nemo of several model-parallel ranks: unpack it"):
        ckptools.open(path)


def test_a_tar_without_its_configuration_is_no_nemo(tmp_path):
    with pytest.raises(ReadError, match="a tar of 3 files"):
        ckptools.open(nemo(tmp_path / "x.nemo", "w:", "model_weights.ckpt", config="other.yaml"))


def test_a_nemo_that_is_cut_is_refused(tmp_path):
    path = nemo(tmp_path / "asr.nemo", "w:", "model_weights.ckpt")
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(ReadError, match="cut short"):
        ckptools.open(path)
