"""Tensors of every kind that torch saves, against torch itself, and forged ones."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.dtypes import ITEMSIZE, QUANTIZED
from ckptools.errors import CkptoolsError, ReadError
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque
from ckptools.pickles import reader
from ckptools.tensor_io.numbers import fp8_table
from ckptools.training_state.sections import measure
from tests.pickles.forge import number, numbers, one_line, storage, tensor, text, with_pickle
from tests.versions import torch_with

DTYPES = [d for d in ITEMSIZE if d not in QUANTIZED]


def saved(tmp_path, value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, tmp_path / "t.pt")
    return reader.read(tmp_path / "t.pt").tree


def same_bits(a, b):
    assert (a.shape, a.dtype, bits(a)) == (b.shape, b.dtype, bits(b))


def bits(value):
    flat = value.detach().reshape(-1)
    return torch.empty(len(flat), dtype=flat.dtype).copy_(flat).view(torch.uint8).tolist()


def random_bits(dtype, shape=(3, 5)):
    """A tensor of random bytes, NaNs and all."""
    n = int(np.prod(shape)) * ITEMSIZE[dtype]
    if dtype == "bool":
        return torch.randint(0, 2, shape).bool()
    torch_with(dtype)
    return torch.randint(0, 256, (n,), dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read_bit_for_bit(tmp_path, dtype):
    values = random_bits(dtype)
    found = saved(tmp_path, values)
    assert (found.dtype, found.shape, found.nbytes) == (dtype, (3, 5), values.nbytes)
    same_bits(found.load(), values)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in ("complex32", "float4_e2m1fn_x2")])
def test_numpy_holds_what_torch_holds(tmp_path, dtype):
    values = random_bits(dtype)
    found = saved(tmp_path, values).numpy()
    exact = values.float() if dtype == "bfloat16" or dtype.startswith("float8") else values
    assert np.array_equal(found, exact.numpy(), equal_nan=found.dtype.kind in "fc")


@pytest.mark.parametrize("dtype", ["complex32", "float4_e2m1fn_x2"])
def test_what_numpy_lacks_is_said_in_one_line(tmp_path, dtype):
    with pytest.raises(CkptoolsError, match=f"numpy has no {dtype}"):
        saved(tmp_path, random_bits(dtype)).numpy()


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.startswith("float8")])
def test_all_256_codes_of_fp8_are_torchs_values(dtype):
    torch_with(dtype)
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(fp8_table(dtype), codes, equal_nan=True)
    assert np.array_equal(np.signbit(fp8_table(dtype)), np.signbit(codes))


def test_all_bfloat16_codes_are_torchs_values(tmp_path):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    assert np.array_equal(saved(tmp_path, values).numpy(), values.float().numpy(), equal_nan=True)


BASE = torch.arange(60.0).reshape(3, 4, 5)
VIEWS = {
    "transposed": BASE.transpose(0, 2),
    "strided": BASE[::2, 1::2, ::3],
    "a column": BASE[:, 1, 3],
    "expanded": torch.arange(3.0)[:, None].expand(3, 4),
    "all strides zero": torch.tensor(7.0).expand(2, 3),
    "a small view of a large storage": torch.arange(100_000.0)[99_990:],
    "0-d": torch.tensor(3.5),
    "0-d in a storage": BASE[1, 2, 3],
    "empty": torch.empty(0, 3),
    "empty at the end": BASE.reshape(-1)[60:],
    "permuted": BASE.permute(1, 2, 0),
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "unfolded": torch.arange(10.0).unfold(0, 4, 2),
    "one element with odd strides": BASE.as_strided((1, 1), (7, 9), 59),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_is_read_as_torch_sees_it(tmp_path, view):
    same_bits(saved(tmp_path, view).load(), view)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_strided_view_and_any_slice_of_it_are_torchs(tmp_path, data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    stride = data.draw(st.lists(st.integers(0, 7), min_size=len(shape), max_size=len(shape)))
    view = torch.arange(200.0).as_strided(shape, stride, data.draw(st.integers(0, 20)))
    found = saved(tmp_path, view)
    same_bits(found.load(), view)
    index = tuple(data.draw(one_index(n)) for n in shape[: data.draw(st.integers(0, len(shape)))])
    if data.draw(st.booleans()):
        index = (..., *index) if len(index) == len(shape) else (*index, ...)
    same_bits(found[index], view[index])


def test_numpy_ints_are_indices_too(tmp_path):
    assert saved(tmp_path, BASE)[np.int64(1), 2, np.uint8(3)].item() == BASE[1, 2, 3]


def one_index(n):
    bound = st.one_of(st.none(), st.integers(-n - 2, n + 2))
    slices = st.builds(slice, bound, bound, st.sampled_from([None, 1]))
    return st.one_of(slices, st.integers(-n, n - 1)) if n else slices


@pytest.mark.parametrize("index", [5, -6, (0, 0, 0, 0), slice(None, None, 0), "x", None, [0], True])
def test_an_index_that_is_not_served_is_an_error(tmp_path, index):
    found = saved(tmp_path, BASE)
    with pytest.raises((CkptoolsError, IndexError, ValueError)):
        found[index]


def test_a_slice_reads_only_the_bytes_it_needs(tmp_path, monkeypatch):
    from ckptools.files.opening import File

    found = saved(tmp_path, torch.arange(100_000.0).reshape(1000, 100))
    sizes, read, fill = [], File.read, File.fill
    monkeypatch.setattr(File, "read", lambda self, at, n: (sizes.append(n), read(self, at, n))[1])
    monkeypatch.setattr(File, "fill", lambda self, at, out: (sizes.append(len(out)), fill(self, at, out))[1])
    assert found[10, 3:5].tolist() == [1003, 1004]
    assert sum(sizes) == 8


def test_shared_storages_are_read_once_each_and_counted_once(tmp_path):
    weight = torch.arange(6.0)
    tree = saved(tmp_path, {"a": weight, "tied": weight, "half": weight[3:]})
    assert tree["a"].shards[0].source == tree["tied"].shards[0].source
    assert measure(tree).params == 6 + 3
    assert tree["half"].load().tolist() == [3, 4, 5]


def test_a_parameter_is_known_as_one(tmp_path):
    frozen = saved(tmp_path, torch.nn.Parameter(torch.ones(2), requires_grad=False))
    assert (frozen.parameter, frozen.requires_grad) == (True, False)
    assert saved(tmp_path, torch.ones(2, requires_grad=True)).requires_grad
    assert not saved(tmp_path, torch.nn.Buffer(torch.ones(2))).parameter


def test_python_attributes_on_a_tensor_do_not_hide_its_values(tmp_path):
    plain, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    plain.tag = parameter.tag = "x"
    assert saved(tmp_path, plain).load().tolist() == saved(tmp_path, parameter).load().tolist() == [1, 1]


class Subclass(torch.Tensor):
    pass


SHOWN = {
    "sparse COO": (torch.eye(3).to_sparse(), "sparse", "a sparse tensor"),
    "sparse CSR": (torch.eye(3).to_sparse_csr(), "sparse", "a sparse tensor"),
    "quantized": (torch.arange(9.0).reshape(3, 3), "quantized", "a quantized tensor"),
    "conj": (torch.ones(3, 3, dtype=torch.complex64).conj(), "unreadable", r"a lazy view \(conj\)"),
    "neg": (torch.ones(3, 3, dtype=torch.complex64).conj().imag, "unreadable", r"a lazy view \(neg\)"),
    "meta": (torch.empty(3, 3, device="meta"), "meta", "a meta tensor"),
    "subclass": (torch.ones(3, 3).as_subclass(Subclass), "unreadable", "a tensor of class .*Subclass"),
}


@pytest.mark.parametrize(("value", "kind", "why"), SHOWN.values(), ids=SHOWN)
def test_what_cannot_be_loaded_is_described_and_says_why(tmp_path, value, kind, why):
    if kind == "quantized":
        value = torch.quantize_per_tensor(value, 0.1, 0, torch.qint8)
    found = saved(tmp_path, value)
    assert (found.shape, found.kind) == ((3, 3), kind)
    with pytest.raises(ReadError, match=why):
        found.load()


def test_nested_tensors_and_newer_dtypes_do_not_hide_the_rest(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    tree = saved(tmp_path, {"n": nested, "b": torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "step": 1})
    assert "nested" in tree["n"].note and isinstance(tree["b"], Opaque) and tree["step"] == 1


def test_meta_tensors_of_absurd_size_are_only_shown(tmp_path):
    found = saved(tmp_path, torch.empty(2**40, 2**10, device="meta"))
    assert found.numel == 2**50 and "fp32" in repr(found)


def test_an_expanded_scalar_of_2_to_40_elements_costs_nothing_to_open(tmp_path):
    found = saved(tmp_path, {"x": torch.tensor(1.0).expand(2**20, 2**20)})["x"]
    assert found.numel == 2**40
    assert found[5, 7:9].tolist() == [1, 1]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(tmp_path, protocol):
    torch.save({"w": BASE, "p": torch.nn.Parameter(BASE)}, tmp_path / "t.pt", pickle_protocol=protocol)
    tree = reader.read(tmp_path / "t.pt").tree
    same_bits(tree["w"].load(), BASE)


# -- forged -----------------------------------------------------------------------------------------------------

DATA = np.arange(4, dtype="<f4").tobytes()
HUGE = 1 << 62
FORGED = {
    "a storage shorter than its tensor": tensor((5,)),
    "an offset outside": tensor((4,), offset=1),
    "a stride outside": tensor((2,), (4,)),
    "a negative size": tensor((-1,)),
    "a negative stride": tensor((2,), (-1,), 3),
    "a negative offset": tensor((1,), offset=-1),
    "a huge size": tensor((HUGE,)),
    "a size of 2^64": tensor((1 << 64,)),
    "a product that wraps": tensor((HUGE, 4), (0, 1), 1),
    "a stride whose product wraps": tensor((5,), (HUGE,)),
    "an offset that wraps": tensor((1,), offset=(1 << 63) - 1),
    "more strides than sizes": tensor((2,), (1, 1)),
    "no strides": tensor((2, 2), ()),
    "more dimensions than torch has": tensor((1,) * 65, (1,) * 65),
    "sizes that are no ints": b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage() + b"K\0" + text("ab") + b")\x89NtR",
    "a size that is a bool": b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage() + b"K\0\x88\x85K\x01\x85\x89NtR",
    "an offset that is a float": b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage() + b"G" + bytes(8) + b"))\x89NtR",
    "a record of another length": tensor(of=storage(numel=5)),
    "a record of another dtype's length": tensor(of=storage(kind="DoubleStorage")),
    "a numel that is huge": tensor((1,), of=storage(numel=HUGE)),
    "a numel that is negative": tensor((1,), of=storage(numel=-4)),
    "a record that is absent": tensor(of=storage("7")),
    "a record that is data.pkl": tensor(of=storage("../data.pkl")),
    "a record name of lines": tensor(of=storage("0\nok: fine")),
    "an unknown storage class": tensor(of=storage(kind="EvilStorage")),
    "one key, two dtypes": b"(" + tensor() + tensor(of=storage(kind="IntStorage")) + b"t",
    "one key, two lengths": b"(" + tensor() + tensor((1,), of=storage(numel=1)) + b"t",
    "a tensor in the place of a storage": tensor(of=tensor()),
    "a dtype wider than its storage": b"ctorch._utils\n_rebuild_tensor_v3\n("
    + storage("0", 16, "UntypedStorage") + number(0) + numbers((4,)) + numbers((1,)) + b"\x89Nctorch\nfloat64\ntR",
}  # fmt: skip


@pytest.mark.parametrize("pickled", FORGED.values(), ids=FORGED)
def test_a_tensor_that_does_not_fit_its_storage_is_refused_in_one_line(tmp_path, pickled):
    assert one_line(with_pickle(tmp_path / "f.pt", pickled + b".", DATA))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dims=st.lists(st.tuples(st.integers(-2, 9), st.integers(-2, 9)), max_size=4),
    offset=st.integers(-2, 9),
    numel=st.integers(0, 9),
)
def test_a_view_is_accepted_when_and_only_when_it_lies_in_its_storage(tmp_path, dims, offset, numel):
    size, stride = [d[0] for d in dims], [d[1] for d in dims]
    data = np.arange(numel, dtype="<f4")
    path = with_pickle(tmp_path / "v.pt", tensor(size, stride, offset, storage(numel=numel)) + b".", data.tobytes())
    legal = min([*size, *stride, offset]) >= 0
    reach = offset + sum((n - 1) * s for n, s in dims)
    if legal and (not all(size) or reach < numel):
        expected = torch.from_numpy(data).as_strided(size, stride, offset) if all(size) else torch.empty(size)
        same_bits(reader.read(path).tree.load(), expected)
    else:
        assert one_line(path)


def test_a_storage_whose_pickle_says_more_than_its_record_holds_never_reaches_numpy(tmp_path):
    # CVE-2026-24747: torch trusted the number of elements in the persistent id.
    forged = with_pickle(tmp_path / "c.pt", tensor((1 << 20,), of=storage(numel=1 << 20)) + b".", DATA)
    assert "has 16 bytes, its tensors expect 4194304" in one_line(forged)


def test_a_file_that_shrinks_after_opening_is_one_line(tmp_path):
    torch.save({"w": torch.arange(4000.0)}, tmp_path / "s.pt")
    ck = ckptools.open(tmp_path / "s.pt")
    with (tmp_path / "s.pt").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ReadError, match="ends at byte 1000"):
        ck.model["w"].load()


def test_a_tensor_is_data_that_can_be_compared_and_printed(tmp_path):
    first, second = saved(tmp_path, BASE), saved(tmp_path, BASE)
    assert first == second and isinstance(first, Tensor)
    assert repr(first) == "<Tensor fp32 [3, 4, 5], 240 B, 1 shard, not loaded>"
