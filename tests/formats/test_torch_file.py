"""A torch.save file that stands alone."""

from __future__ import annotations

import pytest
import torch

import ckptools
from ckptools.errors import SeveralError
from ckptools.formats import torch_file


@pytest.mark.parametrize("name", ["model.pt", "frank1.pt", "step-1-of.pt", "best.ckpt", "model-00001-of-00001.bin"])
def test_an_ordinary_name_is_whole(tmp_path, name):
    torch.save({"w": torch.ones(3)}, tmp_path / name)
    assert ckptools.open(tmp_path / name).whole


FORMS = {
    "model.pt": True, "model.pth": True, "pytorch_model.bin": True, "epoch=0-step=10.ckpt": True, "no suffix": True,
    "old.pt": False, "old.pth": False, "old.pth.tar": False,
}  # fmt: skip
"""Names that a file may have, and whether it is a zip archive."""


@pytest.mark.parametrize("name", FORMS)
def test_one_file_of_any_name_and_age_is_opened(name, tmp_path):
    path = tmp_path / name
    saved = {"epoch": 3, "state_dict": {"w": torch.arange(6.0)}, "optimizer": {"state": {}, "param_groups": []}}
    torch.save(saved, path, _use_new_zipfile_serialization=FORMS[name])
    ck = ckptools.open(path)
    assert (ck.format, ck.whole, ck.model["w"].load().tolist()) == ("torch_file", True, list(range(6)))
    assert ("before torch 1.6" in ck.saved_as) != FORMS[name]


@pytest.mark.parametrize(
    ("name", "stem"), [("a.pt", "a"), ("a.pt.gz", "a"), ("a.b.pth.zst", "a.b"), ("a.tar.bz2", "a"), ("a", "a")]
)
def test_a_checkpoint_is_called_by_its_file_without_suffixes(name, stem):
    assert torch_file.stem(name) == stem


def test_a_folder_that_holds_others_names_them(tmp_path):
    for name in ("actor", "critic", "logs"):
        (tmp_path / name).mkdir()
    for name in ("actor", "critic"):
        torch.save({"w": torch.ones(1)}, tmp_path / name / "rank0.pt")
    with pytest.raises(SeveralError, match="name the one you mean: actor, critic"):
        ckptools.open(tmp_path)


def test_a_folder_of_files_names_those_that_are_checkpoints(tmp_path):
    for name in ("last.ckpt", "epoch=3.ckpt"):
        torch.save({"state_dict": {"w": torch.ones(2)}}, tmp_path / name)
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\n")
    with pytest.raises(SeveralError, match=r"name the one you mean.*: epoch=3\.ckpt, last\.ckpt$"):
        ckptools.open(tmp_path)
