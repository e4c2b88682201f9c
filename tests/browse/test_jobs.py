"""Work goes on beside the keys: it is named, it stops when asked to, and a slow store freezes nothing."""

from __future__ import annotations

import re
import shutil
import threading
import time

import pytest

from ckptools.browse import session
from ckptools.browse.session import BackgroundJob, Jobs, JobStoppedError, Session
from ckptools.files.remote import path as remote_path
from ckptools.formats import open as opening
from ckptools.formats.open import with_all_ranks
from ckptools.formats.rank_search import rank_groups
from tests.browse.driven import Driven, drive
from tests.display.made import run7
from tests.object_store import BUCKET
from tests.truth import FIXTURES
from tests.unreliable_store import proxy_of

RANKS = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"


def waits(job: BackgroundJob):
    while True:
        time.sleep(0.005)
        job.check()


def test_a_later_job_takes_the_place_of_one_of_its_name():
    found, done = [], threading.Event()
    jobs = Jobs(lambda deliver: deliver())
    jobs.start("reads", waits, found.append, found.append)
    first = jobs.running["reads"]
    jobs.start("reads", lambda _: 2, lambda result: (found.append(result), done.set()), found.append)
    assert done.wait(10) and first.stopped.is_set() and found == [2]


def test_what_a_stopped_job_still_returns_is_dropped():
    found, go = [], threading.Event()
    jobs = Jobs(lambda deliver: deliver())
    jobs.start("reads", lambda _: go.wait(10), found.append, found.append)
    assert jobs.stop_shown() and jobs.is_busy("reads")
    go.set()
    jobs.finish("reads")
    assert not jobs.is_busy("reads") and found == []


def test_a_job_says_how_far_it_is_and_ends_where_it_is_stopped():
    job = BackgroundJob("reads every rank")
    job.on_file(RANKS)
    job.on_bytes(2048, "w")
    assert job.words.startswith("reads every rank: 1 file, 2.0 KiB, ")
    job.stopped.set()
    with pytest.raises(JobStoppedError):
        job.on_file(RANKS)


def test_keys_are_answered_while_it_opens_and_x_stops_it(monkeypatch):
    async def script(driven: Driven):
        assert driven.text("title").endswith("opens ...")
        await driven.until(lambda: "opens: " in driven.text("status"))
        await driven.pilot.press("question_mark")
        assert len(driven.app.screen_stack) == 2
        await driven.pilot.press("escape", "3", "x")
        assert driven.text("message") == "stopped" and not driven.app.jobs.running
        assert driven.text("title").endswith("not opened; r opens it")
        monkeypatch.setattr(Session, "open", opens)
        await driven.press("r")
        assert "whole: all 4 rank files are here" in driven.text("title")

    opens = Session.open
    monkeypatch.setattr(Session, "open", lambda self, job: waits(job))
    drive(RANKS, script, wait=False)


@pytest.mark.slow
def test_a_bucket_that_answers_after_a_while_freezes_nothing(bucket, monkeypatch):
    url = bucket.put(RANKS)
    monkeypatch.setattr(remote_path, "_stores", {})
    with proxy_of(bucket.address) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        proxy.always = lambda answer: (time.sleep(0.1), answer)[1]

        async def script(driven: Driven):
            await driven.pilot.press("3", "question_mark")
            assert driven.app.session.looked is None and len(driven.app.screen_stack) == 2
            await driven.press("escape", "1")
            assert "whole: all 4 rank files are here" in driven.text("title")
            read, taken = re.match(r"read (\S+) KiB in (\S+) s", driven.text("status")).groups()
            assert float(read) > 100 and float(taken) > 0.5  # of four files, in requests of 0.1 s each
            await driven.press("slash", *"blocks.0.up.w", "enter")
            before = proxy.requests
            await driven.press("j", "k")
            assert proxy.requests == before
            await driven.press("f")
            assert driven.rows("right")[0].startswith("rms ") and proxy.requests > before

        drive(url, script, wait=False)
    assert url.startswith(f"s3://{BUCKET}/")


def test_every_rank_is_read_once_however_many_jobs_need_it(monkeypatch):
    read, go = [], threading.Event()

    def slowly(checkpoint):
        read.append(checkpoint.path)
        go.wait(10)
        return with_all_ranks(checkpoint)

    async def script(driven: Driven):
        await driven.until(lambda: "reads every rank" in driven.app.jobs.running)
        await driven.pilot.press("r", "slash", *"blocks.0.up.w", "enter", "f")
        assert {"reads every rank", "reads values of 1 tensor"} <= set(driven.app.jobs.running)
        go.set()
        await driven.settled()
        assert driven.rows("right")[0].startswith("rms ")
        await driven.press("f")
        assert read == [RANKS]

    for module in (opening, rank_groups):  # else so few ranks are read at once
        monkeypatch.setattr(module, "is_small", lambda *_: False)
    monkeypatch.setattr(session, "with_all_ranks", slowly)
    drive(RANKS, script, wait=False)


def test_files_that_vanish_while_it_is_open_are_named_by_every_key(tmp_path, monkeypatch):
    shutil.copytree(RANKS, tmp_path / "run")
    monkeypatch.chdir(tmp_path)

    async def script(driven: Driven):
        await driven.press("slash", *"blocks.0.up.w", "enter")
        shutil.rmtree(tmp_path / "run")
        await driven.press("f")
        assert driven.text("message") == "1 tensor, 0 elements, 1 not read in full"
        assert "rank0.pt: no such file or directory" in " ".join(driven.rows("right"))
        await driven.press("s", "enter")
        assert "<title>run: NOT WHOLE" in (tmp_path / "run.html").read_text()
        await driven.press("s", "enter")
        assert driven.text("message").startswith("error: run.html: ")  # it is there by now
        await driven.press("w", "enter", "enter")
        assert driven.text("message").startswith("error: ") and "no such file" in driven.text("message")

    drive(tmp_path / "run", script)
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]


def test_escape_stops_nothing_that_the_user_does_not_see(monkeypatch):
    def slowly(self, looked):
        go.wait(10)
        return lists(self, looked)

    async def script(driven: Driven):
        await driven.until(lambda: driven.app.session.looked is not None and "lists keys" in driven.app.jobs.running)
        await driven.pilot.press("2", "escape")
        go.set()
        await driven.settled()
        assert driven.row.startswith("+ model")

    go, lists = threading.Event(), Session.list_keys
    monkeypatch.setattr(Session, "list_keys", slowly)
    drive(RANKS, script, wait=False)


def test_a_bug_ends_it_and_is_not_hidden():
    async def script(driven: Driven):
        driven.app.begin("reads", lambda _: 1 // 0, lambda _: None)
        for _ in range(200):
            await driven.pilot.pause(0.02)
            if driven.app.bug is not None:
                return

    assert isinstance(drive(run7(), script).bug, ZeroDivisionError)
