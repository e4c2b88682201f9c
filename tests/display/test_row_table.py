"""Rows as a table for documents and other programs, from the command line and in Python."""

from __future__ import annotations

import csv
import io
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.display.tables import cell_text, rows_text
from ckptools.errors import UsageError
from ckptools.model.records import Rows
from tests.display.made import HOSTILE
from tests.truth import FIXTURES

FSDP = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
DDP = FIXTURES / "torch2.13.0-ddp-w4"


class Row(NamedTuple):
    name: str
    nbytes: int | None
    shape: tuple[int, ...] = ()
    note: str = ""


def test_a_cell_of_several_texts_has_neither_quotes_nor_brackets():
    assert cell_text("missing", ("[4:5]",)) == "[4:5]" and cell_text("ranks", ("a", "b")) == "a, b"


class OtherRow(NamedTuple):
    name: str
    verdict: str


def run(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(map(str, words)))
    return result.exit_code, result.stdout, result.stderr


def test_markdown_has_sizes_as_on_a_screen_and_no_empty_columns():
    lines = Rows([Row("a", 2048, (2, 3)), Row("b|c", None)]).to_markdown().splitlines()
    assert [line.split() for line in lines] == [
        ["|", "name", "|", "nbytes", "|", "shape", "|"],
        [*lines[1].split()],
        ["|", "a", "|", "2.0", "KiB", "|", "[2,", "3]", "|"],
        ["|", "b\\|c", "|", "-", "|", "[]", "|"],
    ]


def test_a_tsv_has_plain_numbers_and_no_padding():
    assert rows_text(Rows([Row("a", 2048), Row("longer", None)]), "tsv") == "name\tnbytes\na\t2048\nlonger\t-"


def test_rows_of_two_classes_share_the_columns_of_both():
    lines = rows_text(Rows([Row("a", 1), OtherRow("b", "differs")]), "tsv").splitlines()
    assert lines == ["name\tnbytes\tverdict", "a\t1\t-", "b\t-\tdiffers"]


@pytest.mark.parametrize("form", ["github", "tsv", "html", "latex", "grid", "jira"])
def test_a_hostile_name_adds_no_row_no_markup_and_no_control_character(form):
    shown = rows_text(Rows([Row(HOSTILE, 1), Row("a\tb\nc<script>", 2)]), form)
    plain = rows_text(Rows([Row("x", 1), Row("y", 2)]), form)
    assert shown.count("\n") == plain.count("\n") and shown.replace("\n", "").replace("\t", "").isprintable()
    assert form != "html" or "<script>" not in shown


@pytest.mark.parametrize("form", ["nonsense", "unsafehtml", "latex_raw", ""])
def test_an_unknown_format_is_refused_with_those_that_there_are(form):
    with pytest.raises(UsageError, match=r"choose one of .*github.*tsv"):
        rows_text(Rows([Row("a", 1)]), form)


COMMANDS = {
    "inspect": ([FSDP], "optim"),
    "tree": ([FSDP, "--section", "model"], "gate"),
    "show": ([FSDP, "one"], "one"),
    "verify": ([FSDP], "checksums (CRC-32)"),
    "stats": ([FSDP], "gate"),
    "ls": ([FSDP], "rank0.pt"),
    "doctor": ([FSDP], "whole?"),
    "match": ([FSDP, "--to", DDP], "module.temp"),
    "diff": ([FSDP, DDP], "module.temp"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_with_rows_prints_them_as_a_table_alone(command):
    words, name = COMMANDS[command]
    code, shown, _ = run(command, *words, "--table-format", "tsv")
    rows = list(csv.reader(io.StringIO(shown), delimiter="\t", quoting=csv.QUOTE_NONE))
    assert code in (0, 1) and len({len(row) for row in rows}) == 1 < len(rows)
    assert any(name in cell for row in rows for cell in row)


def test_inspect_prints_the_sections_as_on_a_screen_and_refuses_one_in_full():
    lines = run("inspect", FSDP, "--table-format", "tsv")[1].splitlines()
    assert lines[0].split("\t") == ["section", "tensors", "params", "dtype", "size", "holds"]
    assert lines[1].split("\t")[:2] == ["model", "21"]
    code, shown, error = run("inspect", FSDP, "--section", "model", "--table-format", "tsv")
    assert (code, shown) == (2, "") and "ckptools tree --section" in error


def test_a_scalar_has_a_shape_and_records_in_a_cell_are_counted():
    shown = run("show", FSDP, "seen", "--table-format", "tsv")[1].splitlines()
    row = dict(zip(shown[0].split("\t"), shown[1].split("\t"), strict=True))
    assert (row.get("shape", "[]"), row["shards"]) == ("[]", "<4 rows of ShardRow>")
    assert Rows([Row("a", 1, (2,)), Row("b", 1)]).to_markdown().splitlines()[3].split("|")[3].strip() == "[]"


def test_diff_lists_what_differs_and_not_what_is_equal():
    assert run("diff", DDP, DDP, "--table-format", "tsv")[:2] == (0, "")


def test_two_forms_and_an_unknown_one_are_refused_before_anything_is_read(tmp_path):
    for words in (["--json", "--table-format", "tsv"], ["--json", "--jsonl"], ["--table-format", "nonsense"]):
        code, shown, error = run("tree", tmp_path / "missing", *words)
        assert (code, shown) == (2, "") and "no such file" not in error
