"""`ckptools stats` at a prompt: tables that fit, options that mean what they say, and one line for what goes wrong."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.display.page import page_text
from ckptools.display.screen import Screen
from ckptools.model.records import Rows
from ckptools.stats.record import Statistics, Stats, drawable, figure, histogram, share
from tests.truth import FIXTURES

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["stats", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def odd(tmp_path):
    """A model with NaN and infinities, and an optimizer that has none."""
    w = torch.arange(12.0).reshape(3, 4)
    w[0, 1], w[2, 2], w[2, 3] = math.nan, math.inf, -math.inf
    torch.save({"model": {"a.w": w, "b": torch.full((9,), 0.5), "n": torch.tensor(7)}}, tmp_path / "m.pt")
    return tmp_path / "m.pt"


def test_nan_is_named_first_and_counted_and_makes_the_exit_code_1(odd):
    code, out, err = run(odd)
    first, lines = out.splitlines()[:3], out.splitlines()[3:]
    assert first == ["worth a look", "  a.w  1 NaN, 2 infinite, first at [0, 1]", ""]
    assert code == 1 and lines[0].split() == [
        "name", "dtype", "shape", "rms", "l2", "min", "max", "mean", "std", "zeros", "non-finite",
    ]  # fmt: skip
    assert lines[2].split()[:1] == ["a.w"] and lines[2].endswith("1 NaN, 2 Inf")
    assert lines[3].split() == ["b", "fp32", "[9]", "0.5", "1.5", "0.5", "0.5", "0.5", "0", "0", "0"]
    assert lines[-2:] == [
        "3 tensors, 22 elements, l2 16.92, model: 3 not finite",
        "no odd layers: not judged: no tensor is of a layer",
    ]
    assert "92 B of values read in" in err and "checksums not compared" in err


def test_json_has_no_nan_and_every_figure(odd):
    code, out, _ = run(odd, "--json")
    answer = json.loads(out, parse_constant=pytest.fail)
    assert code == 1 and answer["schema"] == "ckptools/stats/1" and answer["nonfinite"] == 3
    assert [(one["name"], one["what"]) for one in answer["suspects"]] == [("a.w", "not finite")]
    first = answer["rows"][0]
    assert [first[name] for name in ("name", "nan", "inf", "zeros")] == ["a.w", 1, 2, 1]
    torch.save({"w": torch.full((3,), math.nan)}, odd)
    row = json.loads(run(odd, "--jsonl")[1], parse_constant=pytest.fail)
    assert (row["nan"], row["rms"], row["min"], row["elements"]) == (3, None, None, 3)


def test_rows_are_sorted_limited_and_chosen(odd):
    names = lambda *options: [json.loads(line)["name"] for line in run(odd, "--jsonl", *options)[1].splitlines()]  # noqa: E731
    assert names("--sort", "rms") == ["n", "a.w", "b"] and names("--sort=-rms", "--limit", "1") == ["b"]
    assert names("--filter", "*w", "--filter", "n") == ["a.w", "n"] and names("--exclude", "a*") == ["b", "n"]
    assert "2 more (--limit 0 shows all)" in run(odd, "--limit", "1")[1]
    code, _, err = run(odd, "--sort", "size")
    assert code == 2 and err.count("error: ") == 1 and "there is no such column; they are name," in err


@pytest.mark.slow
def test_what_matches_nothing_is_said_with_where_it_would():
    code, out, err = run(COMPOSER, "--filter", "*exp_avg")
    assert (code, out) == (2, "")
    assert "no tensor matches --filter '*exp_avg'; " in err and "elsewhere: --section optimizer" in err
    assert run(COMPOSER, "--filter", "*exp_avg", "--section", "optimizer")[1].count(".exp_avg ") > 5
    every = run(COMPOSER, "--section", "all", "--jsonl")[1].splitlines()
    assert {json.loads(line)["section"] for line in every} > {"model", "optimizers.DecoupledAdamW"}
    assert run(COMPOSER, "--section", "modle")[0] == 2


def test_answers_of_their_own_are_not_mixed(odd):
    for options in (["--moments", "--dead-rows"], ["--moments", "--hist"], ["--dead-rows", "--per-rank"]):
        code, out, err = run(odd, *options)
        assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith("error: ")


def damaged(tmp_path, kind):
    shutil.copytree(COMPOSER, tmp_path / "run", ignore=shutil.ignore_patterns("truth*"))
    path = next((tmp_path / "run").glob("*rank2.pt"))
    if kind == "missing":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        shutil.copyfile(next((tmp_path / "run").glob("*rank1.pt")), path)
    return tmp_path / "run" / "ep0-ba5-rank0.pt"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["missing", "cut", "another rank's"])
def test_what_a_rank_does_not_have_is_said_and_the_rest_is_answered(tmp_path, kind):
    path = damaged(tmp_path, kind)
    code, out, err = run(path, "--json")
    rows = [row for row in json.loads(out)["rows"] if row["elements"] < row["numel"]]
    assert code == 1 and rows and all("gap " in row["problem"] and row["rms"] for row in rows)
    text = run(path)[1]
    assert text.splitlines()[0].split()[-1] == "read" and f"{len(rows)} not read in full" in text
    assert f"why not all of it: ckptools verify {path}" in err and "l2 " not in text.splitlines()[-1]
    ranks = [json.loads(line) for line in run(path, "--per-rank", "--jsonl")[1].splitlines()]
    assert {r["rank"] for r in ranks if r["problem"]} == {2}


def test_a_file_that_goes_bad_between_opening_and_reading_is_named_in_its_rows(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(3), "b": torch.ones(300_000)}, tmp_path / "m.pt")
    from ckptools.cli.commands import stats

    opened = stats.opened

    def cut_when_opened(*arguments, **how):
        checkpoint = opened(*arguments, **how)
        (tmp_path / "m.pt").write_bytes((tmp_path / "m.pt").read_bytes()[:200_000])
        return checkpoint

    monkeypatch.setattr(stats, "opened", cut_when_opened)
    code, out, _ = run(tmp_path / "m.pt", "--json")
    a, b = json.loads(out)["rows"]
    assert (code, a["problem"], a["elements"], b["elements"]) == (1, "", 3, 0)
    assert b["problem"].startswith("m.pt: ends at byte 200000; expected ")


def test_where_nothing_can_be_read_there_is_an_error_and_no_table(tmp_path):
    torch.save({"w": torch.ones(3, device="meta")}, tmp_path / "m.pt")
    code, out, err = run(tmp_path / "m.pt")
    assert (code, out) == (3, "") and err.endswith(
        "nothing of 1 tensor could be read; w: was saved without values (meta)\n"
    )
    answer = json.loads(run(tmp_path / "m.pt", "--json")[1])
    assert answer["exit_code"] == 3 and "was saved without values" in answer["error"]
    assert run(tmp_path / "none.pt")[0] == 3


def made():
    figures = (0.02593, 174.1, -0.4213, 0.4213, -1.234e-05, 0.02593)
    row = Stats(
        "blocks.31.attention.projection.weight", "model", None, "float32", (4096, 4096), 10, 10, *figures, 1, 3, 1
    )
    other = Stats("head.weight", "model", None, "bfloat16", (8,), 10, 10, 1.0, 1.0, 1.0, 2.0, 0.5, 0.25, 2, 0, 0)
    return Statistics(Path("m.pt"), "values", 60, 10, 1.0, 4, 0, 8, 0.1, Rows([other, *[row] * 59]))


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_table_fits_its_screen_by_leaving_out_columns_and_never_cuts_a_figure(width):
    lines = page_text(made(), Screen(width, 40)).splitlines()
    assert max(map(len, lines)) <= width and len(lines) < (90 if width == 60 else 50)
    rows = [line for line in lines if line.startswith("blocks.")]
    assert len(rows) == 39
    assert all("0.02593  -0.4213" in line.replace("174.1  ", "") and "3 NaN, 1 Inf" in line for line in rows)
    assert ("mean" in lines[0].split()) == (width >= 120) and ("dtype" in lines[0].split()) == (width >= 200)


def test_histograms_are_drawn_with_what_a_stream_can_write(odd):
    assert histogram((0, 1, 800, 400)) == " ▁█▄" and histogram((0, 1, 800, 400), ascii=True) == " .@="
    assert drawable("utf-8") and not drawable("ascii") and not drawable(None) and not drawable("latin-1")
    out = run(odd, "--hist")[1]
    assert "█" in out and out.splitlines()[3].split() == ["name", "min", "histogram", "max", "non-finite"]


def test_figures_are_short_and_shares_do_not_hide_a_single_element():
    assert [figure(v) for v in (None, 7, 10**9, 0.123456, -0.0, math.inf)] == ["-", "7", "1e+09", "0.1235", "0", "inf"]
    shares = [share(*pair) for pair in ((0, 9), (1, 10**9), (1, 8), (9, 9), (10**9 - 1, 10**9), (0, 0))]
    assert shares == ["0", "<0.01%", "12.5%", "all", ">99.9%", "0"]


def test_odd_rows_of_every_kind_are_drawn(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Embedding(30, 4)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.arange(4, 30)).sum().backward()
    adam.step()
    torch.save({"model": {**model.state_dict(), "b": torch.ones(1)}, "optimizer": adam.state_dict()}, tmp_path / "m.pt")
    code, out, _ = run(tmp_path / "m.pt", "--dead-rows")
    assert code == 0 and out.splitlines()[2].split(maxsplit=5)[-1].endswith("no gradient 0, 1, 2, 3")
    assert out.splitlines()[-1] == "1 matrix, 1 with dead rows"
    code, out, _ = run(tmp_path / "m.pt", "--moments")
    assert (
        code == 0
        and "lr*update/weight" in out
        and "with bias correction" in out
        and "1 parameter, optimizer: all finite" in out
    )
