"""The page of a run: every checkpoint with its verdict, what it records, and a way to it; names from files are text."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import ckptools
from ckptools.cli import app
from ckptools.formats.open import open_checkpoint
from ckptools.report import run as run_room
from ckptools.report.run import findings, recorded_values, run_page
from tests.cli.test_json_schemas import problems
from tests.display.test_html import Reader
from tests.display.test_report_page import TRAPS, answers_in, shown
from tests.truth import FIXTURES
from tools.browser import elements_of, needs_browser, overflow_of


def save(path: Path, step: int, rank: int = 0, **more: object) -> None:
    model = {"w": torch.full((3,), float(step))}
    torch.save({"model": model, "step": step, "loss": 8.0 / step, "seed": rank, **more}, path)
    os.utime(path, (1.7e9 + step, 1.7e9 + step))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 2, 4, 6 and 8 of two ranks: of 6 rank 1 is cut short, of 8 both; and what an interrupted write left."""
    run = tmp_path / "run"
    run.mkdir()
    for step in (2, 4, 6, 8):
        for rank in range(2):
            save(run / f"ep0-ba{step}-rank{rank}.pt", step, rank)
    for name in ("ep0-ba6-rank1.pt", "ep0-ba8-rank0.pt", "ep0-ba8-rank1.pt"):
        os.truncate(run / name, 500)
        os.utime(run / name, (1.7e9 + int(name[6]), 1.7e9 + int(name[6])))
    (run / "ep0-ba10-rank0.pt.tmp").write_bytes(b"PK")
    return run


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def page_of(folder: Path) -> str:
    return run_page(findings(folder, {}))


def cells(page: str) -> list[str]:
    """The texts of the timeline."""
    timeline = page.partition('<div class="steps">')[2].partition("</div></section>")[0]
    inside = re.findall(r'<(?:a|div) class="step [^>]*>(.*?)</(?:a|div)>', timeline)
    return [" ".join(re.findall(r">([^<]+)<", cell)) for cell in inside]


def part(page: str, step: int) -> str:
    """What a reader sees in the part of a checkpoint."""
    return next(found for found in re.split(r'<details class="of-one"', page)[1:] if f"<h2>step {step}, " in found)


def test_the_timeline_has_every_checkpoint_and_what_is_unfinished(folder):
    found = cells(page_of(folder))
    states = ["whole", "whole &#183; newest", "NOT WHOLE", "cannot be opened"]
    assert [cell.rsplit(" ", 2)[0] for cell in found[:4]] == [
        f"step {step} {state}" for step, state in zip((2, 4, 6, 8), states, strict=True)
    ]
    assert found[4].startswith("unfinished ep0-ba10-rank0.pt.tmp")


def test_the_page_says_how_it_was_made(folder):
    assert f"made by <code>ckptools report {folder} -o report.html</code>" in page_of(folder)
    deep = run_page(findings(folder, {}, deep=True, ignore=("CK002",)), "page.html")
    assert f"<code>ckptools report {folder} -o page.html --deep --ignore CK002</code>" in deep


def test_each_step_leads_to_its_part(folder):
    page = page_of(folder)
    links = re.findall(r'<a class="step [^"]*" href="#([^"]+)"', page)
    assert len(links) == 4 and all(page.count(f'id="{link}"') == 1 for link in links)
    assert all(page.count(f'id="{link}"') for link in re.findall(r'href="#([^"]+)"', page))


def test_a_part_says_what_is_wrong_what_is_in_it_and_what_to_type(folder):
    page = page_of(folder)
    broken, sound, gone = part(page, 6), part(page, 4), part(page, 8)
    assert "NOT WHOLE: rank 1 cut short or damaged" in broken and "CK002" in broken and " open>" in broken[:60]
    assert f"ckptools consolidate {folder / 'ep0-ba4-rank0.pt'} -o OUT.safetensors" in sound
    assert "<h3>what is in it</h3>" in sound and "fp32" in sound
    assert "cannot be opened: " in gone and "is cut short" in gone
    assert f"ckptools doctor {folder / 'ep0-ba8-rank0.pt'}" in gone and "what is in it" not in gone
    assert " open>" not in part(page, 2)[:60]


