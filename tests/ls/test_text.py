"""A run as text and as a page: every mark of a row, trackers, what is left over, and what is not listed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ckptools.api.notebook import html_of
from ckptools.display.page import page_text
from ckptools.display.screen import Screen
from ckptools.ls.record import (
    CheckpointRow,
    LeftOverRow,
    RunFolder,
    TrackerRow,
    all_cells,
    change_line,
    cost_line,
)
from ckptools.model.records import Rows

SAVED = "2025-11-20T01:42:07Z"
ROWS = (
    CheckpointRow("s4", "run/s4", "dcp", 4, ranks=3, world_size=4, files=4, bytes=2048, whole=False,
                  verdict="NOT WHOLE: rank 3 missing", why="CK001 rank 3", remedy="put it back", codes=("CK001",),
                  looked_into="verify", saved=SAVED, being_written=True, notes=("odd",)),
    CheckpointRow("s3", "run/s3", "dcp", 3, False, 4, 4, 4, 4096, True, "whole", looked_into="verify --deep",
                  newest_whole=True),
    CheckpointRow("s2.pt", "run/s2.pt", "torch_file", 2, files=1, bytes=10, whole=True, verdict="whole",
                  looked_into="inspect"),
    CheckpointRow("bad", "run/bad", files=2, verdict="NOT WHOLE: cannot be opened", why="is cut short"),
    CheckpointRow("x", "run/x", "rank_files", ranks=2, files=2, whole=None, verdict="not known", looked_into="inspect"),
)  # fmt: skip
TRACKERS = (
    TrackerRow("latest", "s4", 4, "error", "names step 4; the newest whole one is step 3"),
    TrackerRow("last", "s4", 4, "warning", "names step 4 too"),
    TrackerRow("good", "s3", 3),
    TrackerRow("astray", None, None),
)
LEFT = (LeftOverRow("a.tmp", 100, SAVED), LeftOverRow("b.tmp", 5000, None))


def run(**more):
    given = {"rows": Rows(ROWS), "checkpoints": 7, "newest_whole": "run/s3", "ordered_by": "step", **more}
    return RunFolder(Path("run"), False, **given)


def test_a_row_has_every_mark_that_it_deserves():
    cells = all_cells(run(trackers=Rows(TRACKERS)))
    assert [row[:4] for row in cells] == [
        ("4", "3/4", "2.0 KiB", "NOT WHOLE: rank 3 missing"),
        ("3", "4/4", "4.0 KiB", "whole"),
        ("2", "one file", "10 B", "whole"),
        ("-", "2 files", "0 B", "NOT WHOLE: cannot be opened"),
        ("-", "2", "0 B", "not known"),
    ]
    assert [row.note for row in cells] == [
        "being written, latest, last point here",
        "<- newest whole, good points here, name says another step",
        "",
        "",
        "",
    ]
    assert [row.saved == "-" for row in cells] == [False, True, True, True, True]


def test_at_80_columns_a_note_is_broken_before_the_name_of_a_file():
    names = ("ep0-ba6-rank0.pt", "ep0-ba3-rank0.pt")
    pair = (replace(ROWS[0], bytes=2202009, being_written=False), replace(ROWS[1], bytes=2936012, step_agrees=True))
    rows = Rows(replace(row, name=name, saved=SAVED) for row, name in zip(pair, names, strict=True))
    lines = page_text(run(rows=rows, checkpoints=2), Screen(80, 40)).splitlines()
    assert all(name in "\n".join(lines[2:6]) for name in names) and max(map(len, lines)) <= 80


def test_below_the_table_are_problems_trackers_and_what_is_left_over():
    found = page_text(run(trackers=Rows(TRACKERS), left_over=Rows(LEFT), notes=("one", "two")))
    text = re.sub(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", found)
    assert text.splitlines()[0] == "7 checkpoints in run; newest whole: step 3, s3"
    assert text.splitlines()[-12:] == [
        "2 more (--limit 0: all of them)",
        "",
        "  step 4, s4: CK001 rank 3",
        "         put it back",
        "  step 4, s4: odd",
        "  bad: is cut short",
        "  tracker latest: names step 4; the newest whole one is step 3",
        "  tracker (warning) last: names step 4 too",
        "  CK008 left over from a write, or still being written: a.tmp (100 B, TIME), b.tmp (4.9 KiB, -)",
        "",
        "note: one",
        "note: two",
    ]


def test_without_anything_below_there_is_a_table_alone():
    text = page_text(run(rows=Rows(ROWS[2:3]), checkpoints=1, newest_whole=None))
    assert text.startswith("1 checkpoint in run; NONE IS WHOLE\n\n") and text.count("\n\n") == 1
    assert "more (--limit" not in text
    assert page_text(run(rows=Rows(), checkpoints=0, newest_whole=None)) == "0 checkpoints in run so far"


def test_a_change_is_one_line():
    assert change_line("new", ROWS[0]) == "new            step 4  3/4 ranks  2.0 KiB  NOT WHOLE: rank 3 missing  s4"
    assert change_line("changed", ROWS[1]) == "changed        step 3  4/4 ranks  4.0 KiB  whole  s3  <- newest whole"
    assert change_line("gone", ROWS[1]) == "gone           step 3  4/4 ranks  4.0 KiB  whole  s3"
    assert change_line("gone", ROWS[3]).split("  ")[-4:] == ["2 files", "0 B", "NOT WHOLE: cannot be opened", "bad"]


def test_the_last_line_says_how_far_each_was_read():
    assert cost_line(run()).rpartition(";")[0] == (
        "every rank of step 4, step 3 was read and compared with its checksums; 2 others looked into as inspect does"
    )
    assert cost_line(run(rows=Rows(ROWS[:1]))).startswith("every rank of step 4 was read; ")
    assert cost_line(run(rows=Rows(ROWS[2:3]))).startswith("1 checkpoint looked into as inspect does; ")
    assert cost_line(run(rows=Rows(ROWS[3:4]))).startswith("nothing could be read; ")


def test_a_page_has_the_same():
    page = html_of(run(trackers=Rows(TRACKERS), left_over=Rows(LEFT), notes=("one",)))
    shown = re.sub("<[^>]*>", "", page)
    for text in ("tracker latest: names step 4", "tracker (warning) last: names", "CK008 left over", "note: one"):
        assert text in shown
    assert "tracker good" not in page and page.count("is cut short") == 1
    alone = html_of(run(rows=Rows(ROWS[2:3])))
    assert "left over" not in alone and "note:" not in alone
