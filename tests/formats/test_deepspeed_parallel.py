"""DeepSpeed beside data parallelism: pipelines, tensor parallelism; and universal checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.errors import NotWholeError, ReadError
from tests.formats.deepspeed_writer import SLOTS, Run, deepspeed_classes, values
from tests.formats.test_deepspeed import of_torch, raw
from tests.truth import FIXTURES

UNIVERSAL = FIXTURES / "deepspeed-z1-fp32" / "universal"
STAGES = (
    {"tied_modules.embed.weight": (33, 7), "1.weight": (5, 7), "1.bias": (5,)},
    {"3.weight": (9, 5), "tied_modules.embed.weight": (33, 7)},
)


def pipeline(folder: Path, world: int = 3, **options: object) -> dict[str, torch.Tensor]:
    """Save a pipeline of two stages; return the full values."""
    full = values({**STAGES[0], **STAGES[1]})
    for mp, shapes in enumerate(STAGES):
        dims = {"pp_degree": 2, "tp_degree": 1}
        run = Run({n: full[n] for n in shapes}, [list(shapes)], world, 1, mp=mp, mp_world=2, dims=dims, module=None)
        for key, value in options.items():
            setattr(run, key, value)
        tag = run.save(folder)
    layers = {0: {"weight": full["tied_modules.embed.weight"]}, 3: {"weight": full["3.weight"]}}
    layers[1] = {"weight": full["1.weight"], "bias": full["1.bias"], "mean": torch.ones(4), "seen": torch.tensor(3)}
    for n, state in layers.items():
        torch.save({k: v.to(run.low) for k, v in state.items()}, tag / f"layer_{n:02d}-model_states.pt")
    return full


def edited(path: Path, change: object) -> None:
    with deepspeed_classes():
        tree = torch.load(path, weights_only=False)
        change(tree)  # type: ignore[operator]
        torch.save(tree, path)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_pipelines_stages_are_put_together(tmp_path, world):
    full = pipeline(tmp_path, world)
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert {n: raw(ck.model[n]) for n in full} == {n: of_torch(t) for n, t in full.items()}
    state = ck.optimizers["optimizer"].state
    for n, t in full.items():
        expected = [of_torch(t * (3 if slot == "exp_avg" else 5) + 0.5) for slot in SLOTS]
        assert [raw(state[n][slot]) for slot in SLOTS] == expected
    assert (ck.whole, ck.world_size.value, "pipeline of 2 stages" in ck.saved_as) == (True, 2 * world, True)
    (group,) = ck.optimizers["optimizer"].param_groups
    assert set(group.names) == set(full) and len(group.names) == 4


def test_buffers_of_a_pipeline_come_from_the_layers_files(tmp_path):
    pipeline(tmp_path, low=torch.bfloat16)
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert sorted(ck.model) == ["1.bias", "1.mean", "1.seen", "1.weight", "3.weight", "tied_modules.embed.weight"]
    assert (ck.model["1.mean"].dtype, ck.model["1.weight"].dtype) == ("bfloat16", "float32")


def test_a_tied_layer_is_consolidated_once_and_must_be_equal_in_all_stages(tmp_path):
    pipeline(tmp_path / "good")
    ckptools.consolidate(tmp_path / "good", tmp_path / "good.safetensors", only="model")
    pipeline(tmp_path / "bad")
    path = tmp_path / "bad" / "global_step7" / "zero_pp_rank_1_mp_rank_01_optim_states.pt"
    edited(path, lambda t: t["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].add_(1))
    with pytest.raises(NotWholeError, match=r"tied_modules\.embed\.weight.*rank 4 holds other bytes than rank"):
        ckptools.consolidate(tmp_path / "bad", tmp_path / "bad.safetensors", only="model")


def test_a_tied_layer_of_another_shape_in_a_later_stage_is_told_with_both_shapes(tmp_path):
    pipeline(tmp_path)
    path = tmp_path / "global_step7" / "mp_rank_01_model_states.pt"
    edited(path, lambda t: t["param_shapes"][0].update({"tied_modules.embed.weight": torch.Size((7, 33))}))
    told = [p.message for p in ckptools.open(tmp_path).problems if p.tensor == "model.tied_modules.embed.weight"]
    assert "shape [7, 33] on model-parallel rank 1, [33, 7] on another" in told


def test_a_missing_stage_is_named(tmp_path):
    pipeline(tmp_path)
    for file in (tmp_path / "global_step7").glob("*mp_rank_01*"):
        file.unlink()
    ck = ckptools.open(tmp_path)
    lost = [("CK001", 3), ("CK001", 3), ("CK001", 4), ("CK001", 5)]
    assert [(p.code, p.rank) for p in ck.problems] == [*lost, ("CK107", 3)] and ck.verdict.recoverable is False


def test_a_stage_without_model_states_has_no_names_for_its_moments(tmp_path):
    pipeline(tmp_path)
    (tmp_path / "global_step7" / "mp_rank_00_model_states.pt").unlink()
    ck = ckptools.open(tmp_path)
    assert ("CK107", 0) in [(p.code, p.rank) for p in ck.problems] and ck.verdict.recoverable is False
    with pytest.raises(NotWholeError, match="which alone name what the stage had of the optimizer"):
        ck.consolidate(tmp_path / "out.pt")


def test_a_missing_layer_file_is_a_gap_in_the_modules_own_weights(tmp_path):
    pipeline(tmp_path)
    (tmp_path / "global_step7" / "layer_03-model_states.pt").unlink()
    assert ckptools.open(tmp_path, all_ranks=True).model["3.weight"].found
    low = ckptools.open(tmp_path, weights="module", all_ranks=True)
    with pytest.raises(NotWholeError, match=r"3\.weight"):
        ckptools.consolidate(low, tmp_path / "out.pt", only="model")


def test_a_layers_file_under_the_name_of_one_of_another_shape_is_an_error(tmp_path):
    pipeline(tmp_path)
    tag = tmp_path / "global_step7"
    shutil.copy(tag / "layer_00-model_states.pt", tag / "layer_03-model_states.pt")
    assert ("CK104", "model.3.weight") in [(p.code, p.tensor) for p in ckptools.open(tmp_path).problems]


@pytest.mark.parametrize(("value", "codes"), [("trained", ["CK009"]), ("ones", [])])
def test_two_equal_files_of_layers_may_be_copies(tmp_path, value, codes):
    shapes = {"1.weight": (5, 7), "2.weight": (5, 7)}
    full = values(shapes)
    dims = {"pp_degree": 1, "tp_degree": 1}
    tag = Run(full, [list(shapes)], 2, 1, dims=dims, module=None).save(tmp_path)
    for n in (1, 2):
        weight = full["1.weight"] if value == "trained" else torch.ones(5, 7)
        with (tag / f"layer_{n:02d}-model_states.pt").open("wb") as file:  # an archive without the name of its file
            torch.save({"weight": weight}, file)
    ck = ckptools.open(tmp_path)
    assert ([p.code for p in ck.problems], ck.whole) == (codes, True)


def test_two_layers_that_could_both_be_the_tied_one_keep_their_own_names(tmp_path):
    pipeline(tmp_path)
    torch.save({"weight": torch.ones(33, 7)}, tmp_path / "global_step7" / "layer_04-model_states.pt")
    ck = ckptools.open(tmp_path, weights="module", all_ranks=True)
    assert {"0.weight", "4.weight"} <= set(ck.model)
    gap, doubt = ck.problems
    assert (gap.code, gap.tensor) == ("CK101", "model.tied_modules.embed.weight")
    assert (doubt.tensor, "layers 0, 4 all fit it" in doubt.message) == ("tied_modules.embed", True)


def test_tensor_parallel_weights_are_shown_and_not_joined(tmp_path):
    for mp in range(2):
        Run(values({"w": (4, 6)}), [["w"]], 2, 1, mp=mp, mp_world=2).save(tmp_path)
    ck = ckptools.open(tmp_path)
    assert (ck.world_size.value, ck.model["w"].shape, "tensor parallel over 2" in ck.saved_as) == (4, (4, 6), True)
    for only in ("model", "optimizer"):
        with pytest.raises(NotWholeError, match="along which dimension"):
            ckptools.consolidate(tmp_path, tmp_path / "out.pt", only=only)


def test_layers_of_several_tensor_parallel_ranks_are_not_joined_either(tmp_path):
    pipeline(tmp_path)
    tag = tmp_path / "global_step7"
    for layer in tag.glob("layer_*"):
        shutil.copy(layer, tag / layer.name.replace("-", "-model_01-", 1))
        layer.rename(tag / layer.name.replace("-", "-model_00-", 1))
    with pytest.raises(NotWholeError, match="along which dimension"):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt", only="model")


@pytest.fixture
def universal(tmp_path) -> Path:
    shutil.copytree(UNIVERSAL, tmp_path / "u")
    return tmp_path / "u" / "global_step5_universal"


def test_a_universal_checkpoint_that_lacks_a_parameter_is_not_whole(universal, tmp_path):
    shutil.rmtree(universal / "zero" / "block.up.weight")
    ck = ckptools.open(universal)
    assert [p.code for p in ck.problems if p.severity == "error"] == ["CK001"]
    with pytest.raises(NotWholeError, match=r"block\.up\.weight"):
        ckptools.consolidate(universal, tmp_path / "out.pt", only="model")


@pytest.mark.parametrize("name", ["scale/exp_avg.pt", "block.up.weight/step.pt", "optimizer_state.pt"])
def test_a_universal_checkpoint_that_lacks_a_slot_is_not_whole(universal, tmp_path, name):
    (universal / "zero" / name).unlink()
    ck = ckptools.open(universal)
    assert [p.message for p in ck.problems if p.severity == "error"] == [f"no file zero/{name}"]
    with pytest.raises(NotWholeError, match=name):
        ckptools.consolidate(universal, tmp_path / "out.pt")
    ckptools.consolidate(universal, tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "other", "holds"),
    [
        ("mp_rank_00_model_states.pt", "zero/scale/fp32.pt", "model states"),
        ("zero/optimizer_state.pt", "zero/scale/fp32.pt", "param groups"),
        ("zero/scale/step.pt", "zero/embed.weight/exp_avg.pt", "step"),
        ("zero/scale/fp32.pt", "zero/optimizer_state.pt", "tensor"),
    ],
)
def test_a_file_in_the_place_of_another_kind_is_named(universal, name, other, holds, tmp_path):
    shutil.copy(universal / other, universal / name)
    ck = ckptools.open(universal)
    (problem,) = (p for p in ck.problems if p.severity == "error")
    assert (problem.code, problem.message) == ("CK018", f"{name} holds no {holds}; it is another file")
    with pytest.raises(NotWholeError):
        ck.consolidate(tmp_path / "out.pt", only="all")


def test_fp32_copies_of_two_parameters_that_changed_places_do_not_round_to_the_weights(universal, tmp_path):
    one, other = (universal / "zero" / name / "fp32.pt" for name in ("block.norm.bias", "block.up.bias"))
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)
    ck = ckptools.open(universal)
    assert [p.code for p in ck.verify(deep=True).problems if p.severity == "error"] == ["CK105", "CK105"]
    with pytest.raises(NotWholeError, match="does not round to the float32 weight"):
        ck.consolidate(tmp_path / "out.pt")


def test_a_parameter_that_came_flat_from_zero_3_gets_its_shape(universal):
    path = universal / "zero" / "embed.weight" / "fp32.pt"
    edited(path, lambda t: t.update(param=t["param"].reshape(-1)))
    before = ckptools.open(UNIVERSAL).model["embed.weight"]
    assert raw(ckptools.open(universal).model["embed.weight"]) == raw(before)


def test_a_flat_parameter_whose_elements_do_not_follow_each_other_has_no_values(universal):
    path = universal / "zero" / "embed.weight" / "fp32.pt"
    edited(path, lambda t: t.update(param=torch.stack([t["param"].reshape(-1)] * 2, 1)[:, 0]))
    tensor = ckptools.open(universal).model["embed.weight"]
    assert tensor.note == "a flat tensor that is not one row of consecutive elements" and not tensor.found
    with pytest.raises(ReadError, match="not one row"):
        tensor.load()


def test_a_parameter_of_another_shape_is_refused(universal, tmp_path):
    edited(universal / "zero" / "embed.weight" / "fp32.pt", lambda t: t.update(param=torch.ones(4, 4)))
    with pytest.raises(NotWholeError, match=r"holds \[4, 4\], param_shapes has \[33, 17\]"):
        ckptools.consolidate(universal, tmp_path / "out.pt", only="model")


def test_frozen_parameters_of_zero_3_stay_in_pieces_in_a_universal_checkpoint(tmp_path):
    run = Run(values({"w": (4, 3)}), [["w"]], 3, 3, torch.bfloat16, frozen={"still": torch.full((5, 2), 0.5)})
    tag = run.save(tmp_path)
    for rank in range(3):
        (tag / run.optim_name(rank)).unlink()
    (tag / "zero" / "w").mkdir(parents=True)
    torch.save({"param": run.master["w"].reshape(-1)}, tag / "zero" / "w" / "fp32.pt")
    torch.save(
        {"partition_count": 3, "param_groups": [{"lr": 0.1, "params": [0]}]}, tag / "zero" / "optimizer_state.pt"
    )
    ck = ckptools.open(tag)
    assert raw(ck.model["w"]) == of_torch(run.master["w"])
    assert raw(ck.model["still"]) == of_torch(run.frozen["still"].bfloat16())
    assert (ck.whole, ck.optimizers["optimizer"].param_groups[0].names) == (True, ("w",))


def test_frozen_parameters_of_a_universal_checkpoint_that_states_no_number_of_ranks_are_whole(tmp_path):
    run = Run(values({"w": (4, 3)}), [["w"]], 1, 3, torch.bfloat16, frozen={"still": torch.full((5, 2), 0.5)})
    tag = run.save(tmp_path)
    (tag / run.optim_name(0)).unlink()
    (tag / "zero" / "w").mkdir(parents=True)
    torch.save({"param": run.master["w"]}, tag / "zero" / "w" / "fp32.pt")
    torch.save({"param_groups": [{"lr": 0.1, "params": [0]}]}, tag / "zero" / "optimizer_state.pt")
    edited(tag / run.model_name(0), lambda tree: tree.pop("dp_world_size"))
    assert raw(ckptools.open(tag).model["still"]) == of_torch(run.frozen["still"].bfloat16())


def test_a_layer_without_its_file_is_a_checkpoint_that_is_not_whole(tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "deepspeed-pipe-fp32/ckpt", tmp_path / "ckpt"))
    assert ckptools.open(folder).whole
    (folder / "global_step3/layer_01-model_states.pt").unlink()
    ck = ckptools.open(folder)
    assert not ck.whole
    assert "no file layer_01-model_states.pt, which had 1.weight, 1.bias" in str(ck.problems[0])
    with pytest.raises(NotWholeError, match=r"no file layer_01-model_states\.pt"):
        ckptools.consolidate(folder, tmp_path / "out.safetensors")


@pytest.mark.parametrize("odd", [0, 2])
def test_a_step_that_only_one_rank_tells_is_not_the_checkpoints(tmp_path, odd):
    folder = Path(shutil.copytree(FIXTURES / "deepspeed-z3-bf16/ckpt/global_step5", tmp_path / "tag"))
    file = folder / f"zero_pp_rank_{odd}_mp_rank_00_model_states.pt"
    states = torch.load(file, weights_only=False)
    torch.save({**states, "global_steps": 99}, file)
    ck = ckptools.open(folder)
    assert (ck.step.value, ck.step.agree) == (5, False)
    assert "CK006" in {p.code for p in ck.problems}
