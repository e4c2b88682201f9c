"""Storages that were saved without a tensor around them."""

from __future__ import annotations

import pytest
import torch

import ckptools
from ckptools.model.tree import tensors_in
from ckptools.pickles import reader
from ckptools.tensor_io import read
from ckptools.torch_engine import describe

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
SHARED = torch.arange(4.0)


def tree():
    typed = SHARED.storage()
    others = [torch.ones(3, dtype=dtype).storage() for dtype in (torch.bfloat16, torch.int64, torch.bool)]
    untyped = torch.arange(2, dtype=torch.int16).untyped_storage()
    return {"w": SHARED, "typed": typed, "inside": (1, [untyped, *others]), "empty": torch.HalfStorage()}


def values(node):
    """The tree with lists in the place of tensors and storages."""
    if isinstance(node, (torch.Tensor, torch.storage.TypedStorage, torch.UntypedStorage)):
        return [str(getattr(node, "dtype", torch.uint8)), list(node)]
    if isinstance(node, dict):
        return {key: values(value) for key, value in node.items()}
    return [values(value) for value in node] if isinstance(node, (list, tuple)) else node


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "saved", [tree, lambda: [1, SHARED.storage()], lambda: SHARED.storage()], ids=["", "list", "one"]
)
def test_a_bare_storage_is_written_as_the_storage_that_it_was(saved, zipped, tmp_path):
    torch.save(saved(), tmp_path / "in.pt", _use_new_zipfile_serialization=zipped)
    assert not ckptools.open(tmp_path / "in.pt").problems
    done = ckptools.consolidate(tmp_path / "in.pt", tmp_path / "out.pt", only="all")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert done.left_out == {} and values(loaded) == values(saved())
    if saved is not tree:
        assert list(map(type, loaded)) == list(map(type, saved()))


def test_a_bare_storage_becomes_a_tensor_of_one_dimension_in_safetensors(tmp_path):
    torch.save(tree(), tmp_path / "in.pt")
    ckptools.consolidate(tmp_path / "in.pt", tmp_path / "out.safetensors", only="all")
    written = dict(tensors_in(ckptools.open(tmp_path / "out.safetensors").raw))
    assert read.load(written[("typed",)]).tolist() == [0, 1, 2, 3] and len(written) == 7


def test_both_ways_in_describe_bare_storages_alike(tmp_path):
    torch.save(tree(), tmp_path / "in.pt")
    ways = (reader.read(tmp_path / "in.pt").tree, describe.read(tmp_path / "in.pt").tree)
    inert, loaded = ([(path, t.kind, t.dtype, t.shape) for path, t in tensors_in(way)] for way in ways)
    assert inert == loaded


@pytest.mark.parametrize("zipped", [True, False])
def test_an_empty_storage_may_be_of_two_dtypes(zipped, tmp_path):
    empty = torch.empty(0, dtype=torch.float32)
    other = torch.storage.TypedStorage(wrap_storage=empty.untyped_storage(), dtype=torch.int64)
    torch.save([empty, other], tmp_path / "in.pt", _use_new_zipfile_serialization=zipped)
    found = reader.read(tmp_path / "in.pt").tree
    assert [(t.dtype, t.shape) for t in found] == [("float32", (0,)), ("int64", (0,))]
