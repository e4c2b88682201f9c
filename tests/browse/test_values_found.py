"""NaN found in values that were read: the verdict, the key, its parents, its rank and the details say so, and go on."""

from __future__ import annotations

import shutil

import pytest
import torch

from ckptools.training.damage import apply
from tests.browse.driven import Driven, drive
from tests.truth import FIXTURES

NAN = float("nan")


@pytest.fixture
def run(tmp_path):
    """A checkpoint of one file with one NaN and one infinity, in two tensors of a block."""
    values = {f"blocks.{n}.w": torch.ones(4, 3) * n for n in range(3)}
    values["blocks.1.w"][2, 1] = NAN
    values["blocks.2.w"][0, 0] = float("inf")
    torch.save({"state": {"model": {**values, "head.weight": torch.ones(3, 3)}}}, tmp_path / "ep0-ba1-rank0.pt")
    return tmp_path / "ep0-ba1-rank0.pt"


def marks(driven: Driven, part: str) -> list[str]:
    """The marks of the rows that contain a text."""
    lines = [driven.app.left.source.line(n, 60) for n in range(len(driven.app.left.source))]
    return [mark for line in lines for text, mark in line if part in text]


@pytest.mark.parametrize(
    "keys", [["f"], ["slash", *"blocks.1", "enter", "enter"], ["slash", *"blocks.1", "enter", "e", "enter"]]
)
def test_it_is_said_wherever_values_were_read(run, keys):
    async def script(driven: Driven):
        await driven.press("2")
        assert "NaN" not in driven.text("title")
        for key in keys:
            await driven.pilot.press(key)
        await driven.settled()
        assert "NaN or infinity: blocks.1.w" in driven.text("title") and "bad" in driven.app.query_one("#title").classes

    drive(run, script)


def test_the_key_its_parents_and_the_details_say_so_in_red_and_it_stays(run):
    async def script(driven: Driven):
        await driven.press("2", "f")
        assert "bad" in driven.app.query_one("#title").classes
        assert "NaN  blocks.1.w" in driven.rows("right")
        await driven.press("l", "j", "l", "j")
        assert marks(driven, "NaN in 2") == ["bad"] * 2 and "bad" in marks(driven, "blocks.1.w")
        assert marks(driven, "blocks.0.w") == [""]
        await driven.press("1")
        assert any("CK201" in row and "blocks.1.w" in row for row in driven.rows())
        assert any(row.startswith("next: ckptools stats ") for row in driven.rows())
        driven.app.left.go(0)
        await driven.press("enter")
        assert driven.row.split()[0] == "blocks.1.w"
        assert " ".join(" ".join(driven.rows("right")).split()).startswith("CK201 rank 0: 1 NaN, first at [2, 1] rms ")
        row = driven.app.right.source.line(0, 40)
        assert any(mark == "bad" for _, mark in row)
        await driven.press("3", "2", "1")
        assert "NaN or infinity" in driven.text("title")

    drive(run, script)


def test_values_that_are_finite_change_nothing(run):
    async def script(driven: Driven):
        before = driven.text("title")
        await driven.press("slash", *"head", "enter", "f")
        assert driven.text("title") == before and marks(driven, "head.weight") == [""]

    drive(run, script)


def test_the_rank_that_has_it_is_coloured(tmp_path):
    folder = shutil.copytree(FIXTURES / "torch2.13.0-fsdp1-sharded-w4", tmp_path / "run")
    (broken,) = apply(folder, "nan:1", 1, {})

    async def script(driven: Driven):
        assert "good" in driven.app.query_one("#title").classes
        await driven.press("2", "f")
        for key in ("o", "o", "p", "3"):
            await driven.press(key)
        assert driven.rows("right")[0].startswith("rank 1: NaN, infinity or zeros")
        assert any("CK201" in row for row in driven.rows("right"))
        assert "NaN or infinity" in driven.text("title")

    assert "CK201" in broken.shown
    drive(folder, script)
