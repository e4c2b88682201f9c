"""Two ways in, one answer: the inert reader and torch itself give the same report on every rank-file sample."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ckptools.cli import app
from tests.truth import LOCAL, WHOLE, Known, one_of_each_form
from tests.versions import torch_that_loads

# DeepSpeed's files name its classes, and torch can make none of a package that is not here.
LOADABLE = [k for k in (*WHOLE, *LOCAL) if not k.name.startswith(("lightning-trainer", "deepspeed"))]

# A Namespace in DDP's snapshot: torch loads it only when the file is trusted.
TRUSTED = ("torch2.13.0-ddp-w4",)


def report(known: Known, *options: str) -> dict[str, object]:
    trust = ["--trust"] if known.name in TRUSTED and "torch" in options else []
    result = CliRunner().invoke(app, ["inspect", str(known.file), "--json", *options, *trust])
    assert result.exit_code == 0, result.stderr
    shown = json.loads(result.stdout)
    del shown["read"]
    return shown


@pytest.mark.slow
@pytest.mark.parametrize("every", [(), ("--all-ranks",)], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("known", one_of_each_form(LOADABLE), ids=lambda k: k.name)
def test_both_engines_give_the_same_report(known, every):
    torch_that_loads(known.file)
    assert report(known, *every) == report(known, "--engine", "torch", *every)
