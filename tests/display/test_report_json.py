from __future__ import annotations

import json
from typing import Any

import pytest

from ckptools.inspect.record import inspect_report
from ckptools.inspect.sections import SCHEMA, report_json, section_details
from tests.display.made import (
    ESCAPE,
    FORGED,
    broken_run7,
    checkpoint,
    group,
    hostile,
    plain,
    run7,
    snapshot,
    unread_run7,
)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def parsed(ck: Any, section: str | None = None) -> dict[str, Any]:
    text = report_json(inspect_report(ck), section_details(ck, section) if section else ())
    assert text.isascii()
    made: dict[str, Any] = json.loads(text, parse_constant=refuse)
    assert made["schema"] == SCHEMA
    return made


def test_only_ranks_that_are_not_whole_are_listed():
    ranks = parsed(broken_run7())["ranks"]
    assert [(r["rank"], r["status"]) for r in ranks] == [
        (137, "truncated"), (201, "missing"), (202, "missing"), (203, "missing")
    ]  # fmt: skip


def test_all_ranks_are_listed_when_all_were_read():
    assert len(parsed(run7())["ranks"]) == 256 and parsed(unread_run7())["ranks"] == []


def test_numbers_that_json_lacks_are_null_and_counted():
    groups = [{**group(float("nan"), 0.0, []), "clip": float("inf"), "big": 1 << 70}]
    made = parsed(checkpoint({"o": {"state": {}, "param_groups": groups}}))
    (one,) = made["optimizers"][0]["param_groups"]
    assert (one["lr"], one["clip"], one["big"], made["nonfinite"]) == (None, None, 1 << 70, 2)


def test_every_hyperparameter_is_there():
    (one,) = parsed(snapshot())["optimizers"][0]["param_groups"]
    assert one == {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "amsgrad": False, "fused": None,
                   "params": 18, "tensors": 2}  # fmt: skip


def test_hostile_names_come_back_as_they_were():
    made = parsed(hostile(), "model")
    assert made["name"] == f"ck{ESCAPE}"
    assert FORGED in [s["name"] for s in made["sections"]]
    assert FORGED in [t["name"] for t in made["details"][0]["tensors"]]
    assert "\x1b" not in report_json(inspect_report(hostile()))


def test_keys_that_are_numbers_become_text():
    tree = {"s": {"last_epoch": 3, "milestones": {30: 1, 60: 1}}}
    assert parsed(checkpoint(tree))["schedulers"][0]["state"]["milestones"] == {"30": 1, "60": 1}


@pytest.mark.parametrize("kind", ["model", "optimizer", "scheduler", "rng", "other"])
def test_a_section_in_full_is_json_too(kind):
    (first, *_) = parsed(run7(), kind)["details"]
    assert first["kind"] == kind
    assert first["tensors"] or first["state"] or first["values"]


def test_a_half_of_a_surrogate_is_escaped():
    assert '"half\\ud800"' in report_json(inspect_report(checkpoint({"half\ud800": plain(2)}, name="half\ud800")))
