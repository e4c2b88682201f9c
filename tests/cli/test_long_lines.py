"""Names from files have any length; the lines that tell of them do not."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from typer.testing import CliRunner

from ckptools.cli import app


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    return result.exit_code, result.stdout, result.stderr


def test_no_error_line_is_longer_than_a_screen_of_text(tmp_path: Path) -> None:
    path = tmp_path / f"{'x' * 200}.pt"
    torch.save({"model": {"w" * 9000: torch.ones(2), "w" * 9001: torch.zeros(2).to_sparse()}}, path)
    for command in (["inspect"], ["verify"], ["consolidate", "-o", str(tmp_path / "out.safetensors")]):
        _, out, err = run(command[0], path, *command[1:])
        assert max(map(len, (*out.splitlines(), *err.splitlines()))) <= 1100, command


def test_an_error_that_names_hundreds_of_classes_is_one_short_line(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "m.pt"
    made = {f"C{n}": type(f"C{n}", (), {"__module__": "__main__"}) for n in range(400)}
    for name, cls in made.items():
        monkeypatch.setattr(sys.modules["__main__"], name, cls, raising=False)
    torch.save({name: cls() for name, cls in made.items()}, path)
    code, _, err = run("inspect", path, "--engine", "torch")
    assert code == 4 and err.count("\n") == 1 and len(err) < 1000 + len(str(path)) and "and 392 more" in err
