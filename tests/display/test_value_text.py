from __future__ import annotations

import json
from datetime import timedelta

import pytest

from ckptools.display.record_json import JsonValues
from ckptools.display.tables import value_text
from ckptools.model.tree import Device, Global, NumpyArray, NumpyScalar, Opaque, TorchName
from tests.display.made import plain


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "True"),
        (None, "None"),
        ("1e5", "'1e5'"),
        ("a\x1b[0m", "'a\\x1b[0m'"),
        ((0.9, 0.95), "(0.9, 0.95)"),
        ([1, 2, 3, 4, 5, 6, 7, 8], "[1, 2, 3, 4, 5, 6, 2 more]"),
        ({"a": {"b": {"c": 1}}}, "{a: {b: {1 value}}}"),
        ({1, 2}, "{1, 2}"),
        (NumpyScalar("<f8", b"\0\0\0\0\0\0\xf0\x3f"), "1"),
        (NumpyArray("<u4", (624,), False, b""), "numpy <u4 [624]"),
        (plain(3, 4), "fp32 tensor [3, 4]"),
        (Opaque("argparse.Namespace"), "<argparse.Namespace>"),
        (Global("torch", "float32"), "<torch.float32>"),
        (TorchName("float32"), "torch.float32"),
        (Device("cuda", 3), "cuda:3"),
        (timedelta(seconds=90), "0:01:30"),
        (b"\0\1", "2 bytes"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_shown_in_few_words(value, words):
    assert value_text(value) == words


def test_an_integer_that_python_refuses_to_print_is_described():
    assert value_text(1 << 40_000) == "an integer of 40001 bits"
    assert JsonValues().of([1 << 40_000]) == ["an integer of 40001 bits"]


def test_a_long_value_is_cut():
    assert len(value_text("x" * 10**6, 50)) == 50
    assert len(value_text({"k" * 1000: "v" * 1000}, 60)) == 60


def test_json_has_no_bare_nan():
    values = JsonValues()
    made = values.of({"a": float("nan"), "b": [float("inf"), 1.5]})
    assert made == {"a": None, "b": [None, 1.5]}
    assert values.nonfinite == 2


def test_keys_that_are_one_in_json_are_both_kept():
    made = JsonValues().of({1: "int", "1": "text", 1.5: "float", None: "none", (1, 2): "pair"})
    assert made == {"1": "int", "1 (str)": "text", "1.5": "float", "None": "none", "(1, 2)": "pair"}


def test_a_small_file_that_unfolds_to_millions_stays_small():
    tree: object = [1.0]
    for _ in range(40):
        tree = [tree, tree]
    values = JsonValues()
    assert len(json.dumps(values.of(tree))) < 200_000
    assert values.left_out > 0
    assert len(value_text(tree)) <= 80