def test_the_first_screen_names_the_newest_whole_one_and_what_is_wrong(folder):
    (folder / "last_checkpoint").write_text("ep0-ba6-rank0.pt")
    band = page_of(folder).partition('<div class="band is-warn">')[2].partition("</div></div>")[0]
    assert "4 checkpoints in" in band and "newest whole: step 4, ep0-ba4-rank0.pt" in band
    assert "2 checkpoints with errors: step 8, ep0-ba8-rank0.pt; step 6, ep0-ba6-rank0.pt" in band
    assert "last_checkpoint: CK016 names ep0-ba6-rank0.pt, which is not whole" in band
    assert "left over from a write, or still being written: ep0-ba10-rank0.pt.tmp" in band
    assert f"next: <code>ckptools inspect {folder / 'ep0-ba4-rank0.pt'}</code>" in band


def test_a_run_without_a_whole_checkpoint_is_red_and_a_sound_one_green(folder):
    assert 'class="band is-warn"' in page_of(folder)
    for step in (2, 4):
        os.truncate(folder / f"ep0-ba{step}-rank0.pt", 500)
    assert 'class="band is-bad"' in page_of(folder) and "NONE IS WHOLE" in page_of(folder)
    for file in folder.iterdir():
        file.unlink()
    for step in (2, 4):
        save(folder / f"step-{step}.pt", step)
    assert 'class="band is-good"' in page_of(folder)


def test_the_json_of_the_page_is_that_of_ls_with_every_checkpoint_verified(folder):
    answer = answers_in(page_of(folder))["ls"]
    assert problems("ls", answer) == [] and answer["newest_whole"].endswith("ep0-ba4-rank0.pt")
    assert {row["name"]: row["looked_into"] for row in answer["rows"]}["ep0-ba2-rank0.pt"] == "verify"


def test_one_rank_file_is_not_called_whole_beside_checkpoints_of_two_ranks(folder):
    (folder / "ep0-ba2-rank1.pt").unlink()
    page = page_of(folder)
    assert cells(page)[0].startswith("step 2 not proven whole") and "another checkpoint has 2 ranks" in part(page, 2)


def test_two_checkpoints_of_one_step_both_have_a_part(folder):
    for rank in range(2):
        shutil.copy(folder / f"ep0-ba4-rank{rank}.pt", folder / f"critic-ep0-ba4-rank{rank}.pt")
    page = page_of(folder)
    assert "<h2>step 4, ep0-ba4-rank0.pt</h2>" in page and "<h2>step 4, critic-ep0-ba4-rank0.pt</h2>" in page


def test_a_save_whose_last_file_was_never_written_is_unfinished(tmp_path):
    shutil.copytree(FIXTURES / "torchtitan-fsdp-tp" / "ckpt", tmp_path / "run")
    (tmp_path / "run" / "step-6" / ".metadata").unlink()
    page = page_of(tmp_path / "run")
    assert cells(page)[1].startswith("step 6 unfinished ") and "the save has not ended" in part(page, 6)


def test_a_long_run_has_parts_of_its_newest_checkpoints_and_of_those_with_errors(folder, monkeypatch):
    monkeypatch.setattr(run_room, "MAX_PARTS", 1)
    os.truncate(folder / "ep0-ba2-rank1.pt", 500)
    page = page_of(folder)
    assert len(cells(page)) == 5 and re.findall("<h2>step (.), ", page) == ["8", "6", "2"]
    assert "the newest 1, and those with errors; 1 other in the table" in page


@pytest.mark.slow
def test_what_verify_alone_finds_is_on_the_page(folder):
    for rank in range(2):  # both copies alike, so that only their checksums tell
        damaged = folder / f"ep0-ba4-rank{rank}.pt"
        content = bytearray(damaged.read_bytes())
        content[content.index(torch.full((3,), 4.0).numpy().tobytes())] ^= 8
        damaged.write_bytes(content)
    deep = run_page(findings(folder, {}, deep=True))
    assert "newest whole: step 4" in page_of(folder) and "newest whole: step 2" in deep and "CK004" in part(deep, 4)


