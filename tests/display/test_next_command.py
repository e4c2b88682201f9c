"""The last line of `inspect`: the command that it proposes is one that works."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.display.next_command import after_verify
from ckptools.inspect.record import inspect_report
from tests.truth import FIXTURES

RANKS = FIXTURES / "torch2.4.1-fsdp2-w3"


def proposed(*arguments: object) -> str:
    """The command behind `next:`; "" where there is none."""
    done = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    found = re.search(r"^next: ckptools (.*?)(?:     .*)?$", done.stderr, re.MULTILINE)
    return found[1] if found else ""


def works(command: str, folder: Path) -> bool:
    """Whether a proposed command does what it says."""
    words = [str(folder / word) if word.startswith("OUT.") else word for word in shlex.split(command)]
    done = CliRunner().invoke(app, words)
    return done.exit_code == 0 if words[0] == "consolidate" else done.exit_code in (0, 1) and done.stdout != ""


@pytest.mark.parametrize(
    ("lost", "arguments"),
    [
        ((), ["{}"]),
        ((1,), ["{}"]),
        ((1, 2), ["{}"]),
        ((0, 1), ["{}/rank2.pt"]),
        ((), ["{}/rank0.pt", "--only-this-file"]),
    ],
    ids=str,
)
def test_what_is_proposed_works_when_ranks_are_missing(lost, arguments, tmp_path):
    shutil.copytree(RANKS, tmp_path / "a b", ignore=shutil.ignore_patterns("truth*", "HOW*"))
    for rank in lost:
        (tmp_path / "a b" / f"rank{rank}.pt").unlink()
    found = proposed(*(a.format(tmp_path / "a b") for a in arguments))
    assert found and works(found, tmp_path)


def test_behind_verify_nobody_is_told_to_verify_again():
    named = "run/rank0.pt"
    assert after_verify(named, f"ckptools verify {named}", False, True) == [f"ckptools doctor {named}"]
    assert after_verify(named, f"ckptools verify {named}", True, False) == [f"ckptools verify {named} --deep --values"]
    assert after_verify(named, f"ckptools inspect {named}", True, True) == [f"ckptools inspect {named}"]


def test_what_no_option_talks_away_is_not_proposed_to_be_consolidated(tmp_path):
    for rank in range(3):
        shutil.copy(RANKS / f"rank{min(rank, 1)}.pt", tmp_path / f"rank{rank}.pt")
    assert proposed(tmp_path) == f"verify {tmp_path} --to-fetch"


def test_a_warning_keeps_nothing_from_being_proposed_to_be_consolidated(tmp_path):
    shutil.copytree(FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt", tmp_path / "dcp")
    shutil.copy(tmp_path / "dcp" / "__0_0.distcp", tmp_path / "dcp" / "__7_0.distcp")
    assert [p.code for p in ckptools.open(tmp_path / "dcp").problems] == ["CK009"]
    assert proposed(tmp_path / "dcp").startswith("consolidate ")


@pytest.mark.parametrize(
    ("tree", "command"),
    [
        ({"model": {"w": torch.ones(2)}}, "consolidate {} -o OUT.safetensors"),
        (
            {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0], "lr": 0.1}]},
            "consolidate {} -o OUT.pt",
        ),
        ({"step": 5, "notes": ["no tensor"]}, ""),
    ],
    ids=["model", "optimizer", "no tensor"],
)
def test_only_what_can_be_written_is_proposed(tree, command, tmp_path):
    torch.save(tree, tmp_path / "x.pt")
    found = proposed(tmp_path / "x.pt")
    assert found == command.format(tmp_path / "x.pt") and (not found or works(found, tmp_path))


def test_of_an_adapter_alone_its_folder_is_proposed_and_of_that_folder_the_merge(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of_peft = FIXTURES / "peft-adapters" / "half"
    state = load_file(of_peft / "adapter_model.safetensors")
    torch.save({"model": state}, tmp_path / "run.pt")
    command = proposed("run.pt")
    assert command == "consolidate run.pt --only lora --like ADAPTER -o OUT/"
    assert works(command.replace("ADAPTER", str(of_peft)), tmp_path)
    command = proposed("OUT")
    assert command == "consolidate OUT --merge-lora --base HF -o OUT/"
    assert works(command.replace("HF", str(of_peft.parent / "base")).replace("OUT/", "OUT.safetensors"), tmp_path)


def test_of_an_adapter_beside_its_base_the_whole_model_is_proposed(tmp_path):
    assert proposed(FIXTURES / "peft-lora-fsdp2" / "ckpt").endswith("-o OUT.safetensors")


def test_a_model_that_is_not_joined_is_shown(tmp_path):
    command = proposed(FIXTURES / "torch2.6.0-fsdp1-local-w4" / "rank0.pt")
    assert command.startswith("inspect ") and works(command, tmp_path)


def test_the_options_that_opened_it_are_named_again(tmp_path):
    for rank in range(3):
        shutil.copy(RANKS / f"rank{rank}.pt", tmp_path / f"m-{rank}.pt")
    command = proposed(tmp_path, "--ranks", "m-{rank}.pt")
    assert "--ranks 'm-{rank}.pt'" in command and works(command, tmp_path)
    files = [tmp_path / f"m-{rank}.pt" for rank in range(3)]
    command = proposed(*files)
    (tmp_path / "second").mkdir()
    assert all(str(file) in command for file in files) and works(command, tmp_path / "second")
    shapes = tmp_path / "full.safetensors"
    ckptools.consolidate(RANKS, shapes)
    report = inspect_report(ckptools.open(tmp_path / "m-0.pt", shapes=shapes, follow_symlinks=True))
    assert report.arguments.endswith(f"--follow-symlinks --shapes {shapes}")


def test_many_files_are_not_named_again(tmp_path):
    files = []
    for rank in range(3):
        for copy in range(3):
            files.append(tmp_path / f"{rank}{copy}.pt")
            shutil.copy(RANKS / f"rank{rank}.pt", files[-1])
    assert proposed(*files) == ""
