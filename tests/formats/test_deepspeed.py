"""DeepSpeed: every stage, layout and precision, written as DeepSpeed writes it, read back bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import NotWholeError
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.read import read_box
from tests.formats.deepspeed_writer import SLOTS, Run, deepspeed_classes, values
from tests.truth import FIXTURES, load_truth

SHAPES = {"embed": (33, 17), "up": (29, 17), "bias": (29,), "scale": (), "norm": (5,), "down": (17, 29), "none": (0, 4)}
GROUPS = [["embed", "up", "down"], ["bias", "scale", "norm", "none"]]


def raw(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return tensor.dtype, tensor.shape, read_box(tensor, Box.whole(tensor.shape)).tobytes()


def of_torch(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1)
    return str(tensor.dtype)[6:], tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def wrong(run: Run, ck: ckptools.Checkpoint) -> list[str]:
    """Names of everything that is not what was saved."""
    (optimizer,) = ck.optimizers.values()
    expected = {f"model/{n}": t for n, t in {**run.master, **run.buffers}.items()}
    expected |= {f"model/{n}": t.to(run.low) for n, t in run.frozen.items()}
    expected |= {f"model/{alias}": run.master[n] for alias, n in run.shared.items()}
    names = [n for group in run.groups for n in group]
    expected |= {f"{n}/{slot}": run.slot(n, slot) for n in names for slot in SLOTS}
    if not run.elastic:
        expected |= {f"{n}/step": torch.tensor(float(run.step)) for n in names}
    found = {f"model/{n}": t for n, t in ck.model.items()}
    found |= {f"{n}/{slot}": t for n, entry in optimizer.state.items() for slot, t in entry.items()}
    odd = sorted(set(expected) ^ set(found))
    return odd + [n for n in expected if n in found and raw(found[n]) != of_torch(expected[n])]


def opened(run: Run, folder: Path, **options: object) -> ckptools.Checkpoint:
    run.save(folder)
    return ckptools.open(folder, all_ranks=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16, torch.float16])
def test_every_stage_and_precision_gives_back_the_fp32_copy(tmp_path, stage, low):
    run = Run(values(SHAPES), GROUPS, 3, stage, low)
    run.buffers = {"seen": torch.tensor(5), "mean": torch.ones(7, dtype=low), "mask": torch.tensor([True, False])}
    run.frozen = {"frozen": torch.full((3, 5), 2.5), "fixed": torch.tensor(1.5)}
    run.shared = {"head": "embed"}
    ck = opened(run, tmp_path)
    assert (wrong(run, ck), ck.problems, ck.step.value, ck.world_size.value) == ([], (), 7, 3)
    assert [g.names for g in ck.optimizers["optimizer"].param_groups] == [tuple(g) for g in GROUPS]


@pytest.mark.parametrize(
    "options",
    [
        {"mappings": False},
        {"padding_on_last_rank_only": True},
        {"round_robin": True},
        {"elastic": True},
        {"alignment": 8},
        {"alignment": 4, "round_robin": True},
        {"bf16_optimizer": True, "low": torch.bfloat16},
        {"bf16_optimizer": True, "world": 7},
    ],
    ids=str,
)
def test_variants_of_the_flat_buffer(tmp_path, options):
    run = Run(values(SHAPES), GROUPS, **{"world": 4, "stage": 2, **options})
    if run.bf16_optimizer:
        # Without param_shapes a parameter without elements is in no mapping; it is then known from module alone.
        del run.master["none"]
        run.groups = [GROUPS[0], GROUPS[1][:-1]]
    ck = opened(run, tmp_path)
    assert (wrong(run, ck), [p for p in ck.problems if p.severity != "note"]) == ([], [])


def test_padding_that_only_the_order_before_a_shuffle_would_need_is_in_no_mapping(tmp_path):
    run = Run(values({"a": (0,), "b": (), "c": (4,)}), [["a", "b", "c"]], 2, 1, alignment=4, round_robin=True)
    ck = opened(run, tmp_path)
    assert (wrong(run, ck), [p for p in ck.problems if p.severity != "note"]) == ([], [])


@pytest.mark.parametrize("options", [{"sub_group_size": 200}, {"sub_group_size": 1}, {"straddle": (100, 1, 7)}])
def test_sub_groups_of_stage_3(tmp_path, options):
    groups = GROUPS if "straddle" not in options else [[n for g in GROUPS for n in g]]
    run = Run(values(SHAPES), groups, 4, 3, torch.bfloat16, **options)
    ck = opened(run, tmp_path)
    assert (wrong(run, ck), ck.problems) == ([], ())


def test_parameters_smaller_than_the_world_leave_ranks_empty(tmp_path):
    for stage in (1, 3):
        run = Run(values({"a": (3,), "b": ()}), [["a", "b"]], 8, stage)
        ck = opened(run, tmp_path / str(stage))
        assert (wrong(run, ck), ck.problems) == ([], ())


shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=7)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes, st.data(), st.integers(1, 6), st.integers(1, 3))
def test_any_shapes_groups_and_world_give_back_every_element(tmp_path, shapes, data, world, stage):
    master = values({f"p{i}": shape for i, shape in enumerate(shapes)})
    count = data.draw(st.integers(1, min(3, len(shapes))))
    groups = [[f"p{i}" for i in range(len(shapes)) if i % count == g] for g in range(count)]
    run = Run(master, groups, world, stage, data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    run.sub_group_size = data.draw(st.sampled_from([1, 10, 1000]))
    if stage < 3:
        run.alignment = data.draw(st.sampled_from([1, 1, 4, 8]))
        run.round_robin = data.draw(st.booleans())
        run.padding_on_last_rank_only = data.draw(st.booleans())
        run.mappings = run.alignment > 1 or data.draw(st.booleans())
        run.elastic = data.draw(st.booleans())
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    ck = opened(run, tmp_path / "run")
    assert (wrong(run, ck), [p for p in ck.problems if p.severity != "note"]) == ([], [])


@pytest.mark.parametrize("folder", ["deepspeed-z1-fp32", "deepspeed-z3-bf16"])
def test_buffers_and_frozen_parameters_are_untouched(folder):
    ck, truth = ckptools.open(FIXTURES / folder / "ckpt", all_ranks=True), load_truth(folder)
    for fqn in ("stats.running_mean", "stats.num_batches_tracked"):
        dtype, data, shape = truth[f"buffer/{fqn}"]
        assert raw(ck.model[fqn]) == (dtype, shape, data)
    assert ck.model["frozen.weight"].dtype == truth["lowp/frozen.weight"][0]


def test_a_buffer_that_differs_between_ranks_is_told_and_rank_0s_is_taken(tmp_path):
    ck = ckptools.open(FIXTURES / "deepspeed-z3-bf16" / "ckpt", all_ranks=True)
    assert [(p.code, p.severity, p.tensor) for p in ck.problems] == [("CK105", "warning", "model.stats.running_mean")]
    notes = ckptools.consolidate(ck, tmp_path / "m.safetensors").notes
    assert any("warning of the source: CK105 ranks 1..3, model.stats.running_mean: " in note for note in notes)


def test_a_buffer_that_one_rank_saved_as_a_part_of_more_is_not_said_to_differ(tmp_path):
    run = Run(values({"a": (7, 3)}), [["a"]], 2, 3, buffers={"mean": torch.ones(4)})
    tag = run.save(tmp_path)
    with deepspeed_classes():
        states = torch.load(tag / run.model_name(0), weights_only=False)
        states["module"]["mean"] = torch.ones(9)[:4]
        torch.save(states, tag / run.model_name(0))
    assert [p.code for p in ckptools.open(tmp_path, all_ranks=True).problems] == []


def test_a_buffer_of_one_element_is_no_placeholder_of_zero_3(tmp_path):
    run = Run(values({"a": (7, 3)}), [["a"]], 2, 3, buffers={"scale": torch.tensor([2.5])})
    ck = opened(run, tmp_path)
    assert (ck.model["scale"].note, ck.model["scale"].load().tolist(), ck.whole) == ("", [2.5], True)


@pytest.mark.parametrize("folder", ["deepspeed-z1-fp32", "deepspeed-pipe-fp32"])
def test_the_modules_own_weights_are_given_when_they_are_asked_for(folder):
    ck = ckptools.open(FIXTURES / folder / "ckpt", all_ranks=True, weights="module")
    low = {k.removeprefix("lowp/"): v for k, v in load_truth(folder).items() if k.startswith("lowp/")}
    assert {k: raw(ck.model[k]) for k in low} == {k: (dtype, shape, data) for k, (dtype, data, shape) in low.items()}
    assert len(low) > 6 and ck.whole


def test_tied_weights_are_one_storage_in_every_mode():
    for folder, weights in (("z1-fp32", "fp32"), ("z1-fp32", "module"), ("z3-bf16", "fp32")):
        ck = ckptools.open(FIXTURES / f"deepspeed-{folder}" / "ckpt", all_ranks=True, weights=weights)
        assert ck.model["lm_head.weight"].shards == ck.model["embed.weight"].shards


def test_zero_3_has_no_module_weights_and_says_so(tmp_path):
    folder = FIXTURES / "deepspeed-z3-bf16" / "ckpt"
    ck = ckptools.open(folder, weights="module", all_ranks=True)
    assert (ck.model["embed.weight"].shape, ck.model["embed.weight"].dtype) == ((33, 17), "bfloat16")
    with pytest.raises(NotWholeError, match="placeholder"):
        ckptools.consolidate(ck, tmp_path / "out.pt", only="model")


def test_a_placeholder_that_nothing_explains_is_refused(tmp_path):
    run = Run(values({"a": (7, 3)}), [["a"]], 2, 3, extra={"frozen_param_shapes": None})
    run.frozen = {"lost": torch.ones(4)}
    ck = opened(run, tmp_path)
    assert "neither param_shapes nor frozen_param_shapes" in ck.model["lost"].note


@pytest.mark.parametrize(
    ("stage", "stated", "noted"), [(2, None, 1), (3, None, 1), (2, {}, 0), (3, {}, 0), (1, None, 0)]
)
def test_frozen_parameters_that_were_left_out_are_worth_a_note(tmp_path, stage, stated, noted):
    run = Run(values({"a": (7, 3)}), [["a"]], 2, stage, extra={"frozen_param_shapes": stated})
    ck = opened(run, tmp_path)
    assert [(p.code, p.tensor, p.severity) for p in ck.problems] == [("CK107", "model", "note")] * noted
    assert ck.whole


def test_weights_that_zenflow_stepped_ahead_are_no_damaged_copies(tmp_path):
    config = {"zero_optimization": {"stage": 2, "round_robin_gradients": False, "zenflow": {"topk_ratio": 0.2}}}
    run = Run(values({"a": (7, 3)}), [["a"]], 2, 2, config=config, module={"a": torch.full((7, 3), 9.0)})
    ck = opened(run, tmp_path)
    assert [(p.code, p.tensor, p.severity) for p in ck.problems] == [("CK012", "model", "note")]
    assert ck.verify(deep=True).ok and raw(ck.model["a"]) == of_torch(run.master["a"])


def test_ties_are_seen_by_their_bytes_where_shared_params_is_older_than_the_file(tmp_path):
    run = Run(values({"a": (7, 3)}), [["a"]], 2, 2)
    run.shared = {"b": "a"}
    run.extra = {"shared_params": None}
    assert wrong(run, opened(run, tmp_path)) == []


def test_lengths_that_do_not_add_up_are_refused_with_rank_group_and_numbers(tmp_path):
    for stage, text in (
        (1, "group 0, rank 0: 14 elements are stored, expected 18 to 18 of 35"),
        (3, "rank 0: 13 elements"),
    ):
        run = Run(values({"a": (7, 3), "b": (4,)}), [["a", "b"]], 2, stage, mappings=False)
        shapes = [{"a": torch.Size((7, 3)), "b": torch.Size((14,))}]
        run.extra = {"param_shapes": shapes}
        ck = opened(run, tmp_path / str(stage))
        assert any(p.message.startswith(text) for p in ck.problems if p.severity == "error")
        with pytest.raises(NotWholeError):
            ckptools.consolidate(tmp_path / str(stage), tmp_path / "out.pt")


def test_padding_between_parameters_needs_something_that_confirms_it(tmp_path):
    run = Run(values(SHAPES), GROUPS, 2, 1, alignment=8, mappings=False)
    ck = opened(run, tmp_path)
    assert any("nothing that confirms it" in p.message for p in ck.problems)


def test_optimizer_state_that_is_not_per_element_is_not_split(tmp_path):
    run = Run(values(SHAPES), GROUPS, 2, 1)
    tag = run.save(tmp_path)
    for rank in range(2):
        path = tag / run.optim_name(rank)
        with deepspeed_classes():
            tree = torch.load(path, weights_only=False)
            tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["absmax1"] = torch.ones(3)
            torch.save(tree, path)
    with pytest.raises(NotWholeError, match="not one value per element"):
        ckptools.consolidate(tag, tmp_path / "all.pt")
    ckptools.consolidate(tag, tmp_path / "model.pt", only="model")


def test_a_step_that_the_param_group_counts_stays_there(tmp_path):
    run = Run(values(SHAPES), GROUPS, 2, 2)
    tag = run.save(tmp_path)
    for rank in range(2):
        path = tag / run.optim_name(rank)
        with deepspeed_classes():
            tree = torch.load(path, weights_only=False)
            base = tree["optimizer_state_dict"]["base_optimizer_state"]
            base["param_groups"][0]["step"] = 7
            for entry in base["state"].values():
                entry["step"] = 7
            torch.save(tree, path)
    ck = ckptools.open(tag, all_ranks=True)
    assert ck.whole and ck.optimizers["optimizer"].state["embed"]["step"] == 7
    assert ck.optimizers["optimizer"].param_groups[0]["step"] == 7


def test_an_optimizer_that_has_not_stepped_has_groups_and_no_state(tmp_path):
    run = Run(values(SHAPES), GROUPS, 2, 1)
    tag = run.save(tmp_path)
    for rank in range(2):
        path = tag / run.optim_name(rank)
        with deepspeed_classes():
            tree = torch.load(path, weights_only=False)
            tree["optimizer_state_dict"]["base_optimizer_state"]["state"] = {}
            torch.save(tree, path)
    ck = ckptools.open(tag, all_ranks=True)
    assert ck.whole and ck.optimizers["optimizer"].state == {}
    assert len(ck.optimizers["optimizer"].param_groups) == 2


def test_without_zero_the_optimizer_stays_as_torch_saved_it(tmp_path):
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    run = Run({}, [], 2, 0, module=model.state_dict(), extra={"optimizer": optimizer.state_dict()})
    run.save(tmp_path)
    ck = ckptools.open(tmp_path)
    assert (ck.whole, ck.world_size.value, list(ck.model)) == (True, 2, ["weight", "bias"])
    (found,) = ck.optimizers.values()
    assert raw(found.state["bias"]["exp_avg"]) == of_torch(optimizer.state[model.bias]["exp_avg"])


def test_without_zero_a_nameless_fp32_copy_is_told_and_not_used(tmp_path):
    module = {"w": torch.ones(3, dtype=torch.float16)}
    run = Run({}, [], 1, 0, torch.float16, module=module, extra={"optimizer": {"fp32_groups_flat": [torch.ones(3)]}})
    run.save(tmp_path)
    ck = ckptools.open(tmp_path)
    assert ck.model["w"].dtype == "float16"
    assert any("has no names and is not used" in p.message and p.severity == "note" for p in ck.problems)


def test_a_frozen_parameter_that_is_tied_has_both_names_in_zero_3(tmp_path):
    run = Run(values({"a": (7, 3)}), [["a"]], 3, 3, torch.bfloat16)
    run.frozen = {"embed": torch.full((5, 2), 0.5)}
    run.extra = {"shared_params": {"head": "embed"}}
    run.master["head"] = run.frozen["embed"]
    ck = opened(run, tmp_path)
    assert raw(ck.model["head"]) == raw(ck.model["embed"]) == of_torch(run.frozen["embed"].bfloat16())


def test_a_shape_that_module_and_optimizer_tell_differently_is_an_error(tmp_path):
    run = Run(values({"a": (7, 3)}), [["a"]], 2, 1, module={"a": torch.ones(3, 7)})
    ck = opened(run, tmp_path)
    assert [(p.code, p.tensor) for p in ck.problems] == [("CK104", "model.a")]


def test_optimizer_files_of_an_earlier_larger_world_are_stray(tmp_path):
    run = Run(values({"a": (7, 3)}), [["a"]], 2, 1, extra={"dp_world_size": 4})
    tag = run.save(tmp_path)
    shutil.copy(tag / run.optim_name(1), tag / run.optim_name(3))
    ck = ckptools.open(tag, all_ranks=True)
    assert ("CK009", 3) in [(p.code, p.rank) for p in ck.problems]


def test_a_group_that_is_smaller_than_the_world_has_the_ranks_that_it_is_cut_over(tmp_path):
    run = Run(values({"a": (7, 3)}), [["a"]], 2, 3, extra={"dp_world_size": 4})
    ck = opened(run, tmp_path)
    assert (wrong(run, ck), ck.problems, ck.world_size.value) == ([], (), 4)


def test_a_parameter_that_module_does_not_name_is_in_the_model_all_the_same(tmp_path):
    run = Run(values({"a": (7, 3), "b": (4,)}), [["a", "b"]], 2, 1, module={"a": torch.ones(7, 3)})
    assert wrong(run, opened(run, tmp_path)) == []


def test_swapped_files_are_seen_under_round_robin_too(tmp_path):
    run = Run(values(SHAPES), GROUPS, 4, 2, round_robin=True)
    tag = run.save(tmp_path)
    one, two = tag / run.optim_name(1), tag / run.optim_name(2)
    one.rename(tag / "x")
    two.rename(one)
    (tag / "x").rename(two)
    ck = ckptools.open(tag, all_ranks=True)
    assert [p.code for p in ck.problems if p.severity == "error"][:1] == ["CK104"]
