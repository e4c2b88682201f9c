"""What is written: a part of the checkpoint after its plan was shown, and the page of `report`."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ckptools.browse.session import JobStoppedError, Session
from tests.browse.driven import Driven, drive
from tests.truth import FIXTURES

RANKS = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"


async def typed(driven: Driven, text: str) -> None:
    await driven.clear()
    driven.app.screen.query_one("#line").insert_text_at_cursor(text)
    await driven.press("enter")


def test_what_is_selected_is_consolidated_after_its_plan_was_shown(tmp_path):
    out = tmp_path / "one.safetensors"

    async def script(driven: Driven):
        await driven.press("slash", *"blocks.0.up.w", "enter", "w")
        await typed(driven, str(out))
        assert all(word in driven.pictured() for word in ("would write", out.name)) and not out.exists()
        await driven.press("enter")
        assert driven.text("message").startswith(f"wrote {out}")

    drive(RANKS, script)
    assert list(load_file(out)) == ["blocks.0.up.weight"]


def test_a_plan_that_is_not_agreed_to_writes_nothing(tmp_path):
    async def script(driven: Driven):
        await driven.press("w")
        await typed(driven, str(tmp_path / "all.safetensors"))
        await driven.press("escape")

    drive(RANKS, script)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_said_in_the_line_of_messages(tmp_path):
    (tmp_path / "all.safetensors").write_text("mine")

    async def script(driven: Driven):
        await driven.press("w")
        await typed(driven, str(tmp_path / "all.safetensors"))
        assert driven.text("message").startswith("error: ") and len(driven.app.screen_stack) == 1

    drive(RANKS, script)
    assert (tmp_path / "all.safetensors").read_text() == "mine"


def test_what_is_no_part_of_the_model_is_not_consolidated():
    async def script(driven: Driven):
        await driven.press("2", "G", "w")
        assert "no part of the model" in driven.text("message")

    drive(RANKS, script)


@pytest.mark.slow
def test_s_saves_the_page_of_report(tmp_path):
    out = tmp_path / "page.html"

    async def script(driven: Driven):
        await driven.press("s")
        await typed(driven, str(out))
        assert driven.text("message") == f"wrote {out}"

    drive(RANKS, script)
    assert "<title>torch2.13.0-fsdp1-sharded-w4: whole" in out.read_text()


def writes_until_stopped(self, job, out, only, dry_run):
    with suppress(JobStoppedError):
        while True:
            Path(out).write_text("half of it")
            job.check()
    time.sleep(0.2)
    Path(out).unlink()


@pytest.mark.parametrize("keys", [["q"], ["x", "q"]])
def test_who_leaves_while_it_writes_finds_nothing_half_written(tmp_path, monkeypatch, keys):
    async def script(driven: Driven):
        await driven.press("w")
        await driven.clear()
        driven.app.screen.query_one("#line").insert_text_at_cursor(str(tmp_path / "half.safetensors"))
        await driven.pilot.press("enter")
        await driven.until(lambda: any(tmp_path.iterdir()))
        await driven.pilot.press(*keys)

    monkeypatch.setattr(Session, "consolidate", writes_until_stopped)
    app = drive(RANKS, script)
    app.end_writing()
    assert not app.is_running and list(tmp_path.iterdir()) == []


def test_a_second_page_waits_until_the_first_is_written(tmp_path, monkeypatch):
    async def script(driven: Driven):
        await driven.press("w")
        await driven.pilot.press("enter", "s")
        assert driven.text("message") == "something is being written; x stops it"
        await driven.press("x")
        assert driven.text("message") == "stopped"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Session, "consolidate", writes_until_stopped)
    drive(RANKS, script)
