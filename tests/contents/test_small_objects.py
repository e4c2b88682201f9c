"""Values that are objects of a few plain parts, sets, and tensors without dimensions: shown by what they are."""

from __future__ import annotations

import decimal
import enum
import fractions
import pathlib
from collections import namedtuple

import pytest
import torch
from typer.testing import CliRunner

from ckptools.cli import app


class Phase(enum.Enum):
    TRAIN = "train"


Point = namedtuple("Point", "x y")
VALUES = {
    "phase": (Phase.TRAIN, f"{__name__}.Phase('train')"),
    "path": (pathlib.PosixPath("/data/run 7"), "pathlib.PosixPath('/data/run 7')"),
    "relative": (pathlib.PurePosixPath("a/b"), "pathlib.PurePosixPath('a/b')"),
    "tags": ({"b", "a"}, "{'a', 'b'}"),
    "sizes": (frozenset([2, 1]), "{1, 2}"),
    "many": (set(range(8)), "{0, 1, 2, 3, 4, 5, 2 more}"),
    "none": (set(), "0 values"),
    "on windows": (pathlib.PureWindowsPath("C:/a"), "pathlib.PureWindowsPath('C:\\\\', 'a')"),
    "point": (Point(1, 2.5), f"{__name__}.Point(1, 2.5)"),
    "price": (decimal.Decimal("1.25"), "decimal.Decimal('1.25')"),
    "third": (fractions.Fraction(1, 3), "fractions.Fraction(1, 3)"),
    "phasor": (1 + 2j, "(1+2j)"),
}
NUMBERS = {
    "loss": (torch.tensor(3.5), "value 3.5"),
    "seen": (torch.tensor(123456789012), "value 123456789012"),
    "done": (torch.tensor(True), "value True"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "x.pt"
    torch.save({name: value for name, (value, _) in {**VALUES, **NUMBERS}.items()}, path)
    return path


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, (_, text) in VALUES.items()])
def test_show_spells_a_small_object(name, text, path):
    assert CliRunner().invoke(app, ["show", str(path), name]).stdout == f"{name}  {text}\n"


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, (_, line) in NUMBERS.items()])
def test_show_spells_the_number_of_a_tensor_without_dimensions(name, line, path):
    assert CliRunner().invoke(app, ["show", str(path), name]).stdout.splitlines()[1] == line
