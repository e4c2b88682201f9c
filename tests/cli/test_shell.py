from __future__ import annotations

import builtins
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from ckptools import api
from ckptools.cli import app
from tests.truth import FIXTURES

RANK_1 = str(FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4" / "ep0-ba5-rank1.pt")


def run(*args, stdin=None):
    result = CliRunner().invoke(app, ["shell", *map(str, args)], input=stdin)
    return result.exit_code, result.stdout, result.stderr


def test_a_command_prints_the_value_of_an_expression():
    assert run(RANK_1, "-c", 'shard["state"]["schedulers"]["LambdaLR"]["base_lrs"]') == (0, "[0.003]\n", "")


@pytest.mark.slow
def test_the_checkpoint_is_there_as_open_returns_it_whatever_it_is():
    assert run(RANK_1, "-c", "ck.step.value, ckptools.open(ck.path).ranks")[1] == "(5, (0, 1, 2, 3))\n"
    assert run(FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4", "-c", "len(ck.model)")[1] == "18\n"
    code, _, err = run(FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4", "-c", "shard")
    assert code == 1 and "NameError" in err


def test_a_command_may_be_several_statements():
    command = 'st = shard["state"]["model"]["model.emb.weight"]\nst._ckptools_rank; st.size()\nfor i in range(2): i'
    assert run(RANK_1, "-c", command) == (0, "1\ntorch.Size([33, 17])\n0\n1\n", "")


def test_collectives_of_one_process_work_inside():
    assert run(RANK_1, "-c", "import torch.distributed as d; d.get_world_size()")[:2] == (0, "1\n")


def test_an_error_of_the_command_is_python_s_own_and_exit_code_1():
    code, out, err = run(RANK_1, "-c", 'shard["nope"]')
    assert (code, out) == (1, "")
    assert err.endswith("KeyError: 'nope'\n") and "ckptools" not in err


def test_a_syntax_error_shows_the_line():
    code, out, err = run(RANK_1, "-c", "shard[")
    assert (code, out) == (1, "")
    assert "<command>" in err and "SyntaxError" in err and "Traceback" not in err


def test_code_from_stdin_runs_as_a_script():
    assert run(RANK_1, stdin="x = len(shard)\nx\nprint(x)\n") == (0, "2\n", "")


def test_a_script_may_choose_its_exit_code():
    assert run(RANK_1, stdin="import sys\nsys.exit(5)")[0] == 5


def test_an_interrupted_command_ends_like_any_other():
    code, _, err = run(RANK_1, "-c", "raise KeyboardInterrupt")
    assert (code, err) == (130, "interrupted; nothing was left behind\n")


def test_a_file_of_a_foreign_class_is_opened_without_what_torch_would_make_of_it(tmp_path):
    torch.save({"x": os.getcwd, "w": torch.ones(2)}, tmp_path / "a.pt")
    code, out, err = run(tmp_path / "a.pt", "-c", "ck.tree['w'].shape")
    assert (code, out, err.count("\n")) == (0, "(2,)\n", 1)
    assert "no shard here, only ck: " in err and "getcwd" in err and "--trust" in err
    assert run(tmp_path / "a.pt", "-c", "shard")[0] == 1
    assert run(tmp_path / "a.pt", "--trust", "-c", 'shard["x"].__name__') == (0, "'getcwd'\n", "")


@pytest.fixture
def without_ipython(monkeypatch):
    real = builtins.__import__

    def find(name, *args, **kwargs):
        if name == "IPython":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", find)


def test_the_prompt_has_the_shard_and_says_what_it_is(monkeypatch, without_ipython, capsys):
    lines = iter(["len(shard)", "shard['nope']", "exit_code = 3"])

    def typed(_prompt=""):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    shell = sys.modules["ckptools.cli.commands.shell"]  # the package has the command itself under this name
    names = {"ck": api.open(RANK_1), "shard": {"state": {}, "rng\x1b[31m": []}}
    shell.prompt(names, shell.banner(names, [RANK_1]))
    out, err = capsys.readouterr()
    assert (out, names["exit_code"]) == ("2\n", 3)
    assert "ep0-ba5-rank1.pt as torch loads it, a dict: state, rng\\x1b[31m" in err and "KeyError" in err
    assert "ck = <Checkpoint ep0-ba5" in err


@pytest.mark.slow
def test_it_needs_no_launcher_and_leaves_by_a_broken_pipe_quietly():
    command = [sys.executable, "-m", "ckptools", "shell", RANK_1, "-c", "for i in range(10**5): print('x' * 99)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 0)
    process.stderr.close()
