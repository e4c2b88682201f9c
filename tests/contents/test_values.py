"""A plain value as rows and JSON have it: whole where it is short, and else what it is."""

from __future__ import annotations

import struct
from datetime import date, timedelta

import pytest

from ckptools.contents.tree import MAX_FULL, MAX_TEXT, as_data, described, full_value, is_short, type_of
from ckptools.keys.entries import fingerprint, is_brief, is_run, leaves_of
from ckptools.model.tree import Device, Global, NumpyArray, NumpyDtype, NumpyScalar, Opaque, TorchName
from tests.display.made import plain

KEYS = NumpyArray("<u4", (624,), False, bytes(2496))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "null"), (plain(2), "tensor"), (True, "bool"), (1, "int"), (1.5, "float"), ("a", "str"),
        (b"a", "bytes"), (bytearray(b"a"), "bytes"), ({}, "dict"), ([], "list"), ((), "tuple"), (set(), "set"),
        (frozenset(), "set"), (timedelta(1), "timedelta"), (date(2026, 1, 1), "date"), (KEYS, "array"),
        (NumpyScalar("<f4", bytes(4)), "float"), (NumpyScalar("<V9", bytes(9)), "number"), (Global("a", "b"), "class"),
        (TorchName("int8"), "name"), (Device("cpu"), "name"), (NumpyDtype("<f4"), "name"), (Opaque("a.B"), "object"),
    ],
)  # fmt: skip
def test_a_value_has_the_name_of_its_type(value, name):
    assert type_of(value) == name


@pytest.mark.parametrize(
    ("value", "short"),
    [
        ([1] * 8, True), ([1] * 9, False), ((1, "a", None, True, 0.5), True), ([[1]], False), ({}, True),
        ({"a": 1}, False), ("x" * MAX_TEXT, True), ("x" * (MAX_TEXT + 1), False), (1 << 511, True), (1 << 512, False),
        (timedelta(1), True), (date(2026, 1, 1), True), (Device("cpu"), True), (b"", False), (Opaque("a.B"), False),
    ],
)  # fmt: skip
def test_a_value_is_short_up_to_a_limit(value, short):
    assert is_short(value) is short


def test_short_values_are_data():
    assert as_data((timedelta(minutes=2), (NumpyScalar("<i2", b"\2\0"), Device("cuda", 1)))) == [120.0, [2, "cuda:1"]]
    assert (as_data(date(2026, 1, 2)), as_data(TorchName("int8")), as_data(None)) == ("2026-01-02", "torch.int8", None)


@pytest.mark.parametrize(
    ("value", "full"),
    [
        (NumpyArray("<u2", (2,), False, b"\1\0\2\0"), [1, 2]),
        (NumpyArray(">u2", (2,), False, b"\1\0\2\0"), [256, 512]),
        (NumpyArray("<u2", (3,), False, b"\1\0\2\0"), None), (NumpyArray("<V2", (1,), False, b"\1\0"), None),
        (NumpyArray("|u1", (MAX_FULL,), False, bytes(MAX_FULL)), [0] * MAX_FULL),
        (NumpyArray("|u1", (MAX_FULL + 1,), False, bytes(MAX_FULL + 1)), None),
        ([1] * MAX_FULL, [1] * MAX_FULL), ([1] * (MAX_FULL + 1), None), ([1, [2]], [1, "1 value"]),
        ("x" * MAX_FULL, "x" * MAX_FULL), ("x" * (MAX_FULL + 1), None), (b"\1\xff", "01ff"),
        (bytes(MAX_FULL + 1), None),
        (7, 7), ({}, {}), ({"a": 1}, None), (Opaque("a.B"), None),
    ],
)  # fmt: skip
def test_a_value_is_given_in_full_up_to_a_limit(value, full):
    assert full_value(value) == full


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1] * 9, "9 integers, crc fc30d2f1"), ([1, "a"], "2 values"), ([1.5], "1 value"), ({1, 2}, "{1, 2}"),
        (set(range(17)), "17 values"),
        (KEYS, "numpy <u4 [624], crc ccbf2b8e"), (b"a", "1 byte"), (bytearray(3), "3 bytes"),
        (b"\x80\x02}q\x00X\x04\x00\x00\x00stepq\x01K\x02s.", "20 bytes, a pickle of step 2"),
        ("x" * 300, f"300 characters: {'x' * 197}..."), (1 << 512, "an integer of 513 bits"), (Opaque("a.B"), "a.B"),
        (Global("a", "b"), "a.b"), (NumpyScalar("<V9", bytes(9)), "numpy <V9"), ({"a": 1}, "numpy dict"),
    ],
)  # fmt: skip
def test_a_longer_value_is_described(value, words):
    assert described(value) == words


def test_long_runs_of_integers_and_arrays_have_a_fingerprint():
    numbers = [fingerprint(value) for value in ([1] * 9, [1] * 8 + [2], (2,) * 9, KEYS)]
    assert len(set(numbers)) == 4 and None not in numbers and fingerprint((1,) * 9) == numbers[0]
    assert [fingerprint(value) for value in ([1] * 8, [1] * 9 + [True], [1] * 9 + [0.5], b"123456789", 5)] == [None] * 5
    assert fingerprint([1 << 511] * 9) != fingerprint([1 << 512] * 9) == fingerprint([1 << 513] * 9)


def test_a_class_with_a_few_plain_arguments_is_brief():
    named = Opaque("pathlib.PosixPath", ("/", "data"))
    assert is_brief(named) and is_brief(Opaque("a.B", (1, Global("a", "C"), None, 4, 5, 6)))
    assert not is_brief(Opaque("a.B", (1,) * 7)) and not is_brief(Opaque("a.B", ([1],)))
    for slot, value in (("state", {"a": 1}), ("items", [1]), ("keywords", {"a": 1}), ("args", [1])):
        other = Opaque("a.B", ("/",))
        setattr(other, slot, value)
        assert not is_brief(other)


def test_a_sequence_is_one_leaf_where_its_first_values_are_plain():
    assert is_run([1] * 8 + [[2]]) and not is_run([1] * 7 + [[2]]) and not is_run({"a": 1})
    found = dict(leaves_of({"betas": (0.9, 0.95), "nested": [{"a": 1}], "empty": {}, "none": None}))
    assert found == {("betas",): (0.9, 0.95), ("nested", 0, "a"): 1, ("empty",): {}, ("none",): None}


def test_a_foreign_object_is_a_leaf_with_its_attributes_behind_it_and_is_entered_once():
    knot, other = Opaque("a.Knot"), Opaque("a.Other")
    knot.state, other.state = {"self": knot, "x": other, "y": other}, {"n": 3}
    found = [path for path, _ in leaves_of({"k": knot})]
    assert found == [("k",), ("k", "self"), ("k", "x"), ("k", "x", "n"), ("k", "y"), ("k", "y", "n")]


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(("code", "letter", "value"), [("f8", "d", 0.1), ("i2", "h", -2), ("u8", "Q", 1 << 63)])
def test_a_numpy_scalar_is_its_number_in_either_byte_order(order, code, letter, value):
    assert as_data(NumpyScalar(order + code, struct.pack(order + letter, value))) == value
