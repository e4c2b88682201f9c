"""A torch.save file that stands alone."""

from __future__ import annotations

import pytest
import torch

import ckptools


@pytest.mark.parametrize("name", ["pytorch_model-00001-of-00004.bin", "mp_rank_00_model_states.pt"])
def test_one_file_of_several_is_not_called_whole(tmp_path, name):
    torch.save({"w": torch.ones(3)}, tmp_path / name)
    ck = ckptools.open(tmp_path / name)
    assert (ck.whole, [p.code for p in ck.problems]) == (False, ["CK011"])


@pytest.mark.parametrize("name", ["model.pt", "frank1.pt", "step-1-of.pt", "best.ckpt"])
def test_an_ordinary_name_is_whole(tmp_path, name):
    torch.save({"w": torch.ones(3)}, tmp_path / name)
    assert ckptools.open(tmp_path / name).whole


def test_a_bare_state_dict_is_one_model_section(tmp_path):
    torch.save({"a.weight": torch.ones(2, 3), "a.bias": torch.zeros(2)}, tmp_path / "m.pt")
    ck = ckptools.open(tmp_path / "m.pt")
    assert [s.kind for s in ck.sections] == ["model"]
    assert {k: t.shape for k, t in ck.model.items()} == {"a.weight": (2, 3), "a.bias": (2,)}
