"""One stage of a pipeline alone, or some of its files: what they tell of the others, and what cannot be told."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptools
from ckptools.errors import NotWholeError
from ckptools.formats.rank_search.one_of_several import missing_layers
from ckptools.formats.rank_search.rank_groups import stated_world_size
from tests.formats.stages import Model, save, train_stages, trained

STATED = "ranks hold parameters of their own, and nothing states how many ranks there were"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stages of two blocks, each in the file of its rank."""
    ranks = train_stages(3, blocks=6)
    return save(tmp_path_factory.mktemp("stages") / "run", [one.content for one in ranks])


@pytest.fixture
def run(three: Path, tmp_path: Path) -> Path:
    return shutil.copytree(three, tmp_path / "run")


def file(run: Path, rank: int) -> Path:
    return run / f"ckpt-rank{rank}.pt"


def told(path: Path, severity: str = "warning") -> list[str]:
    return [p.message for p in ckptools.open(path).problems if p.severity == severity]


def verdict(path: Path) -> tuple[bool | None, str]:
    ck = ckptools.open(path)
    return ck.whole, ck.verdict.headline


# -- files that are lost or copied -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_is_lost_before_others_is_an_error(rank: int, run: Path, tmp_path: Path) -> None:
    file(run, rank).unlink()
    lost = f"ranks hold parameters of their own; those of rank {rank} are nowhere else"
    between = ": model.blocks.2 and 1 more" if rank == 1 else ""
    assert verdict(run) == (False, f"NOT WHOLE: rank {rank} missing; part of the model missing{between}")
    with pytest.raises(NotWholeError, match=lost):
        ckptools.consolidate(run, tmp_path / "all.pt")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_stage_that_is_cut_is_an_error(rank: int, run: Path) -> None:
    file(run, rank).write_bytes(file(run, rank).read_bytes()[:5000])
    problems = [p.message for p in ckptools.open(run, all_ranks=True).problems]
    assert f"ranks hold parameters of their own; those of rank {rank} are nowhere else" in problems


def test_that_the_last_stage_is_lost_nothing_tells_so_the_rest_is_not_called_whole(run: Path, tmp_path: Path) -> None:
    file(run, 2).unlink()
    assert verdict(run) == (None, "not proven whole; 1 warning: part of the model missing")
    assert ckptools.open(run).verdict.remark == "2 files, each whole in itself; files that are not here may hold more"
    assert STATED in ckptools.consolidate(run, tmp_path / "all.pt").notes


def test_swapped_stages_are_the_same_model(run: Path, tmp_path: Path) -> None:
    ckptools.consolidate(run, tmp_path / "right.pt")
    file(run, 0).rename(run / "other")
    file(run, 2).rename(file(run, 0))
    (run / "other").rename(file(run, 2))
    ckptools.consolidate(run, tmp_path / "swapped.pt")
    right, swapped = (torch.load(tmp_path / f"{name}.pt") for name in ("right", "swapped"))
    assert right["model"].keys() == swapped["model"].keys()
    assert all(torch.equal(right["model"][name], swapped["model"][name]) for name in right["model"])
    assert right["optimizer"]["state"].keys() == swapped["optimizer"]["state"].keys()


@pytest.mark.parametrize(("to", "absent"), [(1, "blocks has no 2, 3 here"), (2, None)])
def test_a_stage_that_lies_over_another_is_suspected(to: int, absent: str | None, run: Path) -> None:
    shutil.copy(file(run, 0), file(run, to))
    warnings = told(run)
    text = f"ranks 0, {to} hold the same parameters, and others are on fewer ranks; a file may be a copy"
    assert text in warnings
    assert any(absent in message for message in warnings) if absent else verdict(run)[0] is None


def test_every_stage_on_as_many_ranks_is_no_copy(run: Path) -> None:
    for rank in range(3):
        torch.save(torch.load(file(run, rank), weights_only=False), file(run, rank + 3))
    assert told(run) == [STATED]


# -- one file alone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "absent"), [(1, "0, 1"), (2, "0..3")])
def test_a_later_stage_alone_lacks_the_layers_before_it(rank: int, absent: str, run: Path, tmp_path: Path) -> None:
    one = shutil.copy(file(run, rank), tmp_path / "model.pt")
    lacking = f"blocks has no {absent} here, and later ones; another file may hold what is absent"
    assert (told(one), verdict(one)) == ([lacking], (None, "not proven whole; 1 warning: part of the model missing"))
    assert ckptools.open(one).verdict.remark == "1 file, whole in itself; files that are not here may hold more"


def test_the_rank_in_the_name_of_a_file_alone_speaks_of_others(run: Path, tmp_path: Path) -> None:
    first = Path(shutil.copy(file(run, 0), tmp_path))
    text = "whole: one file, rank 0's by its name; that other ranks hold more is not excluded"
    assert verdict(first)[1] == text
    fourth = first.rename(file(tmp_path, 3))
    assert told(fourth) == ["rank 3's file by its name, and no other rank's is here; they may hold more"]


def test_one_whole_model_is_called_whole(tmp_path: Path) -> None:
    torch.save(trained(Model(2), seed=1).content, tmp_path / "model.pt")
    assert verdict(tmp_path / "model.pt") == (True, "whole: one file holds everything")


