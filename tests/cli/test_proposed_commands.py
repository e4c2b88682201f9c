"""Every command that is proposed, typed as it is printed, works and leads on: to nothing that was just answered."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ckptools.cli import app
from tests.thorough import THOROUGH
from tests.truth import FIXTURES, SEVERAL

USUAL = (
    "torch2.13.0-fsdp1-sharded-w4", "torch2.13.0-ddp-w4", "dcp-objects", "hf-llama-safetensors-bf16",
    "deepspeed-z1-fp32", "megatron-tp2pp2-fp32",
)  # fmt: skip
NAMES = sorted(p.name for p in FIXTURES.iterdir() if p.is_dir() and p not in SEVERAL) if THOROUGH else USUAL
DAMAGES = ("sound", "cut", "gone")


def run(line: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    return result.exit_code, result.stdout + result.stderr


def proposed(text: str) -> list[str]:
    found = (re.match(r"\s*(?:next: |try: |use it: )?(ckptools [a-z]+ .*?)(?:  +#.*)?$", x) for x in text.splitlines())
    return [one[1] for one in found if one and "PATH" not in one[1]]


def followed(line: str, before: tuple[str, ...] = (), codes: dict[str, int] | None = None) -> dict[str, int]:
    """The exit codes of a command and of all that it and those lead to; none leads back to one before it."""
    codes = {} if codes is None else codes
    code, text = run(f"{line} --force" if line.startswith("ckptools consolidate") else line)
    assert code not in (2, 70), f"{line} is {code}:\n{text}"
    codes[line] = code
    for following in proposed(text):
        assert following not in (*before, line), f"{(*before, line)} lead to {following} again:\n{text}"
        if following not in codes:
            followed(following, (*before, line), codes)
    return codes


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_proposed_works_and_leads_on(name, damage, tmp_path, monkeypatch):
    shutil.copytree(FIXTURES / name, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    path = Path("run/ckpt") if Path("run/ckpt").is_dir() else Path("run")
    files = [f for f in sorted(path.rglob("*")) if f.suffix in (".pt", ".distcp", ".safetensors", ".bin")]
    files = [f for f in files if not f.name.startswith("truth")]
    if damage != "sound" and files:
        files[-1].write_bytes(files[-1].read_bytes()[: files[-1].stat().st_size // 2]) if damage == "cut" else None
        files[-1].unlink() if damage == "gone" and len(files) > 1 else None
    for start in ("inspect", "verify --deep --values", "doctor"):
        verb, *options = start.split()
        followed(shlex.join(["ckptools", verb, str(path), *options]))


def test_a_nan_leads_to_where_it_is_and_not_to_a_file_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"a.weight": torch.tensor([1.0, float("nan")])}}, "run.pt")
    codes = followed("ckptools doctor run.pt --deep")
    assert "ckptools stats run.pt --sort nan" in codes and not any("consolidate" in line for line in codes)
    _, text = run("ckptools doctor run.pt --deep")
    assert "ckptools verify run.pt --deep --values" in text


def test_who_has_read_every_copy_is_not_told_to_do_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for rank in range(3):
        state = {"model": {"a.weight": torch.full((8,), float(rank))}, "rank": rank, "world_size": 3}
        torch.save(state, f"rank{rank}.pt")
    _, plain = run("ckptools verify rank0.pt")
    _, deep = run("ckptools verify rank0.pt --deep")
    assert "verify --deep" not in deep and ("verify --deep" in plain or "CK105" not in plain)
