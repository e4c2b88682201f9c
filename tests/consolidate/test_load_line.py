"""The last line after writing is Python that loads the output: it is run as it stands, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from tests.truth import FIXTURES

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
ODD = ["m", "it's", '"so"', "a b", "100%d", "{x}", "back\\slash", "n\u00fcr\U0001f600", "li\nne"]

SUMS = "import json; print(json.dumps({k: v.double().sum().item() for k, v in state.items()}))"


def run(line: str, before: str = "", after: str = "", cwd: object = None) -> str:
    """Run a line of Python by itself; what it prints."""
    code = f"{before}\n{line}\n{after}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def alone(line: str, after: str) -> str:
    """Python that runs a line, and what comes after it, without the names that other lines have made."""
    return f"exec({line + chr(10) + after!r}, {{}})"


def sums() -> dict[str, float]:
    model = ckptools.open(COMPOSER, all_ranks=True).model
    return {name: tensor.load().double().sum().item() for name, tensor in model.items()}


@pytest.mark.slow
def test_the_last_line_on_stderr_loads_the_file_from_where_it_was_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = []
    for out in ("m.pt", "m.safetensors"):
        done = CliRunner().invoke(app, ["consolidate", str(COMPOSER), "-o", out, "--only", "model"])
        line = done.stderr.splitlines()[-1]
        assert line.startswith("load: ") and done.exit_code == 0
        code.append(alone(line.removeprefix("load: "), SUMS))
    assert [json.loads(told) for told in run("\n".join(code), cwd=tmp_path).splitlines()] == [sums()] * 2


@pytest.mark.slow
def test_any_name_is_spelled_so_that_python_reads_it(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    outs = [tmp_path / f"{name}{suffix}" for name in ODD for suffix in (".pt", ".safetensors")]
    lines = [ckptools.consolidate(tmp_path / "x.pt", out).load for out in outs]
    shown = run("\n".join(alone(line, "print(state['w'].sum().item())") for line in lines))
    assert shown.split() == ["3.0"] * len(outs)
    assert all(line.isprintable() for line in lines)


@pytest.mark.slow
def test_several_safetensors_are_read_into_one_dict(tmp_path):
    done = ckptools.consolidate(COMPOSER, tmp_path / "5%d.safetensors", max_shard_size=4_000)
    assert len(done.layout.files) > 2
    assert json.loads(run(done.load, after=SUMS)) == sums()


@pytest.mark.slow
def test_the_line_for_a_dcp_fills_the_state_dict_that_it_speaks_of(tmp_path):
    done = ckptools.consolidate(COMPOSER, tmp_path / "x.dcp")
    assert '"state", "rng"' in done.load
    shapes = {name: list(tensor.shape) for name, tensor in ckptools.open(COMPOSER).model.items()}
    before = f"import torch; state = {{'state': {{'model': {{k: torch.zeros(s) for k, s in {shapes}.items()}}}}}}"
    found = json.loads(run(done.load, before, "state = state['state']['model']; " + SUMS))
    assert found == pytest.approx(sums())


def test_a_dry_run_has_nothing_to_load(tmp_path):
    done = CliRunner().invoke(app, ["consolidate", str(COMPOSER), "-o", str(tmp_path / "m.safetensors"), "--dry-run"])
    assert done.exit_code == 0 and "load: " not in done.stderr
