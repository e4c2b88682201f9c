"""Errors of Python name Python's arguments, and what is no path is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import UsageError, python_words


@pytest.fixture
def file(tmp_path) -> str:
    torch.save({"w": torch.arange(6.0)}, tmp_path / "model.pt")
    return str(tmp_path / "model.pt")


@pytest.mark.parametrize(
    "text",
    [
        ("--prefer-rank 7: there is no file", "prefer_rank 7: there is no file"),
        ("not whole; --allow-missing writes what is whole", "not whole; allow_missing writes what is whole"),
        ("no model; --only all writes every tensor", "no model; only='all' writes every tensor"),
        ("as ckptools tree x --section all has it; --ranks", "as ckptools tree x --section all has it; ranks"),
        (
            "none that ckptools knows, not followed (--follow-symlinks)",
            "none that ckptools knows, not followed (follow_symlinks)",
        ),
        ("2 -- 3 and a--b stay", "2 -- 3 and a--b stay"),
    ],
)
def test_options_are_arguments_but_in_commands(text):
    assert python_words(text[0]) == text[1]


def test_an_error_of_python_has_no_dashes(file, tmp_path):
    with pytest.raises(UsageError, match=r"prefer_rank 7: there is no file of that rank") as caught:
        ckptools.consolidate(file, tmp_path / "out.safetensors", prefer_rank=7)
    assert "--" not in str(caught.value) + caught.value.reason
    with pytest.raises(UsageError, match=r"^weights='zz': choose fp32 or module"):
        ckptools.open(file, weights="zz")
    result = CliRunner().invoke(app, ["inspect", file, "--ranks", "zz"])
    assert "--ranks" in result.stderr


@pytest.mark.parametrize(
    "call",
    [
        ckptools.open,
        ckptools.verify,
        ckptools.doctor,
        ckptools.checkpoints_in,
        lambda path: ckptools.consolidate(path, "out.pt"),
        lambda path: ckptools.diff(path, path),
    ],
)
@pytest.mark.parametrize("path", [None, 5, ""])
def test_what_is_no_path_is_one_clear_line(call: Callable[[Any], Any], path):
    with pytest.raises(UsageError, match=r"^expected a path, found|^the path is empty; this folder is \."):
        call(path)


def test_an_output_that_is_no_path_is_one_clear_line(file):
    with pytest.raises(UsageError, match="expected a path, found None"):
        ckptools.consolidate(file, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ["zz", "5XB", 2.5, -1, True])
def test_a_size_that_is_none_is_one_clear_line(file, tmp_path, size):
    with pytest.raises(UsageError, match=r"^max_shard_size .*: expected a size such as 5GB .*bytes$"):
        ckptools.open(file).consolidate(tmp_path / "out.safetensors", max_shard_size=size)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_part_that_is_no_name_is_one_clear_line(file, tmp_path):
    with pytest.raises(UsageError, match=r"only='5': expected a name or a glob$"):
        ckptools.consolidate(file, tmp_path / "out.pt", only=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["inspect", "ls", "verify", "tree", "stats", "doctor"])
def test_an_empty_path_is_not_this_folder(command):
    result = CliRunner().invoke(app, [command, ""])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: the path is empty; this folder is .\n"


def test_one_glob_is_as_good_as_a_list_of_one(file):
    ck = ckptools.open(file)
    assert [row.name for row in ck.records(filter="*").rows] == [row.name for row in ck.records(filter=["*"]).rows]
    assert [row.name for row in ck.records(exclude="*").rows] == []
    assert ck.match(ck, filter="*").loads
    assert len(ckptools.diff(ck, ck, filter="*").tensors) == len(ckptools.diff(ck, ck).tensors) > 0


def test_values_that_are_no_slice_are_one_clear_line(file):
    with pytest.raises(UsageError, match=r"^values True: expected a slice such as '0:4,:8'$"):
        ckptools.open(file).show("*", values=True)  # type: ignore[arg-type]