# -- recorded losses ---------------------------------------------------------------------------------------------------


def test_a_recorded_loss_has_a_column_and_a_picture(folder):
    page = page_of(folder)
    assert "loss by step" in page and '<td class="n" data-t="loss">4</td>' in page
    assert "ep0-ba2-rank0.pt: step 2, 4\n" in page and "ep0-ba4-rank0.pt: step 4, 2\n" in page


def test_where_no_loss_is_recorded_there_is_none(tmp_path):
    for step in (2, 4):
        torch.save({"model": {"loss": torch.ones(3)}, "step": step}, tmp_path / f"step-{step}.pt")
    page = page_of(tmp_path)
    assert "loss by step" not in page and 'data-t="loss"' not in page


@pytest.mark.parametrize("kept", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_shown_and_not_drawn(folder, kept):
    for rank in range(2):
        save(folder / f"ep0-ba4-rank{rank}.pt", 4, rank, loss=kept)
        save(folder / f"ep0-ba6-rank{rank}.pt", 6, rank)
    page = page_of(folder)
    assert f'data-t="loss">{kept}</td>' in page and f"not drawn: ep0-ba4-rank0.pt: {kept}" in page


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ({"loss": 1.5}, {"loss": 1.5}),
        ({"train": {"eval_loss": 2, "grad_norm": 0.5}}, {"train.eval_loss": 2.0, "train.grad_norm": 0.5}),
        ({"args": {"max_grad_norm": 1.0, "loss_scale": 512.0, "loss_type": "l2", "lossy": 3.0}}, {}),
        ({"loss": True, "val_loss": "3", "best_loss": None, "test_loss": torch.ones(())}, {}),
        ({"log_history": [{"loss": 3.0, "step": 2}, {"loss": 2.0, "step": 4}]}, {"log_history.loss": 2.0}),
        ({"log_history": [{"loss": 3.0, "step": 2}]}, {}),
        ({"history": [{"loss": 3.0}, {"loss": 2.0}]}, {}),
    ],
    ids=str,
)
def test_a_loss_is_a_number_that_the_training_measured_at_this_step(tmp_path, tree, found):
    torch.save({"model": {"w": torch.ones(2)}, "step": 4, **tree}, tmp_path / "step-4.pt")
    assert recorded_values(open_checkpoint(tmp_path / "step-4.pt")) == found


def test_a_loss_that_differs_between_ranks_is_named_after_its_rank(tmp_path):
    for rank in range(2):
        torch.save({"model": {"w": torch.ones(2)}, "step": 4, "loss": 1.0 + rank}, tmp_path / f"rank{rank}.pt")
    found = recorded_values(open_checkpoint(tmp_path / "rank0.pt", all_ranks=True))
    assert set(found) <= {"loss of rank 0", "loss"} and set(found.values()) == {1.0}


def test_a_fixture_that_records_a_loss_shows_it():
    assert recorded_values(ckptools.open(FIXTURES / "nemo-automodel-fsdp2" / "ckpt")) == {"losses.train_loss": 1.25}


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_of_a_run(folder, tmp_path):
    done = report(folder, "-o", tmp_path / "page.html")
    assert done.exit_code == 1 and done.stdout.splitlines() == [
        f"4 checkpoints in {folder}; newest whole: step 4, ep0-ba4-rank0.pt",
        "2 checkpoints with errors: step 8, ep0-ba8-rank0.pt; step 6, ep0-ba6-rank0.pt",
        f"wrote {tmp_path / 'page.html'}",
    ]
    assert list(answers_in((tmp_path / "page.html").read_text())) == ["ls"]


def test_the_page_of_one_step_is_that_of_a_checkpoint(folder, tmp_path):
    assert report(folder, "--step", 4, "-o", tmp_path / "page.html").exit_code == 0
    assert answers_in((tmp_path / "page.html").read_text())["inspect"]["step"]["value"] == 4


