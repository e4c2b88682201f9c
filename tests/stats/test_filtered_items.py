"""Figures of some tensors of a large DCP: the items of the others are not looked into."""

from __future__ import annotations

import json

import pytest

from ckptools.formats.dcp import locator
from ckptools.formats.open import open_checkpoint
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.stats.figures import tensor_stats
from ckptools.text import fqn_of
from tests.truth import FIXTURES

FOLDER = FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt"


def tensors(every_item: bool) -> dict[str, Tensor]:
    opened = open_checkpoint(FOLDER, all_ranks=True, every_item=every_item)
    return {fqn_of(path): tensor for path, tensor in tensors_in(opened.tree)}


def test_items_of_a_large_folder_are_located_where_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locator, "MAX_LOCATED", 0)
    whole, later = tensors(every_item=True), tensors(every_item=False)
    assert all(tensor.found for tensor in whole.values()) and not any(tensor.found for tensor in later.values())
    for name, tensor in whole.items():
        here, there = (json.dumps(tensor_stats(one, name).to_dict()) for one in (tensor, later[name]))
        assert here == there
