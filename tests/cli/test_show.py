"""`ckptools show` as a program."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.contents.show import UnequalValues
from ckptools.contents.tree import as_data
from ckptools.files.opening import OpenFiles
from ckptools.formats.rank_search.rank_checks import compare_ranks
from ckptools.formats.shared.merge import Merge
from ckptools.keys.entries import entries_of
from tests.display.made import checkpoint
from tests.truth import FIXTURES

FSDP = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
MESH = FIXTURES / "torch2.13.0-fsdp2-tp2x2-w4"
COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"


def run(path, *words: object):
    return CliRunner().invoke(app, ["show", str(path), *map(str, words)])


def told(path, *words: object):
    return json.loads(run(path, *words, "--json").stdout)


@pytest.fixture
def two_of_four(tmp_path):
    """Ranks 0 and 1 are here, rank 2 is cut short, rank 3 is gone."""
    for rank in (0, 1, 2):
        shutil.copy(FSDP / f"rank{rank}.pt", tmp_path)
    data = (tmp_path / "rank2.pt").read_bytes()
    (tmp_path / "rank2.pt").write_bytes(data[: len(data) // 2])
    return tmp_path / "rank0.pt"


def test_a_tensor_that_is_cut_in_two_dimensions_has_a_grid():
    ck = ckptools.open(MESH, all_ranks=True)
    cut = {n: t for n, t in ck.model.items() if len({s.box.offsets for s in t.shards}) == 4}
    name = next(n for n, t in cut.items() if all(len({s.box.offsets[d] for s in t.shards}) == 2 for d in (0, 1)))
    lines = run(MESH, name).stdout.splitlines()
    assert "dim 0 down, dim 1 across" in lines
    grid = [line for line in lines if line.startswith("[") and set(line) <= set("[]0123")]
    assert {"".join(sorted(set(line) - set("[]"))) for line in grid} in ({"01", "23"}, {"02", "13"})


def test_holes_are_named_and_what_is_here_is_shown(two_of_four):
    done = run(two_of_four, "emb.weight")
    assert done.exit_code == 1
    assert "MISSING: no file here holds " in done.stdout and "(ranks 2, 3): [" in done.stdout
    strip = next(line for line in done.stdout.splitlines() if line.startswith("dim 0"))
    assert set(strip.split()[2]) == set("[01.]")
    row = told(two_of_four, "emb.weight")["rows"][0]
    assert [shard["status"] for shard in row["shards"]] == ["here", "here", "missing", "missing"]
    assert 0 < row["statistics"]["elements"] == row["params"] - row["missing"]


def test_the_one_rank_that_would_hold_a_hole_is_named_in_the_singular(tmp_path):
    shutil.copytree(FSDP, tmp_path / "ck")
    (tmp_path / "ck" / "rank3.pt").unlink()
    assert "(rank 3): [" in run(tmp_path / "ck", "emb.weight").stdout


@pytest.mark.slow
def test_a_slice_prints_its_elements_and_one_in_a_hole_says_so(two_of_four):
    whole = ckptools.open(FSDP).model["emb.weight"].load()
    done = run(two_of_four, "emb.weight", "--values", "0:2,:3")
    printed = [[float(cell) for cell in line.split()] for line in done.stdout.splitlines()[-2:]]
    assert [pytest.approx(row, rel=1e-8) for row in whole[:2, :3].tolist()] == printed
    assert told(two_of_four, "emb.weight", "--values", "0:2,:3")["rows"][0]["values"] == whole[:2, :3].tolist()
    done = run(two_of_four, "emb.weight", "--values", "-1")
    assert done.exit_code == 1 and "no file here holds" in done.stdout


def test_a_slice_that_does_not_fit_one_of_several_tensors_is_said_in_its_row():
    rows = told(FSDP, "model", "--values", "0,0")["rows"]
    fits = [row for row in rows if len(row["shape"]) >= 2]
    assert all(row["values"] is not None and not row["problem"] for row in fits) and fits
    assert all("indices for a tensor" in row["problem"] for row in rows if len(row["shape"]) < 2)
    assert run(FSDP, "norm.weight", "--values", "0,0").exit_code == 2


@pytest.mark.slow
def test_values_are_shown_in_full():
    groups = run(COMPOSER, "optimizer.param_groups.0").stdout
    assert "betas" in groups and "weight_decay" in groups
    assert run(COMPOSER, "timestamp").exit_code == 0
    states = told(COMPOSER, "rng.0.python.1")["rows"][0]
    assert len(states["value"]) == 625 and states["note"].startswith("625 integers, crc ")
    assert str(states["value"][600]) in run(COMPOSER, "rng.0.python.1").stdout


def test_random_states_of_all_ranks_are_counted():
    lines = run(COMPOSER, "rng").stdout.splitlines()
    assert {line.split(";")[0] for line in lines[:3]} >= {"torch: 4 distinct of 4", "numpy: 4 distinct of 4"}
    streams = {row["stream"]: row for row in told(FSDP / "rank0.pt", "rng")["streams"]}
    assert streams["torch"]["ranks"] == 4 and set(streams["torch"]["fingerprints"]) == {"0", "1", "2", "3"}


def test_ranks_that_have_one_state_are_counted_as_one():
    assert run(FSDP, "rng").stdout.splitlines()[0].startswith("torch: 1 distinct of 4; fingerprint rank 0 ")


@pytest.mark.parametrize("words", [(), ("emb.weight", "--values", "x"), ("emb.weight", "--limit", "-1")])
def test_mistakes_are_usage_errors(words):
    assert run(FSDP, *words).exit_code == 2


# -- values that differ between ranks ----------------------------------------------------------------------------


@pytest.fixture
def unlike(tmp_path):
    """A function that saves rank files from what each rank has at some keys."""

    def save(**by_rank: list[object]):
        for rank in range(len(next(iter(by_rank.values())))):
            here = {key: values[rank] for key, values in by_rank.items() if values[rank] is not None}
            state = {"model": {"w": torch.ones(4)}, "step": 7, **here}
            torch.save({"state": state}, tmp_path / f"ep0-ba7-rank{rank}.pt")
        return tmp_path / "ep0-ba7-rank0.pt"

    return save


def test_ranks_that_hold_other_values_have_a_row_for_each(unlike):
    path = unlike(timestamp=[{"batch": 11500}, {"batch": 11500}, {"batch": 11000}, {"batch": 11500}])
    assert run(path, "timestamp.batch").stdout.splitlines() == [
        "timestamp.batch  ranks 0, 1, 3:  11500",
        "timestamp.batch  rank 2:  11000",
    ]
    assert told(path, "timestamp.batch")["rows"][0]["ranks"] == [
        {"ranks": [0, 1, 3], "value": 11500, "note": ""},
        {"ranks": [2], "value": 11000, "note": ""},
    ]
    lines = [line.split() for line in run(path, "timestamp", "step").stdout.splitlines()]
    assert ["timestamp.batch", "0,", "1,", "3", "11500"] in lines and ["timestamp.batch", "2", "11000"] in lines
    assert ["step", "-", "7"] in lines


def test_what_only_some_ranks_have_is_not_given_to_the_others(unlike):
    path = unlike(notes=[{"seen": 1, "of": 2}, {"seen": 1}, {"seen": 1}])
    assert run(path, "notes.of").stdout.splitlines() == ["notes.of  rank 0:  2", "notes.of  ranks 1, 2:  nothing there"]
    assert told(path, "notes.seen")["rows"][0]["ranks"] == []


def test_a_place_in_the_data_that_one_rank_lacks_is_not_taken_from_another(unlike):
    path = unlike(dataset_state=[{"sample": 1, "shuffled": 5}, {"sample": 2}])
    assert run(path, "dataset_state.shuffled").stdout.splitlines() == [
        "dataset_state.shuffled  rank 0:  5",
        "dataset_state.shuffled  rank 1:  nothing there",
    ]


def test_settings_of_an_optimizer_that_differ_are_shown_by_rank(unlike):
    def adam(lr: float) -> dict[str, object]:
        parameter = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.AdamW([parameter], lr=lr)
        parameter.sum().backward()
        optimizer.step()
        return optimizer.state_dict()

    rows = told(unlike(optimizer=[adam(0.5), adam(0.25)]), "optimizer.param_groups.0.lr")["rows"]
    assert [(of["ranks"], of["value"]) for of in rows[0]["ranks"]] == [([0], 0.5), ([1], 0.25)]


def test_values_in_foreign_objects_are_held_against_each_other(unlike):
    path = unlike(args=[argparse.Namespace(rank=rank, lr=0.1) for rank in range(3)])
    rows = {row["name"]: row["ranks"] for row in told(path, "args")["rows"]}
    assert [of["value"] for of in rows["args.rank"]] == [0, 1, 2] and rows["args.lr"] == []


def test_of_many_ranks_one_alone_is_read_for_what_all_share_and_that_is_said(large_world, unlike):
    rates = [{"last_epoch": 7, "base_lrs": [rank // 33]} for rank in range(34)]
    path = unlike(scheduler=rates, timestamp=[{"batch": 7 + rank // 33} for rank in range(34)])
    done = run(path, "scheduler.base_lrs")
    assert done.stdout == "scheduler.base_lrs  [0]\n"
    assert "33 other ranks not read, and may hold other values: --all-ranks" in done.stderr
    assert told(path, "scheduler.base_lrs")["not_read"] == 33
    everything = run(path, "scheduler.base_lrs", "--all-ranks")
    assert everything.stdout.endswith("rank 33:  [1]\n") and "not read" not in everything.stderr
    assert "rank 33:  8" in run(path, "timestamp.batch").stdout
    found = ckptools.open(path).show("scheduler.base_lrs", all_ranks=True).rows[0].ranks
    assert [of.ranks for of in found] == [tuple(range(33)), (33,)]


def test_what_a_lost_rank_held_is_said_to_be_unknown(unlike):
    path = unlike(timestamp=[{"batch": 7}] * 3)
    (path.parent / "ep0-ba7-rank1.pt").write_bytes(b"PK")
    done = run(path, "timestamp.batch")
    assert done.stdout == "timestamp.batch  7\n" and "what 1 rank had is not known" in done.stderr


def test_random_states_that_others_gathered_are_known_of_a_lost_rank_too(unlike):
    gathered = [{"torch": torch.full((16,), rank)} for rank in range(3)]
    path = unlike(rng=[gathered] * 3, timestamp=[{"batch": 7}] * 3)
    (path.parent / "ep0-ba7-rank1.pt").unlink()
    assert told(path, "rng")["lost"] == 0 and told(path, "rng", "timestamp")["lost"] == 1


@settings(max_examples=25, deadline=None)
@given(values=st.lists(st.sampled_from([None, 1, 2, 2.5, "a", [1, 2], (3,), float("nan")]), min_size=2, max_size=5))
def test_rows_by_rank_are_the_values_that_were_saved(values):
    merge = Merge()
    tree = merge.trees([(rank, {"x": {"y": value}}) for rank, value in enumerate(values)])
    found = compare_ranks(merge, tree)
    ck = dataclasses.replace(checkpoint(tree), per_rank=found.per_rank, unequal=found.unequal)
    with OpenFiles() as files:
        rows = UnequalValues(ck, files).at(next(e for e in entries_of(ck) if e.name == "x.y"))
    saved = {rank: repr(as_data(value)) for rank, value in enumerate(values)}
    told = {rank: repr(row.value) for row in rows for rank in row.ranks}
    assert told == (saved if len(set(saved.values())) > 1 else {})


ADAM = FIXTURES / "torchao-fsdp2-adamw8bit-dcp/ckpt"
MOMENT = "optim.state.block.up.weight.exp_avg"


def test_what_a_class_stores_in_the_place_of_values_has_a_row_for_each_part():
    lines = run(ADAM, MOMENT).stdout.splitlines()
    assert lines[1].startswith("quantized as torchao OptimState8bit (codes, scale, qmap): consolidate --dequantize")
    assert lines[3].split() == ["rank", "region", "holds", "file", "record", "offset", "size", "crc"]
    assert "codes uint8 [64, 96]               __0_0.distcp  data/0" in lines[5]
    assert "scale fp32 [24], per 256 elements  __0_0.distcp  data/1" in lines[6]
    assert [line.split()[0] for line in lines[5:]] == ["0", "0", "0", "1", "1", "1"]


def test_the_parts_of_a_shard_are_in_its_row_for_programs():
    (row,) = told(ADAM, MOMENT)["rows"]
    first = row["shards"][0]
    assert first["stored_as"] == "torchao.optim.subclass_8bit.OptimState8bit"
    assert [(part["name"], part["shape"], part["per"]) for part in first["parts"]] == [
        ("codes", [64, 96], ""),
        ("scale", [24], "256 elements"),
        ("qmap", [256], ""),
    ]
    assert (row["holes"], row["missing"], row["problem"]) == ([], 0, "")


def test_a_tensor_that_only_another_rank_has_is_shown_from_the_folder(tmp_path):
    for rank in range(40):
        tree = {"model": {"w": torch.arange(4.0)}, "step": 3}
        torch.save(tree | ({"extra": torch.arange(3.0)} if rank == 37 else {}), tmp_path / f"rank{rank}.pt")
    shown = run(tmp_path, "extra")
    assert shown.exit_code == 0
    assert "rank37.pt" in shown.stdout
    assert run(tmp_path, "nothing").exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["torch2.13.0-fsdp2-tp2x2-w4", "composer-0.13.5-torch1.13.1-sharded-w4", "torch2.13.0-fsdp1-sharded-w4"]
)
def test_every_name_in_a_problem_can_be_pasted(name, tmp_path):
    folder = Path(shutil.copytree(FIXTURES / name, tmp_path / "run"))
    next(f for f in sorted(folder.rglob("*rank*1*"))).unlink()
    found = {p.tensor for c in ckptools.verify(folder).checks for p in c.problems if p.tensor}
    assert found
    ck = ckptools.open(folder, all_ranks=True)
    for tensor in sorted(found):
        assert ck.show(tensor).rows
        assert ck.records("all", filter=[tensor]).rows


def test_a_tensor_of_many_ranks_is_shown_with_the_shards_of_all(large_world):
    path = FIXTURES / "torch2.4.1-fsdp2-w3" / "rank0.pt"
    (name,) = [n for n, t in list(ckptools.open(path).model.items())[:1]]
    (row,) = ckptools.open(path).show(name).rows
    assert {shard.status for shard in row.shards} == {"here"} and len({shard.rank for shard in row.shards}) == 3


def test_a_slice_that_is_none_is_a_mistake_before_any_row_is_shown():
    result = run(FSDP, "model", "--values", "x")
    said = "error: --values 'x': 'x' is no index; write slices such as '0:4,:8'\n"
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", said)