# -- what files say of themselves --------------------------------------------------------------------------------------


def stages_with(folder: Path, *fields: dict[str, Any], name: str = "ckpt-rank{}.pt") -> Path:
    ranks = train_stages(len(fields))
    return save(folder, [{**one.content, **own} for one, own in zip(ranks, fields, strict=True)], name)


@pytest.mark.parametrize("names", [("pp_rank", "pp_size"), ("stage_index", "num_stages")])
def test_a_file_that_says_which_stage_it_is_proves_that_others_are_missing(
    names: tuple[str, str], tmp_path: Path
) -> None:
    number, count = names
    folder = stages_with(tmp_path / "run", *({"parallel": {number: stage, count: 2}} for stage in range(2)))
    assert verdict(folder)[0] is True
    (folder / "ckpt-rank1.pt").unlink()
    text = f"holds stage 0 of 2 by its own account ({number} and {count}); the others are in no file here"
    assert told(folder, "error") == [text]
    with pytest.raises(NotWholeError, match="holds stage 0 of 2"):
        ckptools.consolidate(folder, tmp_path / "all.pt")


def test_a_stated_world_size_tells_of_the_last_rank(tmp_path: Path) -> None:
    folder = stages_with(tmp_path, {"world_size": 3}, {"world_size": 3})
    assert told(folder, "error") == [
        "no file ckpt-rank2.pt",
        "ranks hold parameters of their own; those of rank 2 are nowhere else",
    ]
    two = stages_with(tmp_path / "two", {"world_size": 2}, {"world_size": 2})
    assert verdict(two) == (True, "whole: all 2 rank files are here, all read")


def test_files_that_speak_of_other_numbers_of_stages_are_of_two_runs(tmp_path: Path) -> None:
    folder = stages_with(tmp_path, *({"stage": stage, "num_stages": 2 + stage} for stage in range(2)))
    assert told(folder, "error") == ["files speak of 2 and of 3 stages (stage and num_stages)"]


# -- files beside one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_the_next_number_with_other_parameters_is_named(suffix: str, tmp_path: Path) -> None:
    for rank, one in enumerate(train_stages(2)):
        content = one.content["model"]
        save_file(content, tmp_path / f"stage_{rank}.safetensors")
        torch.save(content, tmp_path / f"stage_{rank}.pt")
    problem = ckptools.open(tmp_path / f"stage_0.{suffix}").problems[0]
    assert (problem.code, problem.severity, verdict(tmp_path / f"stage_0.{suffix}")[0]) == ("CK011", "warning", None)
    assert problem.message.startswith(f"stage_1.{suffix} beside it holds parameters that it lacks (blocks.2.0.")
    both = ckptools.open([tmp_path / "stage_0.pt", tmp_path / "stage_1.pt"])
    assert (both.in_parts, [p.message for p in both.problems]) == (True, [STATED])


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_the_next_number_of_the_same_model_or_of_what_cannot_be_read_is_no_part(suffix: str, tmp_path: Path) -> None:
    for epoch in (2, 3):
        content = trained(Model(2), epoch).content["model"]
        save_file(content, tmp_path / f"m_{epoch}.safetensors")
        torch.save(content, tmp_path / f"m_{epoch}.pt")
    (tmp_path / f"m_1.{suffix}").write_bytes(b"PK\3\4")
    assert verdict(tmp_path / f"m_2.{suffix}") == (True, "whole: one file holds everything")


def test_the_next_version_of_an_adapter_is_no_part(tmp_path: Path) -> None:
    for version, name in ((1, "a"), (2, "b")):
        pair = {f"{name}.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}
        save_file(pair, tmp_path / f"style_v{version}.safetensors")
    assert verdict(tmp_path / "style_v1.safetensors")[0] is True


# -- numbers of layers -------------------------------------------------------------------------------------------------


def linears(*numbers: int) -> nn.ModuleDict:
    return nn.ModuleDict({str(n): nn.Linear(2, 2) for n in numbers})


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ([nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))], {}),
        ([linears(4, 5)], {"the model": "0..3"}),
        ([linears(0, 1), linears(2, 3)], {}),
        ([nn.ModuleDict({"layers": nn.ModuleDict({"2": nn.Sequential(nn.Linear(2, 2))})})], {"layers": "0, 1"}),
    ],
    ids=["modules without parameters have numbers", "first ones absent", "on several ranks", "below a name"],
)
@pytest.mark.parametrize("listed", [True, False])
def test_absent_numbers_are_found_by_the_modules_that_are_listed_or_else_have_modules_in_them(
    modules: list[nn.Module], absent: dict[str, str], listed: bool, tmp_path: Path
) -> None:
    trees = []
    for module in modules:
        state = module.state_dict()
        torch.save(state if listed else dict(state), tmp_path / "x.pt")
        trees.append(ckptools.open(tmp_path / "x.pt").tree)
    expected = absent if listed or "layers" in absent else {}
    assert missing_layers(trees) == expected


def test_the_world_size_is_stated_at_the_root_or_in_the_metadata_of_composer() -> None:
    assert stated_world_size([{"state": {"metadata": {"world_size": 8}}}]) == 8
    assert stated_world_size([{"world_size": 4}, {"state": {}}]) == 4
    assert stated_world_size([{"state": {"metadata": {"world_size": True}}}, []]) is None
