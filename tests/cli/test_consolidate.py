"""`ckptools consolidate`: what it prints, and where."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.consolidate.options import ConsolidateOptions, write_options
from ckptools.consolidate.run import consolidate as run_here
from ckptools.errors import UsageError
from tests.cli.test_json_schemas import problems
from tests.truth import FIXTURES

COMPOSER = str(FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4")
HSDP = FIXTURES / "torch2.6.0-fsdp1-hsdp2x2-w4"


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["consolidate", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_it_says_what_it_wrote_on_stdout_and_nothing_else(tmp_path):
    code, stdout, stderr = run(COMPOSER, "-o", tmp_path / "m.safetensors", "--only", "model")
    wrote, tensors, checksums = stdout.splitlines()
    assert (code, wrote) == (0, f"wrote {tmp_path / 'm.safetensors'}")
    assert tensors.startswith("18 tensors, ") and checksums == "source checksums: 63 records right"
    assert [line.split(":")[0] for line in stderr.splitlines()] == ["load"]


def test_what_is_not_written_by_default_is_counted_and_named(tmp_path):
    _, _, stderr = run(COMPOSER, "-o", tmp_path / "m.safetensors")
    note, load = stderr.splitlines()
    assert note.startswith(
        "note: the model alone is written, without 36 tensors (32 in optimizers.DecoupledAdamW, 4 in"
    )
    assert "what is no tensor (schedulers.LambdaLR, " in note and note.endswith("; --only all writes everything")
    assert load.startswith("load: ")


def test_what_keep_types_keeps_is_named_with_the_way_to_load_it(tmp_path):
    _, _, stderr = run(COMPOSER, "-o", tmp_path / "all.pt", "--keep-types")
    note, load = stderr.splitlines()
    assert "does not make datetime.timedelta, " in note and "weights_only=False" in note
    assert load.endswith('all.pt", weights_only=False)')


def test_the_cause_is_below_the_first_line_with_its_way_out_and_what_follows(tmp_path):
    shutil.copytree(COMPOSER, tmp_path / "run")
    (tmp_path / "run" / "ep0-ba5-rank1.pt").unlink()
    code, stdout, stderr = run(tmp_path / "run", "-o", tmp_path / "m.pt")
    lines = stderr.splitlines()
    assert (code, stdout) == (4, "") and "NOT WHOLE: rank 1 missing; 48 tensors have gaps; " in lines[0]
    assert [line.strip() for line in lines[1:]] == [
        "rank 1  CK001  no file ep0-ba5-rank1.pt",
        "put the file beside the others; --allow-missing writes what is whole",
        "-> 48 tensors have gaps",
    ]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("5GB", 5 * 10**9), ("500MiB", 500 * 2**20), ("1.5k", 1500), ("42", 42), ("3 tb", 3 * 10**12)]
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert write_options(ConsolidateOptions(max_shard_size=text), False).max_shard_size == nbytes


@pytest.mark.parametrize("text", ["", "five", "-1", "5XB", "0"])
def test_a_size_that_is_none_is_a_usage_error(text):
    with pytest.raises(UsageError, match="5GB"):
        write_options(ConsolidateOptions(max_shard_size=text), False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"check": True}, {"dtype": "bf16"}, {"check": True, "allow_missing": True}], ids=str
)
@pytest.mark.parametrize("out", ["m.pt", "m.safetensors", "m.dcp"])
def test_progress_ends_at_a_hundred_percent(tmp_path, out, options):
    told, expected = list[int](), list[int]()
    how = ConsolidateOptions(only="model", **options)
    run_here(COMPOSER, tmp_path / out, how, lambda nbytes, _: told.append(nbytes), expected.append)
    assert len(told) > 10 and sum(told) == expected[-1]


# -- JSON -----------------------------------------------------------------------------------------------------------


def answer(*words: object) -> dict[str, Any]:
    code, stdout, _ = run(*words, "--json")
    found: dict[str, Any] = json.loads(stdout)
    assert problems("consolidate", found) == [] and found.get("exit_code", 0) == code
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["written", "planned"])
def test_json_has_each_key_with_its_place_as_the_record_has_it(dry, tmp_path):
    out = tmp_path / "m.safetensors"
    found = answer(COMPOSER, "-o", out, *dry)
    assert (found["files"], found["dry_run"], out.exists()) == ([str(out)], bool(dry), not dry)
    expected = ckptools.consolidate(COMPOSER, tmp_path / "other.safetensors", dry_run=True)
    for row, key in zip(found["rows"], expected.rows, strict=True):
        assert (row["name"], row["shape"], row["offset"], row["bytes"]) == (key[0], list(key[2]), key[4], key[5])
    assert sum(row["bytes"] for row in found["rows"]) == expected.planned.nbytes and found["nbytes"] == expected.nbytes
    planned = {"nbytes": expected.planned.nbytes, "files": 4, "copies": len(expected.planned.copies), "no_room": None}
    assert found["planned"] == (planned if dry else None)


def test_json_names_the_ranks_that_replicas_make_up_for(tmp_path):
    shutil.copytree(HSDP, tmp_path / "run")
    (tmp_path / "run" / "rank3.pt").unlink()
    found = answer(tmp_path / "run", "-o", tmp_path / "m.pt")
    assert found["from_replicas"] == {"lost": [3], "by": [0, 1, 2]} and list(found["left_out"]) == ["rng.3"]
    assert [row["name"] for row in found["rows"] if row["left_out"]] == ["rng.3"]
    assert answer(HSDP, "-o", tmp_path / "whole.pt")["from_replicas"] is None


@pytest.mark.parametrize(("fill", "filled"), [([], ""), (["--fill", "nan"], "nan")], ids=["left out", "filled"])
def test_json_has_the_holes_of_what_is_left_out_or_filled(fill, filled, tmp_path):
    shutil.copytree(COMPOSER, tmp_path / "run")
    (tmp_path / "run" / "ep0-ba5-rank1.pt").unlink()
    found = answer(tmp_path / "run", "-o", tmp_path / "m.safetensors", "--allow-missing", *fill)
    assert found["filled"] == filled and found["missing"] and bool(found["left_out"]) is not bool(filled)
    holes = {row["name"]: row["missing"] for row in found["rows"] if row["missing"]}
    assert holes == (found["missing"] if filled else {})
    assert {row["name"] for row in found["rows"] if row["left_out"]} == set(found["left_out"])


def test_json_of_a_plan_that_does_not_fit_on_the_disk_says_so_and_is_the_only_object(tmp_path):
    # One stored element that stands for 2**50: 4 PiB when written out.
    torch.save({"w": torch.zeros(1).expand(2**50)}, tmp_path / "run")
    code, stdout, stderr = run(tmp_path / "run", "-o", tmp_path / "m.safetensors", "--dry-run", "--json")
    assert problems("consolidate", json.loads(stdout)) == [] and code == 4
    assert "needs 45035996273" in json.loads(stdout)["planned"]["no_room"] and "needs 45035996273" in stderr


def test_what_is_refused_is_json_too_and_leaves_nothing(tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(f"{COMPOSER}/ep0-ba5-rank0.pt", tmp_path / "run")
    found = answer(tmp_path / "run" / "ep0-ba5-rank0.pt", "-o", tmp_path / "m.pt")
    assert found["exit_code"] == 4 and "NOT WHOLE: ranks 1..3 missing" in found["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    code, stdout, stderr = run(COMPOSER, "-o", tmp_path / "m.pt", "--dry-run", "--copies", "--json")
    assert (code, stdout) == (2, "") and "--copies prints a table" in stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--copies"], "--copies prints the copies of a plan"), (["--dry-run", "--check", "--unchecked"], "give one of")],
)
def test_an_option_that_could_do_nothing_is_refused_before_a_file_is_written(tmp_path, words, said):
    code, stdout, stderr = run(COMPOSER, "-o", tmp_path / "m.pt", *words)
    assert (code, stdout, [*tmp_path.iterdir()]) == (2, "", []) and said in stderr


def test_quiet_leaves_out_the_hint_and_not_what_was_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptools.cli.printing.Printing.quiet", False)  # set by -q, and put back behind this test
    _, _, stderr = run(COMPOSER, "-o", tmp_path / "m.safetensors", "-q")
    assert "load: " not in stderr and stderr.startswith("note: the model alone is written")
