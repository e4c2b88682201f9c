"""Headers of safetensors files: what is accepted is what the format's own library accepts, and no more."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ckptools.errors import ReadError
from ckptools.files.opening import File, Window
from ckptools.files.safetensors_header import Header, HeaderEntry, read_header

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def read(path: Path) -> Header:
    with File(path) as file:
        return read_header(file)


def theirs(path: Path) -> dict[str, list[int]] | None:
    """Names and shapes as the library gives them; None when it refuses the file."""
    try:
        with safe_open(path, framework="np") as file:
            return {k: file.get_slice(k).get_shape() for k in file.keys()}  # noqa: SIM118 - it is no dict
    except SafetensorError:
        return None


def spelled(entry: HeaderEntry) -> list[int]:
    """The shape as the header spells it: F4 one by one, where torch holds pairs."""
    pairs = entry.dtype == "float4_e2m1fn_x2"
    return [*entry.shape[:-1], entry.shape[-1] * 2] if pairs else list(entry.shape)


def ours(path: Path) -> dict[str, list[int]] | None:
    try:
        return {k: spelled(e) for k, e in read(path).tensors.items()}
    except ReadError as error:
        assert "\n" not in str(error) and str(error).startswith(str(path))
        return None


DTYPES = [d for d in (getattr(torch, name, None) for name in (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "complex64", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
    "uint8", "bool",
)) if d is not None]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_that_the_library_writes_is_read_where_it_lies(tmp_path, dtype):
    one = torch.arange(48, dtype=torch.uint8).reshape(2, 24) % (2 if dtype == torch.bool else 255)
    tensor = one.view(dtype)
    save_file({"first": torch.ones(3), "x": tensor, "empty": tensor[:0]}, tmp_path / "m.safetensors")
    entry = read(tmp_path / "m.safetensors").tensors["x"]
    assert (f"torch.{entry.dtype}", entry.shape) == (str(dtype), tuple(tensor.shape))
    data = (tmp_path / "m.safetensors").read_bytes()[entry.start : entry.end]
    assert data == one.numpy().tobytes()


def test_a_header_inside_a_window_gives_offsets_of_the_file(tmp_path):
    save_file({"x": torch.arange(3)}, tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "packed").write_bytes(b"12345" + data + b"6789")
    with File(tmp_path / "packed") as file:
        entry = read_header(Window(file, 5, len(data))).tensors["x"]
        assert file.read(entry.start, entry.end - entry.start) == torch.arange(3).numpy().tobytes()


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        ({"x": ENTRY}, b"1234567", "cut short"),
        ({"x": ENTRY}, b"123456789", "bytes were added"),
        ({"x": {**ENTRY, "data_offsets": [4, 12]}}, b"123456789012", "expected to begin at 0"),
        ({"x": ENTRY, "y": ENTRY}, b"12345678", "expected to begin at 8"),
        ({"x": ENTRY, "y": {**ENTRY, "data_offsets": [12, 20]}}, bytes(20), "expected to begin at 8"),
        ({"x": {**ENTRY, "data_offsets": [8, 0]}}, b"12345678", "expected to begin at 0"),
        ({"x": {**ENTRY, "data_offsets": [0, 8, 8]}}, b"12345678", "expected lists of sizes"),
        ({"x": {**ENTRY, "shape": [3]}}, b"12345678", "takes 12"),
        ({"x": {**ENTRY, "shape": [1 << 40, 1 << 40]}}, b"12345678", "2\\^64 bits"),
        ({"x": {**ENTRY, "shape": [1 << 40, 1 << 40, 0], "data_offsets": [0, 0]}}, b"", "2\\^64 bits"),
        ({"x": {**ENTRY, "shape": [-2]}}, b"12345678", "no size"),
        ({"x": {**ENTRY, "shape": [2.0]}}, b"12345678", "no size"),
        ({"x": {**ENTRY, "shape": [True, 2]}}, b"12345678", "expected lists of sizes"),
        ({"x": {**ENTRY, "dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"123", "torch has no name for"),
        ({"x": {**ENTRY, "dtype": "F128"}}, b"12345678", "unknown"),
        ({"x": {**ENTRY, "dtype": "F4", "shape": [3]}}, b"12345678", "end at a byte"),
        ({"x": {**ENTRY, "dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, b"123", "last dimension is odd"),
        ({"x": {"dtype": "F32", "shape": [2]}}, b"12345678", "expected an object of"),
        ({"__metadata__": {"step": 5}}, b"", "not a string"),
        ({"__metadata__": ["a"]}, b"", "not an object"),
        (b"[]", b"", "not with an object"),
        (b'{"x":', b"", "damaged"),
        (b'{"\xff": 1}', b"", "not UTF-8"),
        (b'{"\\ud800": {"dtype":"F32","shape":[],"data_offsets":[0,4]}}', b"1234", "not Unicode"),
        (b'{"a": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", b"", "nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "no size"),
        (b'{"a": NaN}', b"", "no size"),
        (b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[-0,4]}}', b"1234", "no size"),
        (b'{"x":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}', b"1234", "no size"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_contradiction_is_refused_in_one_line(tmp_path, header, data, why):
    path = write(tmp_path / "m.safetensors", header, data)
    with pytest.raises(ReadError, match=why) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: safetensors header: ") and len(str(error.value)) < len(str(path)) + 250


@pytest.mark.parametrize("length", [100_000_001, 1 << 62, (1 << 64) - 1, 3000])
def test_a_length_that_lies_is_refused_before_anything_is_read(tmp_path, length):
    path = write(tmp_path / "m.safetensors", {"x": ENTRY}, b"12345678", length)
    with pytest.raises(ReadError, match=r"at most 100000000|is cut short"):
        read(path)


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_without_a_length_is_cut_short(tmp_path, size):
    (tmp_path / "m.safetensors").write_bytes(bytes(size))
    with pytest.raises(ReadError, match="is cut short"):
        read(tmp_path / "m.safetensors")


STRICTER = [
    b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"__metadata__":{"a":"1","a":"2"}}',
    b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"strides":[1]}}',
    b' {"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    b'{"x":["F32",[1],[0,4]]}',
]


@pytest.mark.parametrize("header", STRICTER)
def test_what_two_readers_could_take_differently_is_refused_though_the_library_takes_it(tmp_path, header):
    path = write(tmp_path / "m.safetensors", header, b"1234")
    assert theirs(path) is not None and ours(path) is None


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"{}", b""),
        (b'{"__metadata__":null}   \n', b""),
        ({"__metadata__": {"format": "pt"}, "": {**ENTRY, "shape": []} | {"data_offsets": [0, 4]}}, b"1234"),
        ({"b": ENTRY, "a": {**ENTRY, "data_offsets": [8, 16]}}, bytes(16)),
        ({"x": {**ENTRY, "shape": [0, 1 << 60, 1 << 60], "data_offsets": [0, 0]}}, b""),
        ({"x": ENTRY, "e": {**ENTRY, "shape": [0], "data_offsets": [8, 8]}}, bytes(8)),
        ({"\0\n\u202e\U0001f600": ENTRY}, bytes(8)),
    ],
    ids=str,
)
def test_what_is_odd_and_legal_is_read(tmp_path, header, data):
    path = write(tmp_path / "m.safetensors", header, data)
    assert ours(path) == theirs(path) is not None


NUMBERS = st.one_of(st.integers(-2, 40), st.sampled_from([1 << 31, 1 << 32, 1 << 62, 1 << 63, 1 << 64, 1.5, True, "1"]))
SPELLED = ("F32", "I64", "BOOL", "F4", "F8_E8M0", "C64", "U16", "f32", "F6_E3M2", "")


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, object], int]:
    """A header that is right, and then has at most two of its values replaced."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}} if draw(st.booleans()) else {}
    at = 0
    for name in draw(st.lists(st.sampled_from(["a", "b.c", "", "é", "\0"]), max_size=4, unique=True)):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        nbytes = 4 * int(torch.Size(shape).numel())
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    for name in draw(st.lists(st.sampled_from(sorted(header) or [""]), max_size=2)):
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets", None]))
        if name == "__metadata__" or not isinstance(header.get(name), dict):
            header["__metadata__"] = draw(st.sampled_from([None, {}, {"a": 1}, {"a": None}, [], "x"]))
        elif field == "dtype":
            header[name][field] = draw(st.sampled_from(SPELLED))
        elif field is None:
            header[name] = draw(st.sampled_from([None, 1, {}, {"dtype": "F32"}]))
        else:
            header[name][field] = draw(st.lists(NUMBERS, max_size=3))
    return header, max(0, at + draw(st.sampled_from([0, 0, 0, 0, -1, 1, 8])))


