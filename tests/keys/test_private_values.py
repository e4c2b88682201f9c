"""Private values are shown only on request, by the same option everywhere, and what is left out is counted."""

from __future__ import annotations

import json
import re

import pytest
import torch
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.keys.entries import asks_for_private, is_private_value
from ckptools.model.tensor import Tensor
from tests.truth import FIXTURES

FSDP = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
LISTING = {
    "tree": ["tree"],
    "show": ["show", "scheduler"],
    "inspect": ["inspect"],
    "inspect --section": ["inspect", "--section", "scheduler"],
}


def run(words: list[str], *more: str):
    return CliRunner().invoke(app, [words[0], str(FSDP), *words[1:], *more])


@pytest.mark.slow
@pytest.mark.parametrize("command", LISTING)
def test_private_values_are_counted_and_shown_on_request(command):
    hidden, shown = run(LISTING[command]), run(LISTING[command], "--private")
    assert "_is_initial" not in hidden.stdout and "_last_lr" in hidden.stdout
    assert "private value" in hidden.output and "--private" in hidden.output
    assert "_is_initial" in shown.stdout and "--private" not in shown.output


@pytest.mark.slow
@pytest.mark.parametrize("words", [LISTING["tree"], LISTING["show"], LISTING["inspect --section"]])
def test_json_has_the_same_and_says_how_many_are_left_out(words):
    hidden, shown = (json.loads(run(words, "--json", *more).stdout) for more in ([], ["--private"]))
    hidden, shown = (found["details"][0] if "details" in found else found for found in (hidden, shown))
    rows = "values" if "values" in hidden else "rows"
    assert hidden["private"] == len(shown[rows]) - len(hidden[rows]) > 0 and shown["private"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["tree", "--filter", "*._is_*"], ["show", "scheduler._is_initial"], ["show", "*._is*"]]
)
def test_a_name_that_is_spelled_is_shown(words):
    done = run(words)
    assert "_is_initial" in done.stdout and "--private" not in done.output


def test_tensors_and_learning_rates_are_never_left_out():
    keys = ckptools.open(FSDP).records()
    every = ckptools.open(FSDP).records(private=True)
    left_out = {row.name for row in every.rows} - {row.name for row in keys.rows}
    assert len(left_out) == keys.private > 0 == every.private
    assert all(row.type != "tensor" and not row.name.endswith("_last_lr") for row in every.rows if row.name in left_out)


def test_a_private_value_that_differs_is_a_difference(tmp_path):
    for name, count in (("a", 3), ("b", 4)):
        torch.save({"sched": {"last_epoch": 3, "_step_count": count}, "model": {}}, tmp_path / f"{name}.pt")
    done = CliRunner().invoke(app, ["diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")])
    assert done.exit_code == 1 and re.search(r"_step_count +3 → 4", done.stdout)


@pytest.mark.parametrize(
    ("key", "asks"),
    [("a._b", True), ("*._b*", True), ("*_b", True), ("_b.c", True), ("a_b", False), ("a.b_", False), ("*", False)],
)
def test_a_key_asks_for_what_is_private_where_a_word_of_it_begins_so(key, asks):
    assert asks_for_private([key]) is asks


def test_neither_a_tensor_nor_anything_of_a_model_is_private_whatever_it_is_called():
    assert is_private_value("scheduler", "_step_count", 3)
    assert not is_private_value("model", "head._extra_state", 3)
    assert not is_private_value("other", "_buffer", Tensor((2,), "float32", ()))
