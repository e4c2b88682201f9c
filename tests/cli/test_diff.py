"""`ckptools diff`: exit codes, forms, and what is said where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.cli.commands import diff
from tests.diff.test_compare import SHARDED, saved, state


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["diff", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    other = state(step=4)
    other["model"]["b"][2] = 1.5
    return saved(tmp_path / "a.pt", state()), saved(tmp_path / "b.pt", other)


def test_what_differs_is_told_and_the_exit_code_is_1(two):
    code, stdout, stderr = run(*two, "--values")
    assert (code, stderr) == (1, "")
    lines = stdout.splitlines()
    assert lines[0].startswith("step 3 → 4, but 1 of 2 trained tensors did not move (by their stated CRC-32): a.w; ")
    assert lines[1].startswith("different: weights, counters; ")
    assert lines[2].startswith(f"A  {two[0]}   ") and lines[3].startswith(f"B  {two[1]}   ")
    assert lines[5].split()[:2] == ["weights", "differs"]
    assert any(line.split()[:3] == ["b", "2.2e-01", "5.0e-01"] for line in lines)


def test_what_is_the_same_is_called_that_only_when_every_byte_was_read(two):
    code, stdout, _ = run(two[0], two[0])
    assert code == 0 and "nothing that was compared differs; values of tensors not compared (--values)" in stdout
    assert "the same: " not in stdout and "weights          not compared" in stdout
    code, stdout, _ = run(two[0], two[0], "--values")
    assert code == 0 and "with the same stated CRC-32 not read (--every-byte)" in stdout and "the same: " not in stdout
    code, stdout, _ = run(two[0], two[0], "--every-byte")
    assert code == 0 and "the same: 6 tensors, 13 values\n" in stdout


@pytest.mark.slow
def test_layouts_that_differ_are_told_and_not_counted(tmp_path):
    out = tmp_path / "all.pt"
    assert CliRunner().invoke(app, ["consolidate", str(SHARDED), "-o", str(out)]).exit_code == 0
    code, stdout, _ = run(SHARDED, out, "--every-byte")
    assert code == 0 and "layout           not counted  A: dim 0 over 4 ranks" in stdout


def test_json_is_one_object_and_jsonl_a_row_a_line(two):
    code, stdout, _ = run(*two, "--values", "--json", "--sort", "change", "--limit", "1")
    found = json.loads(stdout)
    assert (code, found["same"], found["tensors"][0]["name"], len(found["tensors"])) == (1, False, "b", 1)
    code, stdout, _ = run(*two, "--jsonl")
    names = [json.loads(line)["name"] for line in stdout.splitlines()]
    assert code == 1 and {"a.w", "b", "step", "rng torch"} < set(names)


def test_nan_is_null_in_json_and_a_word_in_the_row(tmp_path):
    a = saved(tmp_path / "a.pt", {"w": torch.tensor([1.0, float("nan")])})
    b = saved(tmp_path / "b.pt", {"w": torch.tensor([1.0, 2.0])})
    found = json.loads(run(a, b, "--values", "--json")[1])
    row = found["tensors"][0]
    assert (row["value_a"], row["value_b"], row["first"], row["max"]) == ("nan", "2.0", [1], 0.0)
    assert "1 element not finite" in row["detail"]


def test_what_cannot_be_opened_is_a_line_and_code_3(tmp_path, two):
    for pair in ((two[0], tmp_path / "nowhere"), (tmp_path / "nowhere", two[0])):
        code, stdout, stderr = run(*pair)
        assert (code, stdout, stderr.count("\n")) == (3, "", 1) and "no such file" in stderr
    assert json.loads(run(*pair, "--json")[1])["same"] is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{a}"], "diff compares two"),
        (["{a}", "{b}", "--hash", "{a}.json"], "leave out B"),
        (["{a}", "--hash", "{a}.json", "--json"], "prints no answer"),
        (["{a}", "--hash", "{a}.json", "--section", "model"], "digests of every key"),
        (["{a}", "{b}", "--sort", "zzz", "--values"], "there is no such column"),
        (["{a}", "{b}", "--sort", "zzz"], "there is no such column"),
        (["{a}", "{b}", "--filter", "zzz"], "no key of A or B matches --filter 'zzz'"),
        (["{a}", "{b}", "--atol", "-1"], "a tolerance is at least 0"),
        (["{a}", "{b}", "--json", "--jsonl"], "give one of them"),
    ],
)
def test_arguments_that_do_not_fit_are_a_line_and_code_2(two, arguments, said):
    code, _, stderr = run(*(word.format(a=two[0], b=two[1]) for word in arguments))
    assert code == 2 and said in stderr and stderr.count("\n") == 1


def test_digests_are_written_here_and_compared_there(two, tmp_path):
    digests = tmp_path / "a.json"
    code, stdout, stderr = run(two[0], "--hash", digests)
    assert (code, stdout) == (0, "") and stderr.startswith(f"wrote {digests}: 6 tensors, ")
    assert run(digests, two[0])[0] == 0 and run(digests, two[1])[0] == 1
    code, _, stderr = run(two[0], "--hash", digests)
    assert code == 4 and "--force" in stderr and run(two[0], "--hash", digests, "--force")[0] == 0


def test_both_tolerances_are_said_where_one_was_needed(tmp_path):
    for n, value in enumerate((1.0, 1.2)):
        torch.save({"w": torch.tensor([value])}, tmp_path / f"{n}.pt")
    words = ["diff", str(tmp_path / "0.pt"), str(tmp_path / "1.pt"), "--rtol", "0.001", "--atol", "0.5"]
    assert ", within rtol 0.001 and atol 0.5" in CliRunner().invoke(app, words).stdout


def test_a_checkpoint_is_opened_once_to_compare_it_with_itself(two, monkeypatch):
    asked, opened = [], diff.opened
    monkeypatch.setattr(diff, "opened", lambda paths, how: asked.append(paths) or opened(paths, how))
    code, stdout, _ = run(two[0], two[0])
    assert code == 0 and "nothing that was compared differs" in stdout and asked == [[str(two[0])]]