FEW = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.slow
@FEW
@given(headers())
def test_any_header_is_accepted_exactly_when_the_library_accepts_it(tmp_path, case):
    header, nbytes = case
    path = write(tmp_path / "m.safetensors", header, bytes(nbytes))
    known_to_torch = not any(d in json.dumps(header) for d in ('"F4"', '"F6_E3M2"'))
    assert ours(path) == theirs(path) or (not known_to_torch and ours(path) is None)


@pytest.mark.slow
@FEW
@given(st.data())
def test_a_header_with_changed_bytes_is_accepted_only_when_the_library_accepts_it(tmp_path, data):
    good = bytearray(
        json.dumps({"__metadata__": {"a": "é"}, "x": ENTRY, "y": {**ENTRY, "data_offsets": [8, 16]}}).encode()
    )
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(
            st.sampled_from(b'{}[]":,0123456789-.eE\\u \n\0x\x80\xc3')
        )
    path = write(tmp_path / "m.safetensors", bytes(good), bytes(16))
    found = ours(path)
    assert found is None or found == theirs(path)


SIZES = st.sampled_from([0, 0, 1, 3, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1, 1 << 64, 10**30])


@pytest.mark.slow
@FEW
@given(st.lists(SIZES, max_size=4), st.sampled_from(["F32", "U8", "F4"]), st.integers(0, 3))
def test_a_shape_beyond_64_bits_is_accepted_only_when_the_library_accepts_it(tmp_path, shape, dtype, nbytes):
    header = {"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}
    path = write(tmp_path / "m.safetensors", header, bytes(nbytes))
    known = dtype != "F4" or (bool(shape) and shape[-1] % 2 == 0)  # of what torch has a name for
    assert ours(path) == (theirs(path) if known else None)


@pytest.mark.parametrize("size", [1 << 64, 10**30])
@pytest.mark.parametrize("at", [0, 1])
def test_a_size_that_is_no_u64_is_refused_beside_a_zero(tmp_path, size, at):
    shape = [0]
    shape.insert(at, size)
    path = write(tmp_path / "m.safetensors", {"x": {**ENTRY, "shape": shape, "data_offsets": [0, 0]}})
    assert theirs(path) is None and ours(path) is None
