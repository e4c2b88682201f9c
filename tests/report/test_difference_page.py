"""The page of two checkpoints: what `diff` says of them, and its JSON."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import ckptools
from ckptools.cli import app
from tests.cli.test_json_schemas import problems
from tests.display.test_html import Reader
from tests.display.test_report_page import TRAPS, answers_in, shown
from tools.browser import needs_browser, overflow_of


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture
def steps(tmp_path: Path) -> tuple[Path, Path]:
    """Steps 2 and 4 of a run, each of one file, in folders of their own."""
    made = []
    for step in (2, 4):
        path = tmp_path / f"run-{step}" / f"step-{step}.pt"
        path.parent.mkdir()
        model = {"layers.0.w": torch.full((3,), float(step)), "b": torch.ones(2)}
        torch.save({"model": model, "step": step, TRAPS[0]: TRAPS[3] + str(step)}, path)
        made.append(path)
    return made[0], made[1]


def test_two_checkpoints_are_a_page_of_what_differs(steps, tmp_path):
    done = report(*steps, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert done.exit_code == 1 and done.stdout.splitlines()[-1] == f"wrote {tmp_path / 'page.html'}"
    assert done.stdout.splitlines()[0] in shown(page)
    answer = answers_in(page)["diff"]
    assert problems("diff", answer) == [] and (answer["same"], answer["a"]["step"], answer["b"]["step"]) == (
        False,
        2,
        4,
    )
    assert "<h1>step-2 and step-4" in page
    assert f"made by <code>ckptools report {steps[0]} {steps[1]} -o page.html</code>" in page


def test_values_are_compared_and_drawn_if_that_is_asked_for(steps, tmp_path):
    report(*steps, "-o", tmp_path / "page.html", "--values")
    page = (tmp_path / "page.html").read_text()
    assert answers_in(page)["diff"]["values_compared"] and "change of weights from step-2 to step-4" in page


def test_a_checkpoint_and_itself_are_the_same_and_exit_code_0(steps, tmp_path):
    done = report(steps[0], steps[0], "-o", tmp_path / "page.html", "--values")
    assert done.exit_code == 0 and done.stdout.startswith("nothing that was compared differs; ")


def test_two_folders_are_compared_at_a_step(steps, tmp_path):
    shutil.copy(steps[1], steps[0].parent)
    done = report(steps[0].parent, steps[1].parent, "--step", 4, "-o", tmp_path / "page.html", "--values")
    assert done.exit_code == 0
    assert answers_in((tmp_path / "page.html").read_text())["diff"]["a"]["step"] == 4


def test_two_rank_files_of_one_save_are_one_checkpoint_and_of_two_saves_are_compared(tmp_path):
    for step in (2, 4):
        for rank in range(2):
            state = {"model": {"w": torch.full((3,), float(step))}, "step": step, "seed": rank}
            torch.save(state, tmp_path / f"ep0-ba{step}-rank{rank}.pt")
    one = [tmp_path / f"ep0-ba2-rank{rank}.pt" for rank in range(2)]
    two = [tmp_path / f"ep0-ba{step}-rank0.pt" for step in (2, 4)]
    report(*one, "-o", tmp_path / "one.html")
    report(*two, "-o", tmp_path / "two.html")
    assert list(answers_in((tmp_path / "one.html").read_text())) == ["inspect", "verify"]
    assert list(answers_in((tmp_path / "two.html").read_text())) == ["diff"]


@pytest.mark.parametrize("option", ["--deep", "--interactive", "--ignore=CK206"])
def test_what_goes_with_one_checkpoint_is_refused_for_two(steps, tmp_path, option):
    done = report(*steps, "-o", tmp_path / "page.html", option)
    assert done.exit_code == 2 and "two are compared" in done.stderr and not (tmp_path / "page.html").exists()


def test_what_cannot_be_opened_is_an_error_and_no_page_is_written(steps, tmp_path):
    done = report(steps[0], tmp_path / "nowhere", "-o", tmp_path / "page.html")
    assert done.exit_code == 3 and not (tmp_path / "page.html").exists()


def test_python_writes_the_same_page(steps, tmp_path):
    found = ckptools.diff(*steps)
    assert found.report(tmp_path / "page.html") == tmp_path / "page.html"
    with pytest.raises(ckptools.CkptoolsError, match="force=True overwrites it"):
        found.report(tmp_path / "page.html")


def test_names_are_text_on_the_page(steps, tmp_path):
    report(*steps, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "img" not in Reader(page.replace("<!doctype html>", "")).tags and page.count("<script") == 1


@needs_browser
@pytest.mark.slow
def test_the_page_is_no_wider_than_a_window(steps, tmp_path):
    report(*steps, "-o", tmp_path / "page.html", "--values")
    page = (tmp_path / "page.html").read_text()
    assert [overflow_of(page, tmp_path, width) for width in (500, 1200)] == [0, 0]
