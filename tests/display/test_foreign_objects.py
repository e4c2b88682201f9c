"""Objects of classes that nobody here has: their plain fields are shown, as text, as JSON and in Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.display.record_json import JsonValues
from ckptools.inspect.sections import section_details
from ckptools.model.tree import Opaque
from tests.display.made import checkpoint
from tests.truth import FIXTURES

FILE = FIXTURES / "foreign-objects" / "objects.pt"

FIELDS = {
    "args.hidden_size": 4096,
    "args.lr": 0.5,
    "args.sub.deep": True,
    "config.lr": 3e-4,
    "config.layers": [1, 2],
    "config.nested.depth": 12,
    "frozen.0": 8,
    "phase": "<__main__.Phase('warmup')>",
    "level": "<__main__.Level(3)>",
    "point": "<__main__.Point(1, 2)>",
    "registry.adam": 1,
    "registry.default": "adam",
    "loop.me": "<__main__.Loop>",
    "loop.epoch": 4,
    "act.2.min": 0.0,
    "out": "<pathlib.PurePosixPath('/runs/7')>",
    "numpy.int": -7,
    "numpy.flag": True,
    "numpy.text": "héllo",
    "numpy.half": 1.5,
    "cfg.lr": 0.1,
    "cfg.opt.name": "adam",
    "cfg.opt.betas.1": 0.95,
    "cfg.ref": "${lr}",
    "scheduler.args.warmup": 100,
}


def inspect(*options: str) -> str:
    done = CliRunner().invoke(app, ["inspect", str(FILE), *options])
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def listed() -> dict[str, Any]:
    made = [json.loads(inspect("--section", kind, "--json")) for kind in ("other", "scheduler")]
    rows = [(d["name"], v) for one in made for d in one["details"] for v in d["values"]]
    return {".".join(filter(None, (section, row["key"]))): row["value"] for section, row in rows}


@pytest.mark.parametrize("key", FIELDS)
def test_a_field_is_a_row_of_json(listed, key):
    assert listed[key] == FIELDS[key] and type(listed[key]) is type(FIELDS[key])


def test_fields_are_rows_of_text():
    lines = [line.split() for line in inspect("--section", "other").splitlines()]
    assert ["args.hidden_size", "4096"] in lines and ["cfg.opt.name", "'adam'"] in lines
    assert not any("_metadata" in word or "_parent" in word for line in lines for word in line)


def test_an_object_inside_of_a_scheduler_has_its_fields_in_json():
    (scheduler,) = json.loads(inspect("--json"))["schedulers"]
    assert scheduler["state"]["args"] == {"class": "argparse.Namespace", "fields": {"warmup": 100}}


def test_python_gives_the_fields_and_a_line():
    raw = ckptools.open(FILE).raw
    assert raw["args"].fields["hidden_size"] == 4096
    assert repr(raw["config"]) == "Opaque('__main__.TrainConfig', lr=0.0003, layers=<tuple>, nested=<dict>)"
    assert repr(raw["loop"]) == "Opaque('__main__.Loop', me=<__main__.Loop>, epoch=4)"
    assert raw["cfg"].fields["opt"].fields["betas"].fields == {0: 0.9, 1: 0.95}
    assert repr(raw["point"]) == "Opaque('__main__.Point', 1, 2)"


# -- forged -------------------------------------------------------------------------------------------------------


def nested(depth: int, leaf: Any = 1) -> Opaque:
    for _ in range(depth):
        outer = Opaque("pkg.Box")
        outer.state = {"inside": leaf}
        leaf = outer
    return leaf


def deep_dict(depth: int) -> Opaque:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return nested(1, value)


def loop() -> Opaque:
    one = Opaque("pkg.Loop")
    one.state = {"me": one, "list": [one, one], "dict": {"x": one}}
    return one


ODD: dict[str, Callable[[], Opaque]] = {
    "an object in itself": loop,
    "objects 20 000 levels deep": lambda: nested(20_000),
    "dicts 20 000 levels deep in an object": lambda: deep_dict(20_000),
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_what_has_no_end_is_shown_as_far_as_it_is_of_use(make):
    odd = make()
    ck = checkpoint({"args": odd, "scheduler": {"last_epoch": 1, "args": odd}})
    for name in ("args", "scheduler"):
        (detail,) = section_details(ck, name)
        assert 0 < len(detail.values) <= 10_000
    made = JsonValues()
    assert json.dumps(made.of({"scheduler": odd}))
    assert len(repr(odd)) < 500


@pytest.mark.parametrize("state", [None, 5, "x", [1, 2], (1, 2, 3), ({"a": 1}, {"b": 2}), (None, {"b": 2}), {}])
@pytest.mark.parametrize("args", [(), (1,), ([], {}), None])
@pytest.mark.parametrize("items", [[], [1, 2], [("k", 1)], [(1, 2, 3)]])
def test_whatever_a_file_says_of_an_object_has_words(state, args, items):
    odd = Opaque("pkg.Odd", args)
    odd.state, odd.items = state, items
    assert repr(odd).startswith("Opaque('pkg.Odd'") and isinstance(odd.fields, dict)
    (detail,) = section_details(checkpoint({"args": odd, "model": {}}), "args")
    assert detail.values[0].path == ()


def test_attributes_in_slots_are_fields_too():
    odd = Opaque("pkg.Odd")
    odd.state = ({"a": 1}, {"b": 2})
    assert odd.fields == {"a": 1, "b": 2}
