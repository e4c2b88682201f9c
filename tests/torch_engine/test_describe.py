from __future__ import annotations

import argparse
import collections
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

from ckptools.errors import ForeignClassError, ReadError
from ckptools.files.opening import File
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque, Size, children_of
from ckptools.pickles import reader
from ckptools.torch_engine import describe
from ckptools.torch_engine.offline import offline
from ckptools.training_state.sections import find_sections, measure
from tests.other_classes import adam_state, of_class, with_pieces
from tests.truth import FIXTURES
from tests.versions import torch_that_loads

# Classes that nobody here has: torch makes no objects of them, trusted or not.
FOREIGN = "foreign-objects"

FILES = sorted(
    p for p in FIXTURES.rglob("*") if p.suffix in (".pt", ".ckpt") and {"merged", FOREIGN}.isdisjoint(p.parts)
)


def comparable(node):
    """A described value as tuples that are equal when the values are, whatever read them."""
    if isinstance(node, Tensor):
        shards = {(s.box, s.rank, s.encoded and s.encoded[0], *map(comparable_source, s.sources)) for s in node.shards}
        named = (node.shape, node.dtype, node.kind, node.placements, node.mesh, node.world_size, node.note)
        return (*named, node.requires_grad, node.parameter, shards)
    if isinstance(node, (set, frozenset)):
        return type(node).__name__, sorted(map(repr, node))
    children = None if isinstance(node, Size) else children_of(node)
    if children is not None:
        metadata = comparable(getattr(node, "_metadata", None))
        return type(node).__name__, metadata, [(comparable(k), comparable(v)) for k, v in children]
    slots = getattr(type(node), "__slots__", ())
    return type(node).__name__, [comparable(getattr(node, n)) for n in slots] if slots else repr(node)


def comparable_source(source):
    return source.dtype, source.shape, source.strides


def assert_both_ways_agree(path, trust=False):
    inert, real = reader.read(path), describe.read(path, trust)
    assert comparable(real.tree) == comparable(inert.tree)
    assert (real.claims, real.names) == (inert.claims, inert.names)
    assert (real.path, real.nbytes, real.modified) == (inert.path, inert.nbytes, inert.modified)
    return real.tree


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.relative_to(FIXTURES).parts[0]}-{p.stem}")
def test_both_ways_in_describe_a_real_file_alike(path):
    foreign = [name for name in reader.read(path).names if name.startswith(("deepspeed.", "torchao."))]
    if foreign:
        with pytest.raises(ForeignClassError, match=foreign[0].replace(".", r"\.")):
            describe.read(path)
        return
    torch_that_loads(path)
    tree = assert_both_ways_agree(path)
    assert isinstance(tree, Tensor) or tree  # one value, such as a step, may be all of a file


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [p for p in FILES if p.stem.endswith(("0", "snapshot", "last")) and "torchao" not in str(p)],
    ids=lambda p: p.stem,
)
def test_both_ways_in_measure_the_same_sections(path):
    torch_that_loads(path)
    inert, real = (find_sections(read(path).tree) for read in (reader.read, describe.read))
    assert [(s.kind, s.path, measure(s.value)) for s in real] == [(s.kind, s.path, measure(s.value)) for s in inert]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_both_ways_in_describe_every_kind_of_tensor_alike(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "strided": base[1:, ::2].t(),
        "tied": base,
        "expanded": torch.ones(1, 3).expand(5, 3),
        "0-d": torch.tensor(3),
        "empty": torch.empty(0, 7),
        "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "grad": torch.ones(2, requires_grad=True),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "uint16": torch.ones(3, dtype=torch.uint16),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "meta": torch.empty(3, 4, device="meta"),
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
    }
    torch.save(tensors, tmp_path / "a.pt")
    tree = assert_both_ways_agree(tmp_path / "a.pt")
    assert {tree[k].kind for k in tree} == {"plain", "meta", "sparse", "unreadable"}


