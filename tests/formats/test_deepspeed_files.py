"""The files of a DeepSpeed checkpoint: which folder is meant, which are missing, cut, doubled, or of another run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.errors import NotWholeError, ReadError, UnsafePathError, UsageError
from ckptools.formats import options as limits
from ckptools.formats.deepspeed.files import parse
from tests.formats.deepspeed_writer import Run, deepspeed_classes, values
from tests.truth import FIXTURES

Z1, Z3 = FIXTURES / "deepspeed-z1-fp32" / "ckpt", FIXTURES / "deepspeed-z3-bf16" / "ckpt"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


@pytest.fixture
def z1(tmp_path) -> Path:
    return copy(Z1, tmp_path / "ckpt") / "global_step5"


@pytest.fixture
def z3(tmp_path) -> Path:
    return copy(Z3, tmp_path / "ckpt") / "global_step5"


def told(ck: ckptools.Checkpoint, *severities: str) -> list[tuple[str, int | None]]:
    return [(p.code, p.rank) for p in ck.problems if p.severity in (severities or ("error",))]


def edited(path: Path, change: object) -> None:
    """Save a file anew after `change` did something to what it holds."""
    with deepspeed_classes():
        tree = torch.load(path, weights_only=False)
        change(tree)  # type: ignore[operator]
        torch.save(tree, path)


@pytest.mark.parametrize(
    ("name", "part", "mp", "dp"),
    [
        ("mp_rank_00_model_states.pt", "model", 0, None),
        ("zero_pp_rank_12_mp_rank_03_model_states.pt", "model", 3, 12),
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "optim", 0, 1),
        ("fp16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "optim", 0, 1),
        ("layer_07-model_states.pt", "layer", None, None),
        ("layer_07-model_01-model_states.pt", "layer", None, None),
        ("layer_3_expert_5_mp_rank_00_model_states.pt", "expert", 0, None),
        ("expp_rank_2_mp_rank_00_optim_states.pt", "expert optim", 0, None),
    ],
)
def test_a_name_says_what_the_file_holds(name, part, mp, dp):
    found = parse(Path(name))
    assert found is not None and (found.part, found.mp, found.dp) == (part, mp, dp)


@pytest.mark.parametrize("name", ["model_states.pt", "mp_rank_00_model_states.pt.tmp", "rank0.pt", "mp_rank_00"])
def test_other_names_are_not_deepspeeds(name):
    assert parse(Path(name)) is None


def test_a_trainers_folder_is_opened_by_the_latest_in_it(tmp_path):
    folder = copy(Z1, tmp_path / "checkpoint-5")
    torch.save({"w": torch.ones(2)}, folder / "rng_state_0.pth")
    (folder / "model.safetensors").write_bytes(b"")
    assert ckptools.open(folder).name == "global_step5"


def test_several_tags_without_latest_are_listed(z1):
    copy(z1, z1.parent / "global_step9")
    assert ckptools.open(z1.parent).name == "global_step5"
    (z1.parent / "latest").unlink()
    with pytest.raises(UsageError, match=r"2 checkpoints.*global_step9, global_step5"):
        ckptools.open(z1.parent)


def test_a_latest_that_names_an_absent_tag_is_told_with_those_that_are_here(z1):
    (z1.parent / "latest").write_text("global_step6\n")
    with pytest.raises(
        ReadError, match=r"latest: names the tag 'global_step6', which is not there \(CK016\); here are global_step5"
    ):
        ckptools.open(z1.parent)


@pytest.mark.parametrize("tag", ["../elsewhere", "/etc", ".", "..", "a/b", "a\0b", ""])
def test_a_latest_that_leads_elsewhere_is_refused(z1, tag):
    (z1.parent / "latest").write_text(tag)
    with pytest.raises(UnsafePathError, match="not the plain name"):
        ckptools.open(z1.parent)


def test_stray_optimizer_states_of_another_model_parallel_rank_leave_the_rest_readable(z1):
    shutil.copy(z1 / OPTIM.format(2), z1 / OPTIM.format(2).replace("mp_rank_00", "mp_rank_01"))
    ck = ckptools.open(z1)
    stray = [p.message for p in ck.problems if p.code == "CK009"]
    assert (
        "zero_pp_rank_2_mp_rank_01_optim_states.pt is model-parallel rank 1, and the save has 1 (mp_world_size)"
        in stray
    )
    assert ck.model["embed.weight"].shape == ckptools.open(Z1).model["embed.weight"].shape


def test_looking_inside_many_ranks_reads_one_file_of_each_kind(monkeypatch):
    monkeypatch.setattr(limits, "MAX_RANKS", 0)
    ck = ckptools.open(Z3)
    assert ck.whole is None
    assert (ck.cost.files, [f.status for f in ck.files].count("seen")) == (2, 6)
    assert {k: t.shape for k, t in ck.model.items()} == {
        k: t.shape for k, t in ckptools.open(Z3, all_ranks=True).model.items()
    }


def test_without_model_states_there_are_no_names(z1):
    (z1 / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(ReadError, match="no model states"):
        ckptools.open(z1)


def test_model_states_alone_show_names_and_say_what_is_missing(z1, tmp_path):
    for file in z1.glob("*optim_states.pt"):
        file.unlink()
    ck = ckptools.open(z1 / "mp_rank_00_model_states.pt")
    assert told(ck) == [("CK001", rank) for rank in range(4)] and len(ck.model) == 13
    with pytest.raises(NotWholeError, match="weights='module'"):
        ckptools.consolidate(z1, tmp_path / "out.safetensors", only="model")
    low = ckptools.open(z1, weights="module", all_ranks=True)
    ckptools.consolidate(low, tmp_path / "out.safetensors", only="model")


@pytest.mark.parametrize(
    ("stage", "others"),
    [
        (1, [("CK104", 2)]),
        (3, []),
    ],
)
def test_one_ranks_file_under_two_names_is_an_error(tmp_path, stage, others):
    run = Run(values({"a": (30, 7), "b": (40,)}), [["a", "b"]], 3, stage)
    tag = run.save(tmp_path)
    shutil.copy(tag / OPTIM.format(1), tag / OPTIM.format(2))
    ck = ckptools.open(tag, all_ranks=True)
    assert told(ck) == [*others, ("CK009", None)]
    assert any(f"{OPTIM.format(2)} was saved as {OPTIM.format(1)}, which is here too" in p.message for p in ck.problems)
    with pytest.raises(NotWholeError):
        ckptools.consolidate(tag, tmp_path / "out.pt")


@pytest.mark.parametrize("frozen", [torch.arange(99.0), torch.ones(99), torch.zeros(99)])
def test_model_states_with_another_ranks_frozen_pieces_are_a_copy(tmp_path, frozen):
    run = Run(values({"a": (30, 7)}), [["a"]], 3, 3, torch.bfloat16, frozen={"still": frozen})
    tag = run.save(tmp_path)
    shutil.copy(tag / "zero_pp_rank_1_mp_rank_00_model_states.pt", tag / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert [p.code for p in ckptools.open(tag, all_ranks=True).problems] == ["CK009"]


def test_optimizer_states_under_the_name_of_model_states_are_refused(z3):
    shutil.copy(z3 / ("bf16_" + OPTIM.format(0)), z3 / "zero_pp_rank_1_mp_rank_00_model_states.pt")
    with pytest.raises(ReadError, match=r"rank_1_mp_rank_00_model_states\.pt: holds optimizer states and no model"):
        ckptools.open(z3, all_ranks=True)


def test_a_copied_rank_of_zero_3_is_found_by_its_bytes_where_files_state_no_checksums(tmp_path):
    tag = Run(values({"a": (31, 7), "b": (5,)}), [["a", "b"]], 2, 3).save(tmp_path)
    with deepspeed_classes():
        for file in tag.glob("*.pt"):
            torch.save(torch.load(file, weights_only=False), file, _use_new_zipfile_serialization=False)
    assert ckptools.verify(tag, deep=True).ok
    shutil.copy(tag / OPTIM.format(0), tag / OPTIM.format(1))
    (found,) = (p for p in ckptools.verify(tag, deep=True).problems if p.code == "CK009")
    assert (found.code, found.severity, found.rank) == ("CK009", "warning", 1)


def test_swapped_optimizer_states_of_zero_3_are_known_by_the_names_they_were_saved_under(tmp_path):
    run = Run(values({"a": (30, 7), "b": (40,)}), [["a", "b"]], 2, 3)
    tag = run.save(tmp_path)
    for name, to in ((0, 2), (1, 0), (2, 1)):
        (tag / OPTIM.format(name)).rename(tag / OPTIM.format(to))
    ck = ckptools.open(tag, all_ranks=True)
    assert [p.code for p in ck.problems] == ["CK009", "CK009"]
    with pytest.raises(NotWholeError, match="was saved as"):
        ckptools.consolidate(tag, tmp_path / "out.pt")


def test_swapped_files_of_zero_1_contradict_their_mappings(z1):
    one, two = z1 / OPTIM.format(1), z1 / OPTIM.format(2)
    one.rename(z1 / "x")
    two.rename(one)
    (z1 / "x").rename(two)
    ck = ckptools.open(z1, all_ranks=True)
    (problem, *_) = ck.problems
    assert (problem.code, problem.rank) == ("CK104", 1)
    assert "rank 1: param_slice_mappings has 278 elements at 0 of block.up.weight, expected 215" in problem.message


def test_two_sets_of_optimizer_files_are_an_error(z1):
    shutil.copy(z1 / OPTIM.format(0), z1 / f"bf16_{OPTIM.format(0)}")
    assert ("CK009", 0) in told(ckptools.open(z1))


def test_a_file_of_another_world_size_is_an_error(tmp_path):
    run = Run(values({"a": (30, 7)}), [["a"]], 3)
    tag = run.save(tmp_path / "three")
    run.world = 2
    shutil.copy(run.save(tmp_path / "two") / OPTIM.format(1), tag)
    ck = ckptools.open(tag, all_ranks=True)
    assert told(ck)[0] == ("CK103", 1) and "partition_count [2], rank 0 has [3]" in ck.problems[0].message


def test_a_file_of_other_sub_groups_is_an_error(tmp_path):
    run = Run(values({"a": (30, 7), "b": (20,)}), [["a", "b"]], 2, 3)
    tag = run.save(tmp_path / "one")
    run.sub_group_size = 1
    shutil.copy(run.save(tmp_path / "two") / OPTIM.format(1), tag)
    ck = ckptools.open(tag, all_ranks=True)
    assert told(ck)[0] == ("CK104", 1) and "115 elements in 2 sub-groups (105, 10)" in ck.problems[0].message


def test_model_states_of_two_steps_are_an_error(z3):
    edited(z3 / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda tree: tree.update(global_steps=4))
    ck = ckptools.open(z3, all_ranks=True)
    assert [(p.code, p.tensor) for p in ck.problems if p.severity == "error"] == [("CK006", "global_steps")]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t["optimizer_state_dict"].update(partition_count=10**9), "more than any cluster"),
        (lambda t: t["optimizer_state_dict"].update(partition_count="x"), "partition_count is no positive number"),
        (lambda t: t.update(optimizer_state_dict=3), "no optimizer_state_dict"),
        (lambda t: t["optimizer_state_dict"].pop("single_partition_of_fp32_groups"), "single_partition"),
        (lambda t: t["optimizer_state_dict"]["single_partition_of_fp32_groups"].pop(), "1 flat groups, expected 2"),
        (lambda t: t["optimizer_state_dict"]["base_optimizer_state"]["param_groups"].pop(), "state is of 1 tensors"),
        (lambda t: t["optimizer_state_dict"].update(param_alignment_paddings=[[1], [2]]), "param_alignment_paddings"),
    ],
)
def test_optimizer_states_that_make_no_sense_are_one_line(z1, change, what):
    for rank in range(4):
        edited(z1 / OPTIM.format(rank), change)
    try:
        messages = [str(p) for p in ckptools.open(z1, all_ranks=True).problems if p.severity == "error"]
    except ReadError as error:
        messages = [str(error)]
    assert any(what in m and "\n" not in m for m in messages)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t.update(module=[1]), "module is a list"),
        (lambda t: t.update(param_shapes=7), "param_shapes is no list"),
        (lambda t: t.update(param_shapes=[{"a": (-1,)}]), "no name and shape"),
        (lambda t: t.update(param_shapes=[{"a": "xy"}]), "no name and shape"),
    ],
)
def test_model_states_that_make_no_sense_are_one_line(z1, change, what):
    edited(z1 / "mp_rank_00_model_states.pt", change)
    with pytest.raises(ReadError, match=what):
        ckptools.open(z1)


def test_a_pickle_that_is_no_dict_is_one_line(z1):
    torch.save([1, 2], z1 / "mp_rank_00_model_states.pt")
    with pytest.raises(ReadError, match="holds a list, expected the dict"):
        ckptools.open(z1)
