from __future__ import annotations

import argparse
import collections
import datetime
import os
import pickle

import numpy as np
import pytest
import torch
from numpy._core import multiarray
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh

from ckptools.errors import CkptoolsError, ForeignClassError, ReadError
from ckptools.torch_engine import allow_list
from ckptools.torch_engine.offline import load_shard


class Reduces:
    """Pickles as a call of `function(*args)`, and as its state when it has one."""

    def __init__(self, function, *args, state=None):
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.reduced

    def __call__(self):
        raise AssertionError("only there so that a pickle can call what this stands for")


def refused(path, value) -> ForeignClassError:
    torch.save({"x": value}, path)
    with pytest.raises(ForeignClassError) as caught:
        load_shard(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    return caught.value


HOSTILE = {
    "a system call": lambda mark: Reduces(os.system, f"touch {mark}"),
    "an eval": lambda mark: Reduces(eval, f"open({str(mark)!r}, 'w')"),
    "an open": lambda mark: Reduces(open, str(mark), "w"),
    "a call of a getattr": lambda mark: Reduces(Reduces(getattr, ShardedTensor, "mro")),
    "a getattr of another attribute": lambda mark: Reduces(getattr, ShardedTensor, "__init__"),
    "a getattr of another class": lambda mark: Reduces(getattr, DeviceMesh, "ProcessGroupState"),
    "a getattr with a default": lambda mark: Reduces(getattr, ShardedTensor, "nope", os.system),
    "a nested getattr": lambda mark: Reduces(getattr, Reduces(getattr, ShardedTensor, "__init__"), "__globals__"),
    "much memory": lambda mark: Reduces(bytes, 1 << 60),
    "a setstate": lambda mark: Reduces(collections.OrderedDict, state=Reduces(os.system, f"touch {mark}")),
}


@pytest.mark.parametrize("kind", sorted(HOSTILE))
@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_file_runs_nothing(tmp_path, kind, zipped):
    mark, path = tmp_path / "mark", tmp_path / "bad.pt"
    torch.save({"x": HOSTILE[kind](mark)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CkptoolsError) as caught:
        load_shard(path)
    assert "\n" not in str(caught.value)
    assert not mark.exists()


def test_trust_does_run_what_the_file_names(tmp_path):
    path, mark = tmp_path / "trusted.pt", tmp_path / "mark"
    torch.save({"x": Reduces(os.mkdir, str(mark))}, path)
    load_shard(path, trust=True)
    assert mark.is_dir()


def test_all_foreign_classes_are_named_in_one_line(tmp_path):
    error = refused(tmp_path / "a.pt", [Reduces(os.getcwd), Reduces(Reduces), collections.UserDict(), {1}])
    assert error.names == (f"{os.getcwd.__module__}.getcwd", f"{__name__}.Reduces", "collections.UserDict")
    assert "--trust" in str(error)


def test_a_class_that_the_caller_allowed_is_made(tmp_path):
    path = tmp_path / "a.pt"
    torch.save(collections.UserDict(a=1), path)
    with torch.serialization.safe_globals([collections.UserDict]):
        assert load_shard(path) == {"a": 1}
    with pytest.raises(ForeignClassError):
        load_shard(path)


def test_harmless_values_are_made(tmp_path):
    values = {
        "a": datetime.timedelta(seconds=3),
        "b": argparse.Namespace(lr=0.1),
        "c": (b"", b"\xff", {1, 2}, frozenset({3}), 1j, bytearray(b"x")),
        "d": torch.per_tensor_affine,
        "e": torch.torch_version.TorchVersion("2.1.0"),
        "f": datetime.datetime(2024, 2, 3, 4, 5, 6, 7),
        "g": [torch.float8_e4m3fn, torch.device("cuda:1"), torch.Size([2]), torch.strided],
    }
    torch.save(values, tmp_path / "a.pt")
    assert load_shard(tmp_path / "a.pt") == values


def test_a_defaultdict_is_made_as_a_dict(tmp_path):
    torch.save(collections.defaultdict(dict, {1: {"step": 2}}), tmp_path / "a.pt")
    assert load_shard(tmp_path / "a.pt") == {1: {"step": 2}}


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_nested_too_deep_is_refused(tmp_path, zipped):
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    torch.save(deep, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ReadError, match="levels"):
        load_shard(tmp_path / "a.pt")


# -- numpy ---------------------------------------------------------------------------------------------------

ARRAYS = [
    np.arange(6, dtype="<u4").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(3, dtype=">i2"),
    np.array([True, False]),
    np.array(["né", "b"]),
    np.array([b"abc"]),
    np.array(1 + 2j),
    np.zeros((0, 4), dtype="f2"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: a.dtype.str)
def test_numpy_arrays_come_back_as_they_were(tmp_path, array):
    torch.save({"t": ("MT19937", array), "l": [array, array.dtype]}, tmp_path / "a.pt")
    shard = load_shard(tmp_path / "a.pt")
    (_, first), (second, dtype) = shard["t"], shard["l"]
    assert type(first) is type(second) is np.ndarray
    # numpy itself brings the other byte order into this machine's.
    assert (first.dtype, first.shape) == (pickle.loads(pickle.dumps(array)).dtype, array.shape)
    assert (first.tolist(), second.tolist()) == (array.tolist(), array.tolist())
    assert (dtype, type(dtype)) == (array.dtype, type(array.dtype))


def test_numpy_scalars_come_back_as_they_were(tmp_path):
    scalars = [np.float64(0.1), np.int8(-3), np.bool_(True), np.complex64(1j)]
    torch.save(scalars, tmp_path / "a.pt")
    loaded = load_shard(tmp_path / "a.pt")
    assert [(type(s), s) for s in loaded] == [(type(s), s) for s in scalars]


def forged_array(code="V8", fields=("a", ("O", 0)), data=b"A" * 8, shape=(1,)):
    """An array whose bytes would be taken for a Python object: reading it ends a process that believes it."""
    name, place = fields
    state = (3, "|", None, (name,), {name: (np.dtype(place[0]), place[1])}, 8, 1, 0)
    dtype = Reduces(np.dtype, code, False, True, state=state)
    return Reduces(multiarray._reconstruct, np.ndarray, (0,), b"b", state=(1, shape, dtype, False, data))


def test_a_forged_numpy_dtype_is_refused(tmp_path):
    assert "numpy.dtype" in refused(tmp_path / "a.pt", forged_array()).names[0]
    assert "with fields" in refused(tmp_path / "a.pt", forged_array("u8", ("a", ("i4", 0)))).names[0]


@pytest.mark.parametrize(
    "value",
    [
        np.array([{}, None], dtype=object),
        np.zeros(2, dtype=[("a", "i4")]),
        Reduces(multiarray.scalar, np.dtype("f8"), b"1234"),
        Reduces(np.ndarray, (4,), "O", state=(1, (1,), None, False, [1])),
    ],
    ids=["objects", "records", "a short scalar", "no dtype"],
)
def test_an_array_that_is_not_plain_is_refused(tmp_path, value):
    assert refused(tmp_path / "a.pt", value).names[0].startswith("numpy")


def test_an_array_with_too_few_bytes_is_refused_before_torch_sees_it(tmp_path):
    forged = Reduces(multiarray._reconstruct, np.ndarray, (1 << 40,), b"b", state=(1, (9,), np.dtype("f8"), False, b""))
    torch.save(forged, tmp_path / "a.pt")
    with pytest.raises(ReadError, match="a numpy array of shape"):
        load_shard(tmp_path / "a.pt")


def test_an_array_is_empty_until_it_has_a_state(tmp_path):
    torch.save(Reduces(np.ndarray, (1 << 40,), "f8"), tmp_path / "a.pt")
    assert load_shard(tmp_path / "a.pt").shape == (0,)


# -- names ---------------------------------------------------------------------------------------------------


def test_names_of_python_2_are_known_by_their_present_ones():
    assert allow_list.spelling("__builtin__.set") == "builtins.set"
    assert allow_list.spelling("copy_reg._reconstructor") == "copyreg._reconstructor"
    assert allow_list.spelling("torch.Size") == "torch.Size"


@pytest.mark.parametrize("home", ["torch.distributed._tensor.api", "torch.distributed.tensor"])
def test_dtensor_is_known_in_every_spelling(home):
    from torch.distributed.tensor import DTensor

    assert allow_list.table()[f"{home}.DTensor"] is DTensor


def test_only_functions_of_ours_are_on_the_list():
    functions = [v for v in allow_list.table().values() if not isinstance(v, type)]
    assert {f.__module__ for f in functions} == {"ckptools.torch_engine.allow_list"}
