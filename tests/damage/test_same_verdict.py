"""One fault, one verdict: in `inspect`, `inspect --all-ranks`, `verify` and `consolidate`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.formats import options as limits
from tests.damage.another_step import of_another_step
from tests.truth import FIXTURES

CHECKPOINTS = {
    "ShardedTensor": "composer-0.13.5-torch1.13.1-sharded-w4/ep0-ba5-rank{}.pt",
    "DTensor": "torch2.4.1-fsdp2-w3/rank{}.pt",
    "DTensor that names its rank": "torch2.13.0-fsdp2-tp2x2-w4/rank{}.pt",
    "flat parameters": "composer-0.14.1-torch2.0.1-local-w4/ep0-ba5-rank{}.pt",
}

Harm = Callable[[Path, Path], None]


def swapped(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def copied(one: Path, other: Path) -> None:
    shutil.copyfile(other, one)


def stale(one: Path, _: Path) -> None:
    one.write_bytes(of_another_step(one.read_bytes()) or b"")


def missing(one: Path, _: Path) -> None:
    one.unlink()


def cut(one: Path, _: Path) -> None:
    one.write_bytes(one.read_bytes()[: one.stat().st_size // 2])


FAULTS: dict[str, tuple[Harm, bool]] = {
    "two names swapped": (swapped, True),
    "one file copied over another": (copied, False),
    "one file of another step": (stale, False),
    "one file missing": (missing, False),
    "one file cut": (cut, False),
}
"""What is done, and whether the checkpoint is still whole; with names swapped it is whole and not resumable."""


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("opened", ["a rank", "another rank", "the folder"])
def test_every_command_gives_the_same_verdict(kind, fault, opened, tmp_path):
    folder, _, name = CHECKPOINTS[kind].partition("/")
    shutil.copytree(FIXTURES / folder, tmp_path / "run", ignore=shutil.ignore_patterns("truth*", "HOW*", "model*"))
    files = [tmp_path / "run" / name.format(rank) for rank in range(3)]
    harm, whole = FAULTS[fault]
    harm(files[1], files[2])
    path = str({"a rank": files[0], "another rank": files[2], "the folder": files[0].parent}[opened])
    told = [run("inspect", path, "--json"), run("inspect", path, "--json", "--all-ranks")]
    assert [(code, json.loads(out)["whole"]) for code, out in told] == [(1, whole)] * 2
    codes = [{p["code"] for p in json.loads(out)["problems"] if p["severity"] != "note"} for _, out in told]
    assert codes[0] == codes[1]
    verified = run("verify", path, "--json")
    assert (verified[0], json.loads(verified[1])["ok"]) == (1, False)
    assert run("consolidate", path, "-o", str(tmp_path / "out.pt"))[0] == (0 if whole else 4)


@pytest.mark.parametrize("kind", ["ShardedTensor", "DTensor that names its rank"])
def test_swapped_names_of_many_ranks_are_not_taken_for_a_missing_one(kind, tmp_path, monkeypatch):
    folder, _, name = CHECKPOINTS[kind].partition("/")
    shutil.copytree(FIXTURES / folder, tmp_path / "run")
    swapped(*(tmp_path / "run" / name.format(rank) for rank in (1, 2)))
    monkeypatch.setattr(limits, "MAX_RANKS", 0)
    ck = ckptools.open(tmp_path / "run" / name.format(1))
    assert (ck.whole, [p.code for p in ck.problems]) == (None, ["CK022", "CK022"])


@pytest.mark.parametrize("limit", ["MAX_RANKS", "MAX_STRUCTURE"])
def test_beyond_a_few_ranks_or_a_few_bytes_nothing_is_called_whole(limit, monkeypatch):
    monkeypatch.setattr(limits, limit, 0)
    path = str(FIXTURES / CHECKPOINTS["ShardedTensor"].format(0))
    code, out = run("inspect", path, "--json")
    told = json.loads(out)
    assert (code, told["whole"], told["verdict"]["depth"], told["problems"]) == (0, None, "listed", [])
    assert "all 4 rank files are here; contents not compared (verify)" in run("inspect", path)[1]
    assert ckptools.open(path).whole is None and ckptools.open(path, all_ranks=True).whole is True
