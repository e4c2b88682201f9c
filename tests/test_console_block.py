"""Console blocks of the site: their commands, their colours, and their tables."""

from __future__ import annotations

import os
import re
import shutil
from html import unescape
from pathlib import Path

import pytest

from ckptools.display.screen import SGR
from tests.truth import FIXTURES
from tools.console_block import block
from tools.documents import Step, run

MARKS = {SGR["bad"]: "bad", SGR["warn"]: "warn", SGR["good"]: "good", SGR["doubtful"]: "warn", SGR["sound"]: "good"}


def html(text: str) -> str:
    return block(text, "console", "console", {}, None)


def plain(made: str) -> str:
    return unescape(re.sub("<[^>]*>", "", made)).replace("\u200b", "")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colours")
    for rank in range(3):
        path = FIXTURES / "torch2.13.0-fsdp1-sharded-w4" / f"rank{rank}.pt"
        shutil.copy(path, folder / path.name)
    os.truncate(folder / "rank2.pt", 40_000)
    return folder


@pytest.mark.parametrize(
    "command", ["inspect rank0.pt", "doctor rank0.pt", "verify rank0.pt --deep", "ls .", "verify no"]
)
def test_the_site_has_no_colour_that_the_terminal_has_not(broken: Path, command: str) -> None:
    shown = run(Step(0, f"ckptools {command} --color always", ""), broken)
    text = re.sub(r"\x1b\[[\d;]*m", "", shown)
    made = html(f"$ ckptools {command}\n{text}")
    lines = re.findall(r'<span class="line"[^>]*>(.*)</span>$', made, re.MULTILINE)
    wrong, right = [], 0
    for line, ours in zip(shown.rstrip("\n").split("\n"), lines, strict=True):
        terminal = {
            (MARKS[sgr], word) for sgr, words in re.findall(r"\x1b\[([\d;]+)m([^\x1b]*)", line)
            if sgr in MARKS for word in words.split()
        }  # fmt: skip
        site = {
            (mark, word) for mark, words in re.findall(r'class="(bad|warn|good)">([^<]*)<', ours)
            for word in unescape(words).split() if not re.match(r"CK\d", word)
        }  # fmt: skip
        wrong += [(line, site - terminal)] if site - terminal else []
        right += len(site & terminal)
    assert wrong == [] and right > 0
    assert [one for one in plain(made).split("\n")[1:] if one] == [one for one in text.split("\n") if one]


def test_a_command_is_told_from_what_it_prints() -> None:
    made = html("$ ckptools ls run7 \\\n    --limit 3\nstep 3\n$ true\n")
    assert made.count('class="line command"') == 3 and made.count('class="prompt"') == 2
    assert '<span class="option">--limit</span>' in made and '<span class="line">step 3</span>' in made


def test_a_command_to_type_next_stands_out() -> None:
    made = html("$ x\nnext:\n  ckptools ls run7\nnext: ckptools verify run7 --deep\nthat ckptools ls names\n")
    assert re.findall('class="typed">([^<]*)<', made) == ["ckptools ls", "ckptools verify"]


def test_text_of_a_block_is_escaped() -> None:
    made = html("$ echo '<b>'\n<script>&</script>\n")
    assert "<script>" not in made and plain(made).split("\n")[:2] == ["$ echo '<b>'", "<script>&</script>"]


def test_only_the_rows_of_a_table_are_scrolled() -> None:
    text = "$ ckptools verify x\nhead\n\ncheck   result\n------  ------\nfiles   FAIL\nlayout  ok\n2 checks, 1 failed\n"
    table = html(text).partition('<span class="table">')[2].partition("</span>\n</span>")[0]
    assert plain(table).split("\n")[:4] == ["check   result", "------  ------", "files   FAIL", "layout  ok"]
    assert 'class="bad">FAIL<' in table and 'class="good">ok<' in table and "2 checks" not in table


def test_a_long_line_goes_on_below_its_last_cell() -> None:
    assert '--hang:10">  rank 2  no file<' in html("$ x\n  rank 2  no file\n")
    assert '<span class="line">no label<' in html("$ x\nno label\n")
