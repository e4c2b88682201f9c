"""Errors of Python name Python's arguments, and what is no path is refused in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import UsageError
from ckptools.option import in_python, spelled
from ckptools.tensor_io.fetch_ahead import in_threads


@pytest.fixture
def file(tmp_path) -> str:
    torch.save({"w": torch.arange(6.0)}, tmp_path / "model.pt")
    return str(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("named", "command", "python"),
    [
        (("prefer-rank",), "--prefer-rank", "prefer_rank"),
        (("deep",), "--deep", "deep"),
        (("only", "model"), "--only model", "only='model'"),
        (("only", "it's.*"), "--only it's.*", 'only="it\'s.*"'),
        (("world-size", 4), "--world-size 4", "world_size=4"),
    ],
)
def test_an_option_is_spelled_for_who_called(named, command, python):
    said = in_python(spelled)(*named)
    assert (spelled(*named), said) == (command, python)
    assert spelled(*named) == command  # the call from Python is over


def test_an_option_without_effect_on_a_checkpoint_is_spelled_so_too(file):
    with pytest.raises(UsageError, match=r": weights: does nothing for "):
        ckptools.open(file, weights="module")


def test_a_call_that_fails_or_lies_in_another_ends_with_itself():
    @in_python
    def failing() -> None:
        raise ValueError(spelled("rules"))

    @in_python
    def outer() -> str:
        with pytest.raises(ValueError, match=r"^rules$"):
            failing()
        return spelled("rules")

    assert (outer(), spelled("rules")) == ("rules", "--rules")


def test_threads_say_it_as_the_call_that_starts_them():
    assert in_python(in_threads)(spelled, ["only-this-file"] * 3, 2) == ["only_this_file"] * 3
    assert in_threads(spelled, ["only-this-file"] * 3, 2) == ["--only-this-file"] * 3


def test_an_error_names_arguments_in_python_and_options_in_a_command(file, tmp_path):
    out = str(tmp_path / "out.safetensors")
    with pytest.raises(UsageError, match=r"prefer_rank 7: there is no file of that rank") as caught:
        ckptools.consolidate(file, out, prefer_rank=7)
    assert "--" not in str(caught.value) + caught.value.reason
    with pytest.raises(UsageError, match=r"^weights='zz': choose fp32 or module"):
        ckptools.open(file, weights="zz")
    for words, said in [
        (["consolidate", file, "-o", out, "--prefer-rank", "7"], "--prefer-rank 7: there is no file of that rank"),
        (["inspect", file, "--ranks", "zz"], "--ranks goes with a folder"),
        (["shell", file, "--ranks", "zz", "-c", "ck"], "--ranks goes with a folder"),
    ]:
        result = CliRunner().invoke(app, words)
        assert said in result.stderr and result.exit_code == 2


@pytest.mark.parametrize("name", ["a --lr", "of --only x", "with --prefer-rank 7 of"])
def test_a_name_that_looks_like_an_option_stays_as_it_is(tmp_path, name):
    path = tmp_path / f"{name}.pt"
    torch.save({"w": torch.arange(6.0)}, path)
    out = str(tmp_path / "out.safetensors")
    with pytest.raises(UsageError) as caught:
        ckptools.consolidate(path, out, prefer_rank=7)
    assert str(caught.value) == f"{path}: prefer_rank 7: there is no file of that rank here"
    result = CliRunner().invoke(app, ["consolidate", str(path), "-o", out, "--prefer-rank", "7"])
    assert result.stderr == f"error: {path}: --prefer-rank 7: there is no file of that rank here\n"


def test_a_problem_names_the_argument_that_opens_the_rest(tmp_path):
    path = tmp_path / "w.pt"
    torch.save({"w": torch.arange(6.0)}, path)
    os.truncate(path, path.stat().st_size - 30)
    said = "what is in front of the cut is read"
    problems = [problem.message for problem in ckptools.open(path, salvage=True).problems]
    assert any(f"{said} (salvage=True)" in message for message in problems), problems
    assert f"{said} (--salvage)" in CliRunner().invoke(app, ["inspect", str(path), "--salvage"]).stdout


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
    with pytest.raises(UsageError, match=r"only=5: expected a name or a glob$"):
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
