"""Answers as JSON."""

from __future__ import annotations

import json
from math import inf, nan
from typing import Any, NamedTuple

from ckptools.display.record_json import answer_json, json_lines
from ckptools.model.records import Rows


class Told(NamedTuple):
    """Some field of any kind."""

    value: Any


def test_a_nan_is_null_wherever_it_is_and_what_stands_beside_it_is_as_it_was():
    values = [1.5, nan, [1, inf, {"lr": -inf, "eps": 1e-8}], "nan", None, True]
    null = [1.5, None, [1, None, {"lr": None, "eps": 1e-8}], "nan", None, True]
    assert [json.loads(line)["value"] for line in json_lines(Rows(map(Told, values)))] == null
    assert json.loads(answer_json("tree", Told(values))) == {"schema": "ckptools/tree/1", "value": null}


def test_a_row_is_one_line_and_an_answer_is_indented():
    assert list(json_lines(Rows([Told((1, "a\nb"))]))) == ['{"value": [1, "a\\nb"]}']
    assert answer_json("tree", Told(1)).splitlines() == ["{", ' "schema": "ckptools/tree/1",', ' "value": 1', "}"]
