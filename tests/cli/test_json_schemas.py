"""What a command prints with --json is what its schema says: on every fixture, and where nothing can be opened."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.cli.program import flat_parameters
from ckptools.cli.start import COMMANDS, function_of
from tests.schemas import SCHEMAS
from tests.truth import ASKED, FIXTURES, LOCAL, OWN_BUFFERS, WHOLE, one_of_each_form

KNOWN = (*WHOLE, *LOCAL, *OWN_BUFFERS, *ASKED)
ALIKE = {known.folder for known in KNOWN} - {known.folder for known in one_of_each_form(KNOWN)}
FOLDERS = sorted(path for path in FIXTURES.iterdir() if path.is_dir() and path not in ALIKE)
"""Folders of fixtures, of those whose form (`Known.form`) several have the first."""

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"

CALLS: dict[str, list[list[str]]] = {
    "inspect": [[], ["--section", "model"], ["--section", "optimizer"], ["--section", "rng"], ["--all-ranks"]],
    "doctor": [[], ["--to", "{path}"], ["--deep"]],
    "ls": [[], ["--deep"], ["--sort", "bytes", "--limit", "1"]],
    "verify": [[], ["--deep", "--values"]],
    "watch": [["--once", "--settle", "0"], ["--once", "--settle", "0", "--deep", "--values", "--keep", "1"]],
    "show": [["*"], ["model", "--values", "0:2"], ["rng"], ["optimizer.param_groups"]],
    "tree": [[], ["--section", "rng"], ["--sort", "bytes", "--limit", "3"]],
    "consolidate": [["-o", "{path}.out.pt", "--dry-run"], ["-o", "{path}.out.safetensors", "--dry-run", "--check"]],
    "diff": [["{path}"], ["{path}", "--values"], ["{path}", "--every-byte", "--section", "optimizer"]],
    "match": [["--to", "{path}"], ["--to", str(FIXTURES / "torch2.13.0-ddp-w4" / "snapshot.pt")]],
    "stats": [["--hist"], [], ["--per-rank"], ["--moments"], ["--dead-rows"]],
}
"""What follows the path of a checkpoint, on each fixture the first, on one of them all; `{path}` is that path again."""

LINES: dict[str, list[list[str]]] = {
    "tree": [[]],
    "match": [["--to", "{path}"]],
    "stats": [[]],
    "ls": [[]],
    "watch": [["--once", "--settle", "0"]],
    "show": [["*"]],
    "diff": [["{path}"]],
    "doctor": [[]],
}
"""The same for --jsonl."""

OTHER_ROWS = ("diff",)
"""Commands whose lines are other rows than --json has, which every fixture shows already."""

FILES = {"map", "digests"}
"""Schemas of files that commands write and read, which have tests of their own."""


@cache
def validator(command: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads(SCHEMAS[command].read_text()))


def printed(command: str, path: Path, *words: str) -> str:
    arguments = [command, str(path), *(word.replace("{path}", str(path)) for word in words)]
    return CliRunner().invoke(app, arguments).stdout


def problems(command: str, answer: Any) -> list[str]:
    return [f"{error.json_path}: {error.message[:200]}" for error in validator(command).iter_errors(answer)]


def commands_with(flag: str) -> set[str]:
    known = {name: {p.name for p in flat_parameters(function_of(name))} for name in COMMANDS}
    return {name for name, parameters in known.items() if flag in parameters}


def test_every_command_that_prints_json_is_here_and_has_a_schema():
    assert set(CALLS) | {"explain", "formats"} == commands_with("json") == set(SCHEMAS) - FILES
    assert set(LINES) == commands_with("jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("command", CALLS)
def test_a_schema_is_one_and_names_its_version(command):
    Draft202012Validator.check_schema(validator(command).schema)
    assert validator(command).schema["$id"] == f"ckptools/{command}/1"


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
@pytest.mark.parametrize("command", CALLS)
def test_every_fixtures_answer_is_what_the_schema_says(command, folder):
    answer = json.loads(printed(command, folder, *CALLS[command][0], "--json"))
    assert problems(command, answer) == []


@pytest.mark.slow
@pytest.mark.parametrize(("command", "more"), [(c, more) for c, calls in CALLS.items() for more in calls], ids=str)
def test_every_form_of_an_answer_is_what_the_schema_says(command, more):
    answer = json.loads(printed(command, COMPOSER, *more, "--json"))
    assert problems(command, answer) == []


@pytest.mark.parametrize("command", CALLS)
def test_what_cannot_be_opened_is_what_the_schema_says_too(command, tmp_path):
    answer = json.loads(printed(command, tmp_path / "nowhere", *CALLS[command][0], "--json"))
    assert problems(command, answer) == [] and answer["exit_code"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_line_is_a_row_of_the_schema(folder):
    for command in LINES if folder in FOLDERS[::4] else OTHER_ROWS:
        row = Draft202012Validator({"$ref": "#/$defs/row", "$defs": validator(command).schema["$defs"]})
        lines = printed(command, folder, *LINES[command][0], "--jsonl").splitlines()
        wrong = [e.message for line in lines for e in row.iter_errors(json.loads(line))]
        assert (command, wrong) == (command, [])


def test_the_list_of_formats_is_what_its_schema_says():
    assert problems("formats", json.loads(CliRunner().invoke(app, ["formats", "--json"]).stdout)) == []


def test_a_schema_refuses_what_it_does_not_know():
    answer = json.loads(printed("inspect", COMPOSER, "--json"))
    assert problems("inspect", {**answer, "hole": True}) and problems("inspect", {**answer, "whole": "yes"})
