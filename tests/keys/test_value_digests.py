"""Values that differ have different digests, and those that formats keep in different ways have the same."""

from __future__ import annotations

import math
import struct
from datetime import timedelta
from itertools import combinations

import pytest

from ckptools.files.opening import OpenFiles
from ckptools.keys import value_digests
from ckptools.keys.value_digests import Content, apart, content_of, joined
from ckptools.model.tree import Global, Lost, NumpyArray, NumpyScalar, Opaque
from tests.display.made import plain

INTS = [0, 1, -1, 127, 128, -128, -129, 255, 256, 65535, 1 << 63, -(1 << 63), 1 << 600]
OTHERS = [
    None, True, False, -0.0, 0.5, -0.5, math.nan, math.inf, "", "a", "None", "1", "b1;a", b"", b"a", [], [[]], [0],
    [0, 0], [[0], 0], {}, {"a": 0}, {"a": 1}, {"b": 0}, {"a": 0, "b": 1}, {"a": 1, "b": 0}, set(), {1}, {1, 2}, {"1"},
    Global("a", "b"), Opaque("a.B"), Opaque("a.B", (1,)), Opaque("a.B", (2, 1)), Opaque("a.B", (1, 2)), Opaque("a.C"),
    NumpyArray("<u4", (2,), False, bytes(8)), NumpyArray("<u4", (2,), False, bytes(7) + b"\1"),
    NumpyArray("<u4", (1, 2), False, bytes(8)), NumpyArray("<u4", (1, 2), True, bytes(8)),
    NumpyArray("<i4", (2,), False, bytes(8)), NumpyArray(">i4", (2,), False, bytes(8)),
]  # fmt: skip


def content(value) -> Content:
    with OpenFiles() as files:
        return content_of(value, files)


def test_values_that_differ_have_different_digests():
    found = [(value, content(value).digest) for value in (*INTS, *OTHERS)]
    assert [(a, b) for (a, x), (b, y) in combinations(found, 2) if x == y] == []
    assert all(len(digest) == 32 for _, digest in found)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (5, 5.0), ([1, "a"], (1, "a")), (timedelta(seconds=90), 90), (timedelta(milliseconds=500), 0.5), (0, 0.0),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({1, 2}, frozenset({2, 1})), (b"a", bytearray(b"a")),
        (NumpyScalar("<f8", bytes(8)), 0), (Global("a", "b"), Global("a", "b")), (math.nan, float("nan")),
        (NumpyArray("<u4", (2,), True, bytes(8)), NumpyArray("<u4", (2,), False, bytes(8))),
        (NumpyArray("|u1", (2,), False, bytes(2)), NumpyArray("<u1", (2,), False, bytes(2))),
    ],
)  # fmt: skip
def test_what_formats_keep_in_different_ways_is_the_same(one, other):
    assert content(one).digest == content(other).digest


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5.0, "5"), (1e15, "1000000000000000.0"), (0.0, "0.0"), (-0.0, "-0.0"), (0.1, "0.1"), ("a'b", '"a\'b"'),
        ("x" * 70, f"'{'x' * 56}..."), (None, "None"), (True, "True"), ([1, 2.5, "a"], "[1, 2.5, 'a']"),
        ([1] * 8, "[1, 1, 1, 1, 1, 1, 1, 1]"), ([1] * 9, "9 values"), ([1, {"a": 1}], "2 values"),
        (b"ab", "b'ab'"), (b"a" * 17, "17 bytes"), ({}, "{}"), (set(), "{}"), ({"a": 1}, "1 value"), ({1, 2}, "{1, 2}"),
        (Global("a", "b"), "a.b"),
        (Opaque("a.B"), "<a.B>"), (1 << 600, "an integer of 601 bits"), (plain(2, 3), "float32 [2, 3]"),
        (NumpyArray("<u4", (2,), False, bytes(8)), "<u4 [2]"), (timedelta(seconds=90), "0:01:30"),
    ],
)  # fmt: skip
def test_a_value_has_a_few_words(value, text):
    assert content(value).text == text


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Lost("lost"), "could not be read; verify says why"),
        ([1, Lost("cut")], "cut"),
        (plain(1 << 18, 2), "a tensor of 2097152 bytes outside of model and optimizer"),
    ],
)
def test_what_cannot_be_told_has_no_digest_and_says_why(value, problem):
    found = content(value)
    assert (found.digest, found.problem) == ("", problem)


def test_more_values_than_are_looked_at_have_no_digest(monkeypatch):
    monkeypatch.setattr(value_digests, "MAX_ITEMS", 4)
    assert content([1, 2, 3, 4]).digest
    assert content([1, 2, 3, 4, 5]).problem == "holds more than 4 values"


def test_pieces_of_one_state_are_one_content_and_one_that_is_not_known_is_told():
    one, other = content(1), content(2)
    assert joined([one, other]).digest != joined([other, one]).digest != ""
    assert joined([one]).text == f"fingerprint {joined([one]).digest[:8]}"
    assert joined([one, content(Lost("cut"))]) == Content("", "unknown", "cut")


LONG = "a" * 3000


@pytest.mark.parametrize(
    ("x", "y", "texts"),
    [
        ([1], (1,), ("[1] (list)", "[1] (tuple)")),
        (b"x", bytearray(b"x"), ("b'x' (bytes)", "b'x' (bytearray)")),
        (
            math.nan,
            struct.unpack("<d", b"\1\0\0\0\0\0\xf8\x7f")[0],
            ("nan (0x7ff8000000000000)", "nan (0x7ff8000000000001)"),
        ),
        (LONG + "b" * 9, LONG + "c" * 9, ("...'aaaaaaaaaaaabbbbbbbbb'", "...'aaaaaaaaaaaaccccccccc'")),
    ],
)
def test_two_values_that_differ_are_shown_in_words_that_differ(x, y, texts):
    assert apart(x, y) == texts