def test_a_run_with_a_tracker_is_a_page_of_the_run_and_one_checkpoint_a_page_of_one(folder, tmp_path):
    (folder / "last_checkpoint").write_text("ep0-ba4-rank0.pt")
    report(folder, "-o", tmp_path / "run.html")
    assert list(answers_in((tmp_path / "run.html").read_text())) == ["ls"]
    alone = tmp_path / "alone"
    alone.mkdir()
    save(alone / "step-2.pt", 2)
    report(alone, "-o", tmp_path / "alone.html")
    assert list(answers_in((tmp_path / "alone.html").read_text())) == ["inspect", "verify"]


def test_a_sound_run_is_exit_code_0_and_standard_output_gets_the_page_alone(folder):
    for file in folder.glob("ep0-ba[68]*"):
        file.unlink()
    done = report(folder, "-o", "-")
    assert done.exit_code == 0 and done.stdout.startswith("<!doctype html>") and done.stdout.endswith("</html>\n")
    assert "newest whole: step 4" in done.stderr


@pytest.mark.parametrize("option", [["--interactive"], ["--manifest", "x.json"]], ids=str)
def test_what_goes_with_one_checkpoint_is_refused_for_a_run(folder, tmp_path, option):
    done = report(folder, "-o", tmp_path / "page.html", *option)
    assert done.exit_code == 2 and f"ckptools report {folder} --step N" in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_file_of_a_checkpoint_is_not_overwritten_whatever_it_is_called(folder):
    page = folder / "step-9.html"
    save(page, 9)
    done = report(folder, "-o", page, "--force")
    assert done.exit_code == 4 and "is a file of a checkpoint of this run" in done.stderr
    assert ckptools.open(page).step == 9


def test_a_page_that_is_there_stays_unless_it_is_forced(folder, tmp_path):
    (tmp_path / "page.html").write_text("of yesterday")
    assert report(folder, "-o", tmp_path / "page.html").exit_code == 4
    assert (tmp_path / "page.html").read_text() == "of yesterday"


def test_python_writes_the_same_page(folder, tmp_path):
    assert ckptools.checkpoints_in(folder).report(tmp_path / "page.html") == tmp_path / "page.html"
    report(folder, "-o", tmp_path / "too.html")
    one, other = (answers_in((tmp_path / name).read_text())["ls"] for name in ("page.html", "too.html"))
    facts = [[(row["name"], row["verdict"], row["codes"]) for row in answer["rows"]] for answer in (one, other)]
    assert facts[0] == facts[1] and one["newest_whole"] == other["newest_whole"]
    with pytest.raises(ckptools.CkptoolsError, match="force=True overwrites it"):
        ckptools.checkpoints_in(folder).report(tmp_path / "page.html")


# -- in a browser, and with names that would break it ------------------------------------------------------------------


def hostile(folder: Path) -> Path:
    """A run whose names are markup, as far as a file system allows them."""
    for step in (2, 4):
        name = f"<img src=x onerror=document.title=1>&step-{step}.pt"
        save(folder / name, step, **{TRAPS[0]: {"loss": 1.0}, "log": {TRAPS[3]: 3}})
    os.truncate(folder / name, 300)
    (folder / "<b>.tmp").write_bytes(b"x")
    return folder


def test_names_are_text_on_the_page(tmp_path):
    page = page_of(hostile(tmp_path))
    tags = Reader(page.replace("<!doctype html>", "")).tags
    assert page.isascii() and "img" not in tags and tags.count("script") == 1
    assert "<img src=x onerror=document.title=1>&step-2.pt" in shown(page)


@needs_browser
@pytest.mark.slow
def test_the_page_is_no_wider_than_a_window_and_nothing_on_it_runs(folder, tmp_path):
    hostile(folder)
    page = page_of(folder)
    assert [overflow_of(page, tmp_path, width) for width in (500, 1200)] == [0, 0]
    (tmp_path / "page.html").write_text(page)
    assert "<title>run: 6 checkpoints, newest whole: step 4</title>" in elements_of(tmp_path / "page.html")
