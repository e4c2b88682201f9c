"""Two checkpoints held against each other: every format, world size, name and kind of damage."""

from __future__ import annotations

import inspect
import shutil
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptools
from ckptools.diff.record import DIFFERENT, Difference
from ckptools.errors import UsageError
from ckptools.model.tree import tensors_in
from tests.truth import FIXTURES, WHOLE

SHARDED = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
MEGATRON = FIXTURES / "megatron-tp2pp2-fp32"
NUMBERED = FIXTURES / "lightning-trainer-ddp" / "ckpt" / "last.ckpt"


def saved(path: Path, tree: Any) -> Path:
    torch.save(tree, path)
    return path


def verdict(found: Difference, name: str) -> str:
    return next(row.verdict for row in found.rows if row.name == name)


def subject(found: Difference, name: str) -> tuple[str, str]:
    return next((row.verdict, row.detail) for row in found.subjects if row.subject == name)


def different(found: Difference) -> set[str]:
    return {row.name for row in found.rows if row.verdict in DIFFERENT}


def state(**more: Any) -> dict[str, Any]:
    """A small training's state, keyed by name."""
    model = OrderedDict({"a.w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5)})
    moments = {name: {"step": torch.tensor(3.0), "exp_avg": t * 2, "exp_avg_sq": t * t} for name, t in model.items()}
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a.w"]}, {"lr": 0.2, "betas": (0.9, 0.95), "params": ["b"]}]
    tree = {
        "model": model,
        "optimizer": {"state": moments, "param_groups": groups},
        "scheduler": {"last_epoch": 3, "_last_lr": [0.1, 0.2]},
        "rng": {"torch": torch.arange(100, dtype=torch.uint8), "python": (3, tuple(range(700)), None)},
        "dataloader": {"sample": 96},
        "step": 3,
        "note": "x",
    }
    return {**tree, **more}


# -- the same ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("known", [k for k in WHOLE if k.file != NUMBERED], ids=lambda k: f"{k.name}-{k.path}")
def test_a_checkpoint_is_the_same_as_itself_when_every_byte_is_read_and_not_before(known):
    a, b = known.open(), known.open()
    assert ckptools.diff(a, b).same is None
    found = ckptools.diff(a, b, every_byte=True)
    assert found.same is True and {row.verdict for row in found.rows} == {"same"}
    assert found.bytes_read >= sum(t.nbytes for _, t in tensors_in(dict(a.model)))


SAME_RUN = [
    ("torch2.13.0-fsdp1-sharded-w4/rank0.pt", "pt"),
    ("torch2.13.0-fsdp1-sharded-w4/rank0.pt", "dcp"),
    ("torch2.13.0-fsdp2-tp2x2-w4/rank0.pt", "pt"),
    ("torch2.6.0-fsdp1-hsdp2x2-w4/rank0.pt", "dcp"),
    ("torchtitan-fsdp-tp/ckpt/step-5", "pt"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "suffix"), SAME_RUN, ids=str)
def test_shards_of_four_ranks_are_the_same_as_what_was_consolidated_of_them(path, suffix, tmp_path):
    ck = ckptools.open(FIXTURES / path)
    ck.consolidate(tmp_path / f"out.{suffix}", only="all")
    found = ckptools.diff(ck, tmp_path / f"out.{suffix}", every_byte=True)
    assert (found.same, different(found)) == (True, set())
    assert found.a.layout != found.b.layout


def test_a_checkpoint_compares_itself_as_the_function_compares_it(tmp_path):
    a, b = (ckptools.open(saved(tmp_path / name, state(note=name))) for name in ("a.pt", "b.pt"))
    expected = replace(ckptools.diff(a, b, values=True), seconds=0)
    assert expected.same is False and replace(a.diff(b, values=True), seconds=0) == expected
    assert replace(a.diff(b.path, values=True), seconds=0) == expected
    b.write_digests(tmp_path / "b.json")
    assert a.diff(tmp_path / "b.json").same is False and a.diff(a, every_byte=True).same is True
    assert inspect.signature(ckptools.diff).parameters.keys() - {"a", "b"} == (
        inspect.signature(ckptools.Checkpoint.diff).parameters.keys() - {"self", "other"}
    )


def test_the_universal_form_of_a_deepspeed_checkpoint_is_the_same_state():
    a, b = (FIXTURES / "deepspeed-z1-fp32" / name for name in ("ckpt", "universal"))
    found = ckptools.diff(a, b, every_byte=True, section="model")
    assert found.same is True and len(found.tensors) > 9
    assert ckptools.diff(a, b, every_byte=True, filter=["*.exp_avg*"]).same is True


def test_a_dcp_of_the_same_run_has_the_same_weights_and_moments():
    a, b = MEGATRON / "legacy", MEGATRON / "ckpt"
    found = ckptools.diff(a, b, every_byte=True, section="model")
    same = [row for row in found.tensors if row.verdict == "same"]
    assert len(same) > 10 and not [row for row in found.tensors if row.verdict == "differs"]


# -- what differs ------------------------------------------------------------------------------------------------


def test_the_first_rows_are_about_what_explains_a_loss(tmp_path):
    other = state(step=4, note="y", dataloader={"sample": 128})
    other["optimizer"]["param_groups"][1]["lr"] = 0.25
    other["optimizer"]["state"]["b"]["step"] = torch.tensor(4.0)
    other["model"]["b"][2] = 1.5
    other["rng"]["torch"][7] = 0
    other["scheduler"]["_last_lr"][1] = 0.25
    found = ckptools.diff(saved(tmp_path / "a.pt", state()), saved(tmp_path / "b.pt", other), values=True)
    assert found.same is False
    assert [(row.subject, row.verdict) for row in found.subjects] == [
        ("weights", "differs"), ("moments", "same checksum"), ("optimizer steps", "differs"), ("lr", "differs"),
        ("hyperparameters", "same"), ("scheduler", "differs"), ("rng", "differs"), ("data position", "differs"),
        ("counters", "differs"), ("other values", "differs"),
    ]  # fmt: skip
    assert subject(found, "lr")[1] == "lr 0.2 → 0.25" and subject(found, "counters")[1] == "step 3 → 4"
    assert subject(found, "rng")[1] == "torch differs; python the same"
    changed = found.tensors.sort("change", reverse=True)[0]
    assert (changed.name, changed.first, changed.value_a, changed.value_b, changed.max) == (
        "b",
        (2,),
        "1.0",
        "1.5",
        0.5,
    )


def test_without_values_weights_are_never_called_the_same(tmp_path):
    other = state()
    other["model"]["b"][2] = 1.5
    found = ckptools.diff(saved(tmp_path / "a.pt", state()), saved(tmp_path / "b.pt", other))
    assert found.same is None and subject(found, "weights")[0] == "not compared" and found.bytes_read == 0


def test_keys_shapes_and_dtypes_that_differ(tmp_path):
    model = {"a.w": torch.zeros(3, 5), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.ones(2)}
    paths = (
        saved(tmp_path / "a.pt", {"model": state()["model"], "x": 1}),
        saved(tmp_path / "b.pt", {"model": model, "y": 1}),
    )
    found = ckptools.diff(*paths)
    assert {row.name: (row.verdict, row.detail) for row in found.rows} == {
        "a.w": ("differs", "shape [3, 4] → [3, 5]"),
        "b": ("differs", "fp32 → bf16"),
        "c": ("only in B", ""),
        "x": ("only in A", ""),
        "y": ("only in B", ""),
    }
    layouts = {row.name: (row.layout_a, row.layout_b) for row in found.tensors}
    assert layouts == {"a.w": ("whole", "whole"), "b": ("whole", "whole"), "c": (None, "whole")}
    by_value = ckptools.diff(*paths, values=True)
    assert verdict(by_value, "b") == "differs" and "every value is equal" in by_value.tensors[1].detail
    assert verdict(ckptools.diff(*paths, rtol=0.0), "b") == "within tolerance"


def test_what_is_within_a_tolerance_is_no_difference(tmp_path):
    other = state()
    other["model"]["b"] += 1e-4
    paths = saved(tmp_path / "a.pt", state()), saved(tmp_path / "b.pt", other)
    found = ckptools.diff(*paths, atol=1e-3, every_byte=True)
    assert (found.same, verdict(found, "b"), verdict(found, "a.w")) == (True, "within tolerance", "same")
    assert ckptools.diff(*paths, rtol=1e-5).same is False
    with pytest.raises(UsageError, match="rtol=-1: a tolerance is at least 0"):
        ckptools.diff(*paths, rtol=-1)


def test_a_group_is_held_against_the_parameters_in_it_wherever_they_are(tmp_path):
    one = state()
    one["optimizer"]["param_groups"] = list(reversed(one["optimizer"]["param_groups"]))
    paths = saved(tmp_path / "a.pt", state()), saved(tmp_path / "b.pt", one)
    assert subject(ckptools.diff(*paths), "lr")[0] == "same"
    merged = state()
    merged["optimizer"]["param_groups"] = [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a.w", "b", "c"]}]
    found = ckptools.diff(paths[0], saved(tmp_path / "c.pt", merged))
    rows = {row.name: (row.verdict, row.value_a, row.value_b) for row in found.values if "param_groups" in row.name}
    assert rows["optimizer.param_groups.0.lr"] == ("same", "0.1", "0.1")
    assert rows["optimizer.param_groups.1.lr"] == ("differs", "0.2", "0.1")
    assert rows["optimizer.param_groups.0.params"] == ("only in B", None, "1 parameter")


def test_a_group_whose_parameters_have_several_rates_in_b_names_them(tmp_path):
    one, other = state(), state()
    one["optimizer"]["param_groups"] = [{"lr": 0.1, "params": ["a.w", "b"]}]
    other["optimizer"]["param_groups"] = [{"lr": 0.2, "params": ["a.w"]}, {"lr": 0.3, "params": ["b"]}]
    found = ckptools.diff(saved(tmp_path / "a.pt", one), saved(tmp_path / "b.pt", other))
    (row,) = [row for row in found.values if row.detail == "one value in A, several in B"]
    assert (row.name, row.value_a) == ("optimizer.param_groups.0.lr", "0.1")
    assert row.value_b == "0.2 (1 parameter), 0.3 (1 parameter)"


def test_values_of_other_classes_differ_though_they_are_worth_the_same(tmp_path):
    a = saved(tmp_path / "a.pt", {"model": state()["model"], "x": {"n": 5, "pair": (1, 2), "flag": True}})
    b = saved(tmp_path / "b.pt", {"model": state()["model"], "x": {"n": 5.0, "pair": [1, 2], "flag": 1}})
    found = ckptools.diff(a, b, section="other")
    assert [(row.name, row.verdict, row.detail) for row in found.values] == [
        ("x.n", "differs", "int → float"), ("x.pair", "differs", "tuple → list"), ("x.flag", "differs", ""),
    ]  # fmt: skip


def test_values_are_the_same_whatever_a_format_makes_of_them(tmp_path):
    from torch.distributed.checkpoint import save

    tree = {"model": state()["model"], "x": {"n": 5, "pair": (1, 2), "flag": True}}
    save(tree | {"x": {"n": 5.0, "pair": [1, 2], "flag": 1}}, checkpoint_id=tmp_path / "b")
    found = ckptools.diff(saved(tmp_path / "a.pt", tree), tmp_path / "b", section="other")
    assert {row.name: row.verdict for row in found.values} == {"x.n": "same", "x.pair": "same", "x.flag": "differs"}
    assert any("a list counts as a tuple" in note for note in found.notes)


# -- names -------------------------------------------------------------------------------------------------------


def test_wrappers_are_taken_off_and_that_is_said(tmp_path):
    def wrapped(name: str) -> str:
        return f"module._orig_mod.{name}"

    tree = state()
    tree["model"] = {wrapped(name): t for name, t in tree["model"].items()}
    tree["optimizer"]["state"] = {wrapped(name): s for name, s in tree["optimizer"]["state"].items()}
    for group in tree["optimizer"]["param_groups"]:
        group["params"] = [wrapped(name) for name in group["params"]]
    found = ckptools.diff(saved(tmp_path / "a.pt", state()), saved(tmp_path / "b.pt", tree), every_byte=True)
    assert found.same is True and found.tensors[0].name_b == "module._orig_mod.a.w"
    assert any("DDP's `module.` was taken off" in note for note in found.notes)
    assert any("names of wrappers were taken off" in note for note in found.notes)


def test_a_name_that_only_some_have_in_front_is_no_wrapper(tmp_path):
    tree = state()
    tree["model"] = {"module.a.w": tree["model"]["a.w"], "b": tree["model"]["b"]}
    found = ckptools.diff(saved(tmp_path / "a.pt", state()), saved(tmp_path / "b.pt", tree), section="model")
    assert different(found) == {"a.w", "module.a.w"}


def test_sections_of_other_names_are_held_against_each_other_and_that_is_said(tmp_path):
    tree = state()
    renamed = {"net": tree.pop("model"), "opt": tree.pop("optimizer"), "sched": tree.pop("scheduler"), **tree}
    found = ckptools.diff(saved(tmp_path / "a.pt", state()), saved(tmp_path / "b.pt", renamed), every_byte=True)
    assert found.same is True
    assert "optimizer: A's optimizer is compared with B's opt, the only one left on either side" in found.notes


@pytest.mark.parametrize("values", [False, True])
def test_what_only_a_number_matches_is_not_called_equal(values):
    found = ckptools.diff(NUMBERED, NUMBERED, values=values)
    rows = [row for row in found.rows if "?" in row.name]
    assert found.same is False and len(rows) == 3
    assert {row.verdict for row in rows} == {"cannot be compared"} and all("number" in row.detail for row in rows)
    assumed = [row.detail for row in found.tensors if "name assumed" in row.detail]
    assert len(assumed) == 6 * values


# -- ranks -------------------------------------------------------------------------------------------------------


def copied(tmp_path: Path, name: str = "b") -> Path:
    return Path(shutil.copytree(SHARDED, tmp_path / name, ignore=shutil.ignore_patterns("*.npz", "*.json", "*.md")))


def test_a_generator_that_was_restored_on_another_rank_is_named(tmp_path):
    plain = [
        saved(tmp_path / f"{name}.pt", {"model": state()["model"], "rng": rng}) for name, rng in GENERATORS.items()
    ]
    found = ckptools.diff(*plain)
    detail = subject(found, "rng")[1]
    assert "B's rank 0 has that of A's rank 1" in detail and "other states on ranks 0, 1" in detail


GENERATORS = {
    "x": [{"torch": torch.full((64,), n, dtype=torch.uint8)} for n in range(3)],
    "y": [{"torch": torch.full((64,), n, dtype=torch.uint8)} for n in (1, 0, 2)],
}


def test_ranks_that_share_a_state_by_nature_have_nobody_s_in_particular(tmp_path):
    """Tensor-parallel ranks draw alike: that rank 1 has the state of rank 0 is no file in another's place."""
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        for rank in range(4):
            state = {"model": {"w": torch.ones(2)}, "rng": {"torch": torch.full((16,), rank // 2, dtype=torch.uint8)}}
            saved(tmp_path / side / f"rank{rank}.pt", state)
    found = ckptools.diff(tmp_path / "a", tmp_path / "b")
    assert subject(found, "rng") == ("same", "torch the same on every rank")


def test_everything_of_a_generator_counts_not_its_longest_piece_alone(tmp_path):
    def of(position: int) -> dict[str, Any]:
        return {"model": state()["model"], "rng": {"numpy": ("MT19937", list(range(624)), position, 0, 0.0)}}

    found = ckptools.diff(saved(tmp_path / "a.pt", of(3)), saved(tmp_path / "b.pt", of(4)))
    assert subject(found, "rng") == ("differs", "numpy differs")


def test_a_seed_beside_random_states_is_told_by_the_place_that_saved_it(tmp_path):
    def of(seed: int) -> dict[str, Any]:
        states = {
            f"shard_0.{n}_1.2": {"torch": torch.full((64,), n, dtype=torch.uint8), "seed": seed + n} for n in (0, 1)
        }
        return {"model": state()["model"], "rng": states}

    found = ckptools.diff(saved(tmp_path / "a.pt", of(3)), saved(tmp_path / "b.pt", of(5)))
    seeds = {row.name: (row.rank, row.value_a, row.value_b) for row in found.values if "seed" in row.name}
    assert seeds == {"rng.shard 0.0.seed": (None, "3", "5"), "rng.shard 0.1.seed": (None, "4", "6")}


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_what_a_lost_rank_held_cannot_be_compared(tmp_path, damage):
    folder = copied(tmp_path)
    victim = folder / "rank2.pt"
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    for found in (ckptools.diff(SHARDED, folder), ckptools.diff(SHARDED, folder, values=True)):
        assert found.same is False
        lost = [row for row in found.tensors if row.verdict == "cannot be compared"]
        assert lost and all("B: gap" in row.detail and "rank 2" in row.detail for row in lost)
        assert not [row for row in found.tensors if row.verdict == "differs"]
        assert subject(found, "files")[0] == "cannot be compared"
        rng = [row for row in found.values if row.subject == "rng" and row.rank == 2]
        assert rng and all(row.verdict == "cannot be compared" and "rank 2" in row.detail for row in rng)


@pytest.mark.slow
def test_one_flipped_bit_is_found_by_reading_every_byte(tmp_path):
    folder = copied(tmp_path)
    tensor = ckptools.open(folder / "rank0.pt").model
    shard = next(s for t in tensor.values() for s in t.found if s.box.numel > 4)
    data = bytearray(shard.source.path.read_bytes())
    data[shard.source.offset + 2] ^= 1
    shard.source.path.write_bytes(data)
    believed = ckptools.diff(SHARDED, folder, values=True)
    assert believed.same is None and "same CRC-32 in both, not read" in believed.tensors[0].detail
    found = ckptools.diff(SHARDED, folder, every_byte=True)
    rows = [row for row in found.tensors if row.verdict == "differs"]
    assert found.same is False and len(rows) == 1 and "one of them is damaged" in rows[0].detail


def test_the_file_of_another_step_is_told_with_what_it_held(tmp_path):
    a, b = copied(tmp_path, "a"), copied(tmp_path, "b")
    shutil.copy(a / "rank1.pt", b / "rank0.pt")
    assert ckptools.diff(a, b, values=True).same is False


def of_ranks(folder: Path, *rates: float, step: int = 3) -> Path:
    folder.mkdir()
    for rank, rate in enumerate(rates):
        optimizer = {"state": {}, "param_groups": [{"lr": rate, "params": ["w"]}]}
        scheduler = {"last_epoch": step, "_last_lr": [rate]}
        saved(folder / f"rank{rank}.pt", {"model": {"w": torch.ones(2)}, "optimizer": optimizer, "lrs": scheduler})
    return folder


@pytest.mark.parametrize("swapped", [False, True])
def test_a_learning_rate_that_one_rank_has_for_itself_is_not_called_the_same(tmp_path, swapped):
    paths = [of_ranks(tmp_path / "a", 0.1, 0.1, 0.1), of_ranks(tmp_path / "b", 0.1, 0.3, 0.1)]
    found = ckptools.diff(*paths[:: -1 if swapped else 1])
    row = next(row for row in found.values if row.name == "optimizer.param_groups.0.lr")
    assert row.verdict == "cannot be compared" and "ranks have different values" in row.detail and found.same is False
    assert "rank 1: 0.3, others: 0.1" in (row.value_a if swapped else row.value_b)
    assert {row.verdict for row in found.values if row.name.startswith("lrs._last_lr")} == {"cannot be compared"}


def test_values_that_ranks_have_for_themselves_are_compared_rank_by_rank(tmp_path):
    a, b = of_ranks(tmp_path / "a", 0.1, 0.2, 0.1), of_ranks(tmp_path / "b", 0.1, 0.3, 0.1)
    rows = [row for row in ckptools.diff(a, b).values if row.name.startswith("lrs._last_lr")]
    assert [(row.rank, row.verdict) for row in rows] == [(0, "same"), (1, "differs"), (2, "same")]


# -- which keys --------------------------------------------------------------------------------------------------


def test_globs_and_sections_choose_what_is_compared(tmp_path):
    other = state(step=4)
    other["model"]["b"][0] = 7
    paths = saved(tmp_path / "a.pt", state()), saved(tmp_path / "b.pt", other)
    assert ckptools.diff(*paths, values=True, exclude=["b", "step"]).same is None
    assert [row.name for row in ckptools.diff(*paths, filter=["*.lr"]).rows] == [
        "optimizer.param_groups.0.lr", "optimizer.param_groups.1.lr",
    ]  # fmt: skip
    assert {row.subject for row in ckptools.diff(*paths, section="rng").rows} == {"rng"}
    assert {row.subject for row in ckptools.diff(*paths, section="scheduler").subjects} == {"scheduler"}
    with pytest.raises(UsageError, match="neither has a section 'nodel'"):
        ckptools.diff(*paths, section="nodel")
    with pytest.raises(UsageError, match="no key of A or B matches"):
        ckptools.diff(*paths, filter=["zzz*"])


def several(*names: str, kind: str = "optimizer") -> dict[str, Any]:
    """Several models, each with an optimizer of its own."""
    models = {name: {"w": torch.ones(2)} for name in names}
    optimizers = {f"{name}_opt": {"state": {}, "param_groups": [{"lr": 0.1, "params": ["w"]}]} for name in names}
    return {**models, **optimizers}


@pytest.mark.parametrize("names", [("gen", "disc"), ("gen", "disc", "enc")])
def test_one_of_several_sections_of_a_kind_is_that_one_alone(tmp_path, names):
    paths = saved(tmp_path / "a.pt", several(*names)), saved(tmp_path / "b.pt", several(*names))
    for section in ("gen", "gen_opt"):
        rows = ckptools.diff(*paths, section=section).rows
        # Of a generator and a discriminator the former is looked at, and its names are bare.
        assert rows and all(row.name.startswith(f"{section}.") or row.name == "w" for row in rows)


def test_a_section_is_chosen_by_the_name_that_it_has_on_either_side(tmp_path):
    paths = saved(tmp_path / "a.pt", several("gen", "disc")), saved(tmp_path / "b.pt", several("gen", "critic"))
    for section in ("disc_opt", "critic_opt"):
        found = ckptools.diff(*paths, section=section)
        assert [row.name for row in found.values] == ["disc_opt.param_groups.0.lr"] and found.same is True


def test_of_three_optimizers_none_is_held_against_one_of_another_name(tmp_path):
    """One is left here and two are there: nothing says which of them it is."""
    paths = saved(tmp_path / "a.pt", several("gen", "disc")), saved(tmp_path / "b.pt", several("gen", "x", "y"))
    found = ckptools.diff(*paths)
    assert {row.verdict for row in found.values if "disc" in row.name} == {"only in A"}
    assert {row.verdict for row in found.values if row.name.startswith(("x_", "y_"))} == {"only in B"}


def test_groups_of_another_number_of_parameters_differ_though_numbers_have_no_names(tmp_path):
    for name, count in (("a.pt", 2), ("b.pt", 3)):
        state = {n: {"exp_avg": torch.ones(4)} for n in range(count)}
        groups = [{"lr": 0.1, "params": list(range(count))}]
        torch.save({"optimizer": {"state": state, "param_groups": groups}}, tmp_path / name)
    found = ckptools.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    (row,) = [row for row in found.values if row.name.endswith("params")]
    assert (row.verdict, row.detail) == ("differs", "another number of parameters")


def test_values_that_differ_are_compared_in_checkpoints_that_are_open(tmp_path):
    a, b = (saved(tmp_path / f"{name}.pt", {"w": torch.full((4,), value)}) for name, value in (("a", 1.0), ("b", 2.0)))
    found = ckptools.diff(ckptools.open(a), ckptools.open(b), values=True)
    assert (verdict(found, "w"), different(found)) == ("differs", {"w"})
