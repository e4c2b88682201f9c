"""`ckptools tree` as a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from ckptools.cli import app
from tests.truth import FIXTURES

FSDP = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
STARTED = [sys.executable, "-m", "ckptools"]


def run(*words: object):
    return CliRunner().invoke(app, ["tree", *map(str, words)])


def test_every_section_is_a_line_and_what_is_below_it_is_drawn():
    done = run(FSDP)
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and lines[0].startswith("torch2.13.0-fsdp1-sharded-w4   ")
    roots = [line.split()[0] for line in lines[1:] if line[0] not in "├└│ "]
    assert roots == ["model", "optim", "scheduler", "step", "rng"]


def test_a_limit_shortens_the_rows_and_not_what_they_are_counted_to():
    answer = json.loads(run(FSDP, "--section", "model", "--sort", "bytes", "--limit", 2, "--json").stdout)
    assert len(answer["rows"]) == 2 and answer["tensors"] > 2
    assert answer["rows"][0]["bytes"] >= answer["rows"][1]["bytes"]


@pytest.mark.parametrize(
    "words", [["--depth", "0"], ["--sort", "size2"], ["--section", "nodel"], ["--json", "--jsonl"]]
)
def test_mistakes_are_one_line(words):
    done = run(FSDP, *words)
    assert (done.exit_code, done.stdout if "--json" not in words else "") == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_checkpoint_that_is_not_whole_is_shown_and_that_is_said(tmp_path):
    for name in ("rank0.pt", "rank1.pt"):
        (tmp_path / name).write_bytes((FSDP / name).read_bytes())
    done = run(tmp_path / "rank0.pt")
    assert done.exit_code == 0 and done.stderr.startswith("this checkpoint is not whole: ckptools inspect ")
    assert done.stdout.splitlines()[1:] == run(FSDP / "rank0.pt").stdout.splitlines()[1:]


def test_a_key_that_only_another_rank_has_is_found_where_all_ranks_are_asked_for(large_world, tmp_path):
    for rank in range(3):
        own = {"seen": 7} | ({"late": 1} if rank == 2 else {})
        torch.save({"model": {"w": torch.ones(3)}, "sampler": own}, tmp_path / f"ckpt_rank{rank}.pt")
    names = {}
    for words in ((), ("--all-ranks",)):
        lines = run(tmp_path / "ckpt_rank0.pt", "--jsonl", *words).stdout.splitlines()
        names[words] = [json.loads(line)["name"] for line in lines]
    assert names == {(): ["w", "sampler.seen"], ("--all-ranks",): ["w", "sampler.seen", "sampler.late"]}


@pytest.mark.slow
def test_a_stream_without_box_characters_gets_ascii():
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = subprocess.run([*STARTED, "tree", str(FSDP)], capture_output=True, env=environment, check=True)
    assert b"\n|- " in done.stdout and b"\\u" not in done.stdout and done.stdout.isascii()


@pytest.mark.parametrize(
    "words, prefixes", [((), ["", "disc"]), (("--model", "all"), ["gen", "disc"]), (("--model", "disc"), [""])]
)
def test_every_model_but_the_one_that_is_looked_at_has_its_name_before_its_keys(tmp_path, words, prefixes):
    torch.save({"gen": {"w": torch.ones(2)}, "disc": {"w": torch.ones(3)}}, tmp_path / "two.pt")
    done = CliRunner().invoke(app, ["tree", str(tmp_path / "two.pt"), "--json", *words])
    assert [section["prefix"] for section in json.loads(done.stdout)["sections"]] == prefixes
