"""Whatever one leaf of a checkpoint is, and wherever it lies: diff sees that it changed, or says that it cannot."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.diff.record import DIFFERENT
from tests.diff.values import KINDS
from tests.thorough import examples

PLACES = {
    "by itself": lambda x: {"x": x},
    "in dicts": lambda x: {"extra": {"a": {"b": x}, "c": 1}},
    "in a list": lambda x: {"extra": ["a", {"b": 1}, x]},
    "in a tuple": lambda x: {"extra": (1, [2, (x,)])},
    "in the model": lambda x: {"model": {"w": torch.ones(1), "x": x}},
    "in a model of several tensors": lambda x: {"model": {**{n: torch.ones(1) for n in "abcd"}, "x": x}},
    "in the optimizer": lambda x: {
        "optimizer": {"state": {0: {"exp_avg": torch.ones(1), "x": x}}, "param_groups": [{"params": [0], "lr": 0.1}]}
    },
    "in a param group": lambda x: {
        "optimizer": {"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": [{"params": [0], "lr": 0.1, "x": x}]}
    },
    "in a scheduler": lambda x: {"scheduler": {"last_epoch": 3, "x": x}},
    "among random states": lambda x: {"rng": {"torch": torch.arange(9, dtype=torch.uint8), "seed": 5, "x": x}},
}
"""Where a value lies in a checkpoint."""

kinds, places, protocols = st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(PLACES)), st.integers(2, 5)


def saved(path: Any, kind: str, v: int, place: str, protocol: int = 2) -> Any:
    tree = {"model": {"w": torch.ones(1)}, "step": 7, **PLACES[place](KINDS[kind](v))}
    torch.save(tree, path, pickle_protocol=protocol)
    return path


@settings(max_examples=examples(600), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds, places, protocols)
def test_a_leaf_that_changed_differs_or_is_named_as_not_compared(tmp_path, kind, place, protocol):
    a, b = (saved(tmp_path / f"{v}.pt", kind, v, place, protocol) for v in (0, 1))
    found = ckptools.diff(a, b, values=True)
    rows = [row for row in found.rows if row.verdict in DIFFERENT]
    assert found.same is False and rows
    for row in rows:
        shown = row.detail or row.verdict.startswith("only") or row.value_a != row.value_b
        assert shown, f"{row} shows both alike"


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds, places, protocols)
def test_a_leaf_that_was_saved_again_by_any_protocol_is_the_same(tmp_path, kind, place, protocol):
    a, b = (saved(tmp_path / f"{n}.pt", kind, 0, place, n or 2) for n in (0, protocol))
    found = ckptools.diff(a, b, every_byte=True)
    unlike = [row for row in found.rows if row.verdict != "same"]
    assert all(row.verdict == "cannot be compared" and row.detail for row in unlike)
    assert (found.same is True) is not bool(unlike)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds, places, st.integers(0, 1))
def test_the_exit_code_is_1_for_a_leaf_that_changed_and_0_for_one_saved_again(tmp_path, kind, place, v):
    a, b = (saved(tmp_path / name, kind, value, place) for name, value in (("a.pt", 0), ("b.pt", v)))
    found = ckptools.diff(a, b, every_byte=True)
    done = CliRunner().invoke(app, ["diff", "--every-byte", str(a), str(b)])
    assert done.exit_code == (0 if found.same else 1), done.output
    unread = any(row.verdict == "cannot be compared" for row in found.rows)
    assert done.exit_code == 1 if v or unread else done.exit_code == 0
