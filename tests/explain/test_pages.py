"""Every problem code has a page, and every page a code that something raises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import ckptools
from ckptools.display.screen import Screen
from ckptools.errors import UsageError
from ckptools.explain import MAX_WIDTH, PAGES, explanation, explanations, list_text, pages_json, pages_text, sections_of
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
    lines = list_text(explanations()).splitlines()
    assert [line[:5] for line in lines[: len(Code)]] == [kind.code for kind in Code]


def test_the_json_has_every_code_and_is_what_its_schema_says():
    from jsonschema import Draft202012Validator

    made = json.loads(pages_json(explanations()))
    schema = Draft202012Validator(json.loads(SCHEMAS["explain"].read_text()))
    assert [e.message for e in schema.iter_errors(made)] == [] and len(made["codes"]) == len(Code)
