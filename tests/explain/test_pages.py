"""Every problem code has a page, and every page a code that something raises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import ckptools
from ckptools.display.screen import NAMES, SGR, Screen
from ckptools.errors import UsageError
from ckptools.explain import (
    MAX_WIDTH,
    PAGES,
    SUBJECTS,
    explanation,
    explanations,
    list_text,
    pages_json,
    pages_text,
    sections_of,
)
from ckptools.model.problems import Code
from tests.schemas import SCHEMAS

PACKAGE = Path(ckptools.__file__).parent
TABLES = {PACKAGE / "model" / "problems.py"}


def test_every_code_has_one_page_and_no_page_is_for_another_code():
    assert [code for code, _ in sections_of(PAGES.read_text())] == [kind.code for kind in Code]


@pytest.mark.parametrize("kind", Code, ids=lambda kind: kind.code)
def test_a_page_says_what_it_means_what_causes_it_and_what_to_do(kind):
    page, section = explanation(kind.code), dict(sections_of(PAGES.read_text()))[kind.code]
    headings = re.findall(r"^##.*$", section, re.MULTILINE)
    assert headings == [f"## {kind.code}: {kind.meaning}", "### Causes", "### What to do"]
    assert len(page.means) > 60 and page.causes and page.to_do


def test_every_code_is_raised_somewhere():
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if path not in TABLES)
    named = set(re.findall(r"\bCode\.(\w+)", text))
    assert [kind.code for kind in Code if kind.name not in named] == []


def test_every_option_and_command_that_a_page_names_exists():
    from ckptools.cli.program import flat_parameters
    from ckptools.cli.start import COMMANDS, function_of

    commands = {name: {p.name for p in flat_parameters(function_of(name))} for name in COMMANDS}
    called = re.findall(r"`ckptools (\w+)([^`]*)`", PAGES.read_text())
    assert len(called) > 40 and {name for name, _ in called} <= commands.keys()
    wrong = [
        (n, o) for n, rest in called for o in re.findall(r"--([\w-]+)", rest) if o.replace("-", "_") not in commands[n]
    ]
    assert [pair for pair in wrong if pair != ("version", "")] == []


@pytest.mark.parametrize("name", ["CK101", "ck101", "101", " CK101 "])
def test_a_code_is_found_however_it_is_typed(name):
    assert explanation(name).code == "CK101"


def test_an_unknown_code_names_those_near_it():
    with pytest.raises(UsageError, match="'CK399' is no problem code; near it are CK301, CK302, CK303"):
        explanation("CK399")
    with pytest.raises(UsageError, match="'gap' is no problem code; `ckptools explain` lists all"):
        explanation("gap")


@pytest.mark.parametrize("width", [None, 60, 200])
def test_a_page_has_no_line_that_is_too_wide(width):
    text = pages_text(explanations(), Screen(width))
    assert max(map(len, text.splitlines())) <= min(width or MAX_WIDTH, MAX_WIDTH)
    assert "What to do\n  - In short: find the file that holds it" in pages_text([explanation("CK101")])


def test_the_list_has_a_line_for_each_code():
    listed = list_text(explanations(), Screen(80)).splitlines()
    assert [line[2:7] for line in listed if line.startswith("  CK")] == [kind.code for kind in Code]
    assert max(map(len, listed)) <= 80


def test_the_list_has_a_heading_for_each_subject_and_codes_of_one_digit_below_it():
    blocks = [block.splitlines() for block in list_text(explanations()).split("\n\n")[:-1]]
    assert [block[0] for block in blocks] == list(SUBJECTS.values())
    assert [{line[4] for line in block[1:]} for block in blocks] == [{digit} for digit in SUBJECTS]


def test_codes_have_the_colour_of_their_severity_and_the_words_stay_the_same():
    listed = list_text(explanations(), Screen(color=True))
    for code, mark in {"CK001  error": "bad", "CK003  warning": "warn", "CK012  note": "dim"}.items():
        assert f"  \x1b[{SGR[mark]}m{code}\x1b[0m" in listed  # type: ignore[index]
    page = pages_text([explanation("CK001")], Screen(80, color=True))
    assert page.startswith(f"\x1b[{SGR['bad']}mCK001:\x1b[0m \x1b[{SGR['heading']}mfile missing\x1b[0m\n")
    assert f"`\x1b[{SGR['typed']}mckptools ls\x1b[0m RUN`" in page
    assert f"\x1b[{SGR['heading']}mWhat to do\x1b[0m" in page
    for text, plain in ((listed, list_text(explanations())), (page, pages_text([explanation("CK001")], Screen(80)))):
        assert re.sub(r"\x1b\[[\d;]*m", "", text) == plain


def test_the_names_of_commands_that_have_a_colour_are_those_of_the_command_line():
    from ckptools.cli.start import COMMANDS

    assert list(COMMANDS) == list(NAMES)


def test_the_json_has_every_code_and_is_what_its_schema_says():
    from jsonschema import Draft202012Validator

    made = json.loads(pages_json(explanations()))
    schema = Draft202012Validator(json.loads(SCHEMAS["explain"].read_text()))
    assert [e.message for e in schema.iter_errors(made)] == [] and len(made["codes"]) == len(Code)
