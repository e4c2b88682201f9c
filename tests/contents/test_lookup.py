"""Which entries a KEY means, and which keys begin with a text."""

from __future__ import annotations

import pytest

from ckptools.cli.arguments import keys_beginning, sections_beginning
from ckptools.contents.show import entries_at
from ckptools.errors import UsageError
from ckptools.keys.entries import entries_of, is_private
from tests.display.made import ESCAPE, checkpoint, composer_tree, hostile, plain
from tests.truth import FIXTURES

FSDP = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"


@pytest.fixture(scope="module")
def ck():
    return checkpoint(composer_tree(4))


def names(ck, key):
    return [entry.name for entry in entries_at(ck, key)]


def test_a_key_is_a_name_or_the_beginning_of_some(ck):
    assert names(ck, "emb.weight") == ["emb.weight"]
    assert names(ck, "timestamp") == [f"timestamp.Timestamp.{word}" for word in ("epoch", "batch", "token")]
    assert names(ck, "optimizers.AdamW.param_groups.1.lr") == ["optimizers.AdamW.param_groups.1.lr"]
    assert names(ck, "rng") == ["rng"]


def test_the_beginning_of_a_name_ends_where_a_word_does():
    ck = checkpoint({"model": {"a.w": plain(2), "ab.w": plain(2)}})
    assert names(ck, "a") == ["a.w"]


def test_a_kind_of_section_stands_for_its_sections(ck):
    assert names(ck, "optimizer.param_groups.0.lr") == ["optimizers.AdamW.param_groups.0.lr"]
    groups = [f"optimizers.AdamW.param_groups.{n}.lr" for n in (0, 1)]
    assert names(ck, "optimizer.param_groups.*.lr") == groups
    assert names(ck, "scheduler.T_max") == ["schedulers.CosineAnnealingLR.T_max"]
    assert names(ck, "model") == ["emb.weight", "blocks.0.up.weight", "blocks.0.norm.weight"]
    assert names(ck, "model.blocks") == names(ck, "blocks")


def test_a_glob_means_all_that_it_matches_and_a_name_that_looks_like_one_is_itself(ck):
    assert names(ck, "blocks.*.weight") == ["blocks.0.up.weight", "blocks.0.norm.weight"]
    odd = checkpoint({"model": {"layers[0].w": plain(2), "layers0.w": plain(2)}})
    assert names(odd, "layers[0].w") == ["layers[0].w"]


@pytest.mark.parametrize("key", ["emb.wieght", "blocks.0.up.weights", "nothing.*"])
def test_what_is_not_there_is_refused_with_the_nearest(ck, key):
    with pytest.raises(UsageError, match=r"no '.*' here") as refused:
        entries_at(ck, key)
    assert refused.value.exit_code == 2
    assert "*" in key or "the nearest is '" in str(refused.value)


def test_a_checkpoint_without_keys_has_none_for_a_glob():
    assert entries_at(checkpoint({}), "*") == []
    with pytest.raises(UsageError):
        entries_at(checkpoint({}), "w")


@pytest.mark.slow
def test_a_hostile_key_and_hostile_names_make_one_printable_line():
    with pytest.raises(UsageError) as refused:
        entries_at(hostile(), f"x{ESCAPE}\n" * 1000)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 1000


def test_private_is_what_begins_with_an_underscore_but_learning_rates_and_what_a_parameter_has():
    scheduler = {"last_epoch": 3, "_last_lr": [0.1], "_is_initial": False, "_x": {"y": 1}}
    state = {"_orig_mod.w": {"step": 3}}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": ["_orig_mod.w"]}]}
    ck = checkpoint({"model": {"_orig_mod.w": plain(2)}, "optim": optimizer, "sched": scheduler})
    assert [e.name for e in entries_of(ck) if is_private(e)] == ["sched._is_initial", "sched._x.y"]


def test_keys_are_completed_from_the_file():
    assert keys_beginning(FSDP / "rank0.pt", "emb.") == ["emb.weight"]
    assert keys_beginning(str(FSDP), "schedul")[:2] == ["scheduler", "scheduler._get_lr_called_within_step"]


def test_of_many_keys_the_next_word_is_told():
    found = keys_beginning(FSDP / "rank0.pt", "")
    assert {"emb", "optim", "scheduler", "step", "rng"} <= set(found) and len(found) < 30
    assert keys_beginning(FSDP / "rank0.pt", "optim.state.e")[0].startswith("optim.state.e")


def test_sections_are_completed_from_the_file_and_without_one_only_their_kinds_are(monkeypatch):
    assert sections_beginning(FSDP, "s") == ["scheduler", "step"]
    monkeypatch.chdir(FSDP)
    assert sections_beginning("", "s") == ["scheduler"]


def test_completion_never_raises_and_leaves_out_what_nobody_can_type(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"junk")
    assert keys_beginning(tmp_path / "x.pt", "") == keys_beginning(tmp_path / "nowhere", "") == []
    assert keys_beginning("a\0b", "") == keys_beginning(tmp_path, "") == []
    import torch

    torch.save({"a": torch.zeros(2), "a\x1b[31m": torch.zeros(2), "a\nb": torch.zeros(2)}, tmp_path / "y.pt")
    assert keys_beginning(tmp_path / "y.pt", "a") == ["a"]
