"""Everything that a user gets hold of shows itself: one line at a prompt, HTML in a notebook, records for pandas."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from IPython.core.formatters import DisplayFormatter

import ckptools
from ckptools.api.notebook import optimizer_html
from ckptools.contents.text import SHARD_COLUMNS
from ckptools.keys.entries import entries_of
from ckptools.model.tensor import Tensor
from tests.display.made import checkpoint, plain
from tests.display.test_html import ALLOWED, DRAWN, Reader
from tests.truth import FIXTURES, WHOLE

RUN = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
FILE = RUN / "ep0-ba5-rank0.pt"

HELD: dict[str, Callable[[ckptools.Checkpoint], Any]] = {
    "checkpoint": lambda ck: ck,
    "sections": lambda ck: ck.sections,
    "section": lambda ck: ck.sections[0],
    "model": lambda ck: ck.model,
    "tensor": lambda ck: ck.model["model.emb.weight"],
    "shards": lambda ck: ck.model["model.emb.weight"].shards,
    "shard": lambda ck: ck.model["model.emb.weight"].shards[0],
    "tensor's figures": lambda ck: ck.model["model.emb.weight"].stats(),
    "optimizers": lambda ck: ck.optimizers,
    "optimizer": lambda ck: ck.optimizers["DecoupledAdamW"],
    "optimizer's state": lambda ck: ck.optimizers["DecoupledAdamW"].state,
    "state of a parameter": lambda ck: ck.optimizers["DecoupledAdamW"].state["model.emb.weight"],
    "param groups": lambda ck: ck.optimizers["DecoupledAdamW"].param_groups,
    "param group": lambda ck: ck.optimizers["DecoupledAdamW"].param_groups[0],
    "schedulers": lambda ck: ck.schedulers,
    "scheduler": lambda ck: ck.schedulers["LambdaLR"],
    "rng": lambda ck: ck.rng,
    "rng of a rank": lambda ck: ck.rng[0],
    "state of a generator": lambda ck: ck.rng[0]["numpy"],
    "files": lambda ck: ck.files,
    "file": lambda ck: ck.files[0],
    "step": lambda ck: ck.step,
    "problems": lambda ck: broken().problems,
    "problem": lambda ck: broken().problems[0],
    "verification": lambda ck: ck.verify(),
    "checks": lambda ck: ck.verify().checks,
    "check": lambda ck: ck.verify().checks[0],
    "verification of a broken one": lambda ck: broken().verify(),
    "records": lambda ck: ck.records(),
    "rows of records": lambda ck: ck.records().rows,
    "key": lambda ck: ck.records().rows[0],
    "show": lambda ck: ck.show("model.emb.weight", "rng"),
    "slice": lambda ck: ck.show("model.emb.weight", values="0:2,:3"),
    "stats": lambda ck: ck.stats(),
    "moments": lambda ck: ck.moments(),
    "dead rows": lambda ck: ck.dead_rows(),
    "match": lambda ck: ck.match(FILE),
    "diff": lambda ck: ckptools.diff(ck, ck, values=True),
    "ls": lambda ck: ckptools.checkpoints_in(RUN),
    "doctor": lambda ck: ckptools.doctor(FILE),
    "dry run": lambda ck: ck.consolidate("model.safetensors", dry_run=True),
}
"""What users get hold of, and how."""


NO_RECORDS = {"checkpoint", "step"}
"""A checkpoint has `records()`, which is here too; of a fact nobody makes a table."""


def broken() -> ckptools.Checkpoint:
    return ckptools.open(FIXTURES / "torch1.13.1-fsdp1-sharded-w3" / "rank0.pt", only_this_file=True, all_ranks=True)


@pytest.fixture(scope="module")
def ck() -> Iterator[ckptools.Checkpoint]:
    with ckptools.open(FILE) as opened:
        yield opened


def records(value: Any) -> Any:
    return value.to_dicts() if hasattr(value, "to_dicts") else value.to_dict()


@pytest.mark.parametrize("name", HELD)
def test_it_shows_itself_in_a_line_as_html_and_as_plain_data(ck, name):
    held = HELD[name](ck)
    line, page = repr(held), Reader(held._repr_html_())
    assert line.isprintable() and 0 < len(line) <= 120
    assert set(page.tags) <= ALLOWED | DRAWN and page.open == []
    assert not {name for name in page.attributes if name.startswith("on") or "href" in name or name == "src"}
    if name not in NO_RECORDS:
        found = held.to_dicts() if hasattr(held, "to_dicts") else held.to_dict()
        assert found and json.loads(json.dumps(found)) == found


@pytest.mark.slow
@pytest.mark.parametrize("known", WHOLE, ids=lambda known: known.name)
def test_random_states_are_rank_to_generator_to_state_for_every_format(known):
    ck = known.open()
    shown = ck.show("rng").streams if ck.of_kind("rng") else ()
    assert {stream for streams in ck.rng.values() for stream in streams} == {row.stream for row in shown}
    for row in shown:
        found = {
            str(rank): streams[row.stream].fingerprint for rank, streams in ck.rng.items() if row.stream in streams
        }
        assert {rank.replace("None", "unknown"): crc for rank, crc in found.items()} == row.fingerprints


def test_the_state_of_a_generator_is_what_the_generator_takes(ck):
    python, numpy, torch_ = (ck.rng[2][stream].value for stream in ("python", "numpy", "torch"))
    random.Random().setstate(python)
    assert numpy[0] == "MT19937" and numpy[1].shape == (624,) and len(numpy) == 5
    torch.Generator().set_state(torch_.load())
    with pytest.raises(KeyError, match="there are of rank 0, of rank 1"):
        ck.rng[9]


def test_where_each_rank_has_a_state_of_its_own_each_is_its_own():
    rng = next(known for known in WHOLE if known.name == "verl-fsdp1").open().rng
    assert list(rng) == [0, 1, 2, 3] and len({rng[rank]["numpy"].fingerprint for rank in rng}) == 4
    assert len({rng[rank]["numpy"].value[1].data for rank in rng}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("held", [lambda ck: ck, lambda ck: ck.model, lambda ck: ck.records(), lambda ck: ck.files],
                         ids=["checkpoint", "model", "records", "files"])  # fmt: skip
def test_of_thousands_the_first_are_shown_and_how_to_see_the_others_is_said(held):
    many = checkpoint({"model": {f"{'n' * 300}{n}": plain(2, record=str(n)) for n in range(3000)}})
    html = held(replace(many, files=[many.files[0]] * 3000))._repr_html_()
    assert len(html.encode()) <= 200_000 and html.count("<tr>") <= 220
    assert re.search(r"\d{4} rows left out; all of them: \S", html)


def test_a_tensor_is_called_as_in_every_command_and_its_parts_as_well(ck):
    state = ck.optimizers["DecoupledAdamW"].state["model.emb.weight"]
    names = {row["name"] for row in ck.records().to_dicts()}
    assert {ck.model["model.emb.weight"].name, state["exp_avg"].name} <= names
    assert {t.name for t in ck.model.values()} <= names


def test_what_was_not_read_is_neither_called_missing_nor_here(large_world):
    alone = ckptools.open(FILE).model["model.emb.weight"]._repr_html_()
    assert "ranks 1..3: not read yet" in alone and "MISSING" not in alone
    assert "MISSING: no file here holds the shards of ranks 1, 2" in broken().model["blocks.0.ln.weight"]._repr_html_()


def test_of_one_rank_the_files_of_others_that_are_known_to_be_lost_are_not_called_unread(large_world, tmp_path):
    damaged = shutil.copytree(RUN, tmp_path / "run")
    (damaged / "ep0-ba5-rank1.pt").unlink()
    os.truncate(damaged / "ep0-ba5-rank2.pt", 5000)
    with ckptools.open(damaged / FILE.name) as opened:
        tensor = opened.model["model.emb.weight"]
        shown = Reader(tensor._repr_html_()).text
    assert tensor.lost == {1: "missing", 2: "cut"}
    assert {"MISSING: no file of rank 1 is here", "CUT: a file ends too early, that of rank 2"} <= set(shown)
    assert "rank 3: not read yet; the place of each shard is taken from other files" in shown
    assert [text for text in shown if text in ("MISSING", "CUT", "not read yet")] == ["MISSING", "CUT", "not read yet"]
    assert "not here: 1 piece of rank 1" in "".join(shown) or "ranks 1" in "".join(shown)


def test_where_a_rank_has_two_files_only_the_one_that_is_lost_is_called_so(large_world, tmp_path):
    run = shutil.copytree(FIXTURES / "verl-fsdp2-bf16/ckpt/global_step_3/actor", tmp_path / "run")
    (run / "optim_world_size_4_rank_2.pt").unlink()
    with ckptools.open(run / "model_world_size_4_rank_0.pt") as opened:
        entries = [entry for entry in entries_of(opened) if isinstance(entry.value, Tensor) and entry.value.unread]
    lost = {(entry.kind, tuple(entry.value.lost.items())) for entry in entries}
    assert lost == {("model", ()), ("optimizer", ((2, "missing"),))}


def test_shards_have_the_same_columns_in_the_same_order_wherever_they_are_shown(ck):
    tensor, titles = ck.model["model.emb.weight"], [column.title for column in SHARD_COLUMNS]
    for held in (tensor, tensor.shards, ck.show("model.emb.weight")):
        assert re.findall(r"<th[^>]*>([^<]*)</th>", held._repr_html_())[: len(titles)] == titles
    assert ck.show("model.emb.weight").rows[0].shards[1].file.endswith("rank1.pt")


def test_a_line_of_what_all_param_groups_share_is_there_only_where_they_share_something():
    state = {"w": {"exp_avg": plain(2)}}
    pages = []
    for more in ({}, {"amsgrad": False}):
        groups = [{"lr": lr, **more, "params": ["w"]} for lr in (0.1, 0.2)]
        made = checkpoint({"model": {"w": plain(2)}, "optimizer": {"state": state, "param_groups": groups}})
        pages.append(optimizer_html(made.optimizers["optimizer"]))
    assert ["all groups" in page for page in pages] == [False, True]
    assert "all groups: amsgrad False" in pages[1]


def test_a_mapping_of_mappings_is_folds_within_each_other_and_a_table_where_there_are_no_more(ck):
    for held in (ck.raw, ck.optimizers):
        page = Reader(held._repr_html_())
        assert page.tags.count("details") > 3 and page.open == [] and page.tags.count("table") > 1
    assert "param_groups: 1 key" in "".join(Reader(ck.optimizers._repr_html_()).text)
    assert ck.raw == ck.tree and isinstance(ck.raw, dict)


def test_a_picture_is_kept_as_a_picture_and_its_words(ck):
    made = ck.plot.ranks()._repr_mimebundle_()
    assert set(made) == {"image/svg+xml", "text/plain"} and made["image/svg+xml"].startswith("<svg ")
    assert made["text/plain"] == ck.plot.ranks().text and not hasattr(ck.plot.ranks(), "_repr_html_")


def test_a_checkpoint_of_several_files_is_kept_as_a_picture_beside_its_html(ck, tmp_path):
    format_of = DisplayFormatter().format
    made, _ = format_of(ck)
    assert {"text/html", "text/plain", "image/svg+xml"} <= set(made)
    assert made["image/svg+xml"] == ck.plot.ranks().svg and made["text/html"] == ck._repr_html_()
    alone, _ = format_of(ckptools.open(ck.consolidate(tmp_path / "all.pt").files[0]))
    assert "image/svg+xml" not in alone and "text/html" in alone


def test_a_tensor_whose_shards_are_not_all_here_says_so_in_its_line(ck):
    assert "2 NOT HERE" in repr(broken().model["blocks.0.ln.weight"])
    assert "NOT HERE" not in repr(ck.model["model.emb.weight"])