def test_both_ways_in_describe_every_kind_of_value_alike(tmp_path):
    weights = collections.OrderedDict(w=torch.ones(2))
    weights._metadata = {"": {"version": 1}}
    shared = [1, (2, "x")]
    values = {
        "plain": [None, True, -1, 2.5, "é", b"\0", 1j, {3}, timedelta(1), bytearray(b"a")],
        "torch": [torch.float32, torch.strided, torch.device("cuda:1"), torch.Size([2, 3]), torch.per_tensor_affine],
        "numpy": (np.arange(6, dtype="u4"), np.asfortranarray(np.ones((2, 3))), np.float64(0.1), np.dtype("<i4")),
        7: weights,
        (1, "a"): {"shared": shared, "again": shared},
        "empty": [(), [], {}],
        "version": torch.torch_version.TorchVersion("2.1.0"),
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.95)),
    }
    torch.save(values, tmp_path / "a.pt")
    tree = assert_both_ways_agree(tmp_path / "a.pt")
    assert tree[1, "a"]["shared"] is tree[1, "a"]["again"]


def test_both_ways_in_describe_tensors_of_other_classes_alike(tmp_path, monkeypatch):
    packed = {"inner": torch.ones(3), "more": [torch.zeros(2)], "size_of": 3}
    values = {
        "quantized": adam_state(monkeypatch, (3, 256)),
        "unknown": of_class(monkeypatch, "mine.Packed", (4, 6), torch.float32, **packed),
        "empty": of_class(monkeypatch, "mine.Empty", (4, 6), torch.float32),
        "pieces": with_pieces(torch.ones(4, 3), (9, 3), ((0, 0), (0, 0), (2, 3)), ((5, 0), (2, 0), (1, 3))),
        "wrong": with_pieces(torch.ones(4, 3), (9, 3), ((8, 0), (0, 0), (2, 3))),
    }
    torch.save(values, tmp_path / "a.pt")
    tree = assert_both_ways_agree(tmp_path / "a.pt", trust=True)
    assert [tree[k].kind for k in values] == ["quantized", "unreadable", "unreadable", "checkpointable", "unreadable"]


@pytest.mark.parametrize("placement", [Replicate(), Shard(1), Partial("avg")], ids=str)
def test_both_ways_in_describe_a_placement_alike(tmp_path, placement):
    with offline():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        torch.save({"w": DTensor.from_local(torch.ones(3, 4), mesh, (placement,))}, tmp_path / "a.pt")
    tree = assert_both_ways_agree(tmp_path / "a.pt")
    assert tree["w"].kind == ("unreadable" if placement.is_partial() else "dtensor")


class Foreign(dict):
    """Stands for a class of somebody's training code."""


def test_both_ways_in_show_a_foreign_object_alike(tmp_path):
    foreign = Foreign(w=torch.ones(2))
    foreign.note = ["a"]
    torch.save({"x": foreign, "f": np.linalg.norm}, tmp_path / "a.pt")
    inert, real = reader.read(tmp_path / "a.pt").tree, describe.read(tmp_path / "a.pt", trust=True).tree
    assert isinstance(real["x"], Opaque)
    assert comparable(real["x"]) == comparable(inert["x"])
    assert real["f"].name == inert["f"].name == "norm"


def test_a_loaded_source_cannot_be_mistaken_for_a_place_in_the_file(tmp_path):
    torch.save({"w": torch.arange(10.0)}, tmp_path / "a.pt")
    tensor = describe.read(tmp_path / "a.pt").tree["w"]
    with File(tmp_path / "a.pt") as file, pytest.raises(ReadError):
        file.read(tensor.shards[0].source.offset + 32, 4)


def test_tied_tensors_are_seen_to_be_tied(tmp_path):
    w = torch.ones(3, 4)
    torch.save({"a": w, "b": w, "c": torch.ones(3, 4)}, tmp_path / "a.pt")
    assert measure(describe.read(tmp_path / "a.pt").tree).params == 24


def test_values_nested_too_deep_are_refused_in_one_line(tmp_path):
    deep: list[object] = []
    for _ in range(150):
        deep = [deep]
    torch.save(deep, tmp_path / "a.pt")
    assert_both_ways_agree(tmp_path / "a.pt")
    for _ in range(200):
        deep = [deep]
    torch.save(deep, tmp_path / "a.pt")
    with pytest.raises(ReadError, match="levels"):
        describe.read(tmp_path / "a.pt")
