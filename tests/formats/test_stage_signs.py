"""One stage of a pipeline alone, or some of its files: what they tell of the others, and what cannot be told."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptools
from ckptools.errors import NotWholeError
from ckptools.formats.rank_search.rank_groups import stated_world_size
from ckptools.formats.rank_search.signs_of_parts import missing_layers
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


def keep(run: Path, *ranks: int) -> Path:
    for rank in {0, 1, 2} - set(ranks):
        file(run, rank).unlink()
    return run


# -- files that are lost or copied ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_is_lost_before_others_is_an_error(rank: int, run: Path, tmp_path: Path) -> None:
    file(run, rank).unlink()
    lost = f"ranks hold parameters of their own; those of rank {rank} are nowhere else"
    between = ", part of the model missing: model.blocks.2 and 1 more" if rank == 1 else ""
    assert verdict(run) == (False, f"NOT WHOLE: rank {rank} missing, {lost}{between}")
    with pytest.raises(NotWholeError, match=lost):
        ckptools.consolidate(run, tmp_path / "all.pt")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_stage_that_is_cut_is_an_error(rank: int, run: Path) -> None:
    file(run, rank).write_bytes(file(run, rank).read_bytes()[:5000])
    problems = [p.message for p in ckptools.open(run, all_ranks=True).problems]
    assert f"ranks hold parameters of their own; those of rank {rank} are nowhere else" in problems


def test_that_the_last_stage_is_lost_nothing_tells_so_the_rest_is_not_called_whole(run: Path, tmp_path: Path) -> None:
    keep(run, 0, 1)
    text = "2 files, each whole in itself; files that are not here may hold more"
    assert verdict(run) == (None, f"{text}; 1 warning: {STATED}")
    assert STATED in ckptools.consolidate(run, tmp_path / "all.pt").notes


def test_a_flipped_bit_in_a_stage_is_found(run: Path) -> None:
    data = bytearray(file(run, 1).read_bytes())
    at = data.find(torch.load(file(run, 1))["model"]["blocks.2.0.weight"].numpy().tobytes())
    data[at] ^= 1
    file(run, 1).write_bytes(data)
    errors = [p for p in ckptools.verify(run, deep=True).problems if p.severity == "error"]
    assert [(p.code, p.rank) for p in errors] == [("CK004", 1)]


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


# -- one file alone ------------------------------------------------------------------------------------------------


def test_the_first_stage_alone_is_whole_in_itself_and_no_more_is_said(run: Path) -> None:
    keep(run, 0)
    text = "whole: one file, rank 0's by its name; that other ranks hold more is not excluded"
    assert verdict(run)[1] == text


@pytest.mark.parametrize(("rank", "absent"), [(1, "0, 1"), (2, "0..3")])
def test_a_later_stage_alone_lacks_the_layers_before_it(rank: int, absent: str, run: Path, tmp_path: Path) -> None:
    one = shutil.copy(file(run, rank), tmp_path / "model.pt")
    lacking = f"blocks has no {absent} here, and later ones; another file may hold what is absent"
    text = "1 file, whole in itself; files that are not here may hold more"
    assert (told(one), verdict(one)) == ([lacking], (None, f"{text}; 1 warning: {lacking}"))


def test_a_higher_rank_in_the_name_speaks_of_lower_ones(tmp_path: Path) -> None:
    folder = save(tmp_path, [trained(Model(2), seed=1).content])
    file(folder, 0).rename(file(folder, 3))
    assert told(file(folder, 3)) == ["rank 3's file by its name, and no other rank's is here; they may hold more"]


def test_one_whole_model_is_called_whole(tmp_path: Path) -> None:
    torch.save(trained(Model(2), seed=1).content, tmp_path / "model.pt")
    assert verdict(tmp_path / "model.pt") == (True, "whole: one file holds everything")


# -- what files say of themselves ----------------------------------------------------------------------------------


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


def test_a_stated_world_size_that_is_here_makes_it_whole(tmp_path: Path) -> None:
    assert verdict(stages_with(tmp_path, {"world_size": 2}, {"world_size": 2})) == (
        True,
        "whole: all 2 rank files are here, all read",
    )


def test_files_that_speak_of_other_numbers_of_stages_are_of_two_runs(tmp_path: Path) -> None:
    folder = stages_with(tmp_path, *({"stage": stage, "num_stages": 2 + stage} for stage in range(2)))
    assert told(folder, "error") == ["files speak of 2 and of 3 stages (stage and num_stages)"]


# -- files beside one ----------------------------------------------------------------------------------------------


def test_the_next_number_with_other_parameters_is_named(tmp_path: Path) -> None:
    stages_with(tmp_path, {}, {}, name="stage_{}.pt")
    message = told(tmp_path / "stage_0.pt")[0]
    assert message.startswith("stage_1.pt beside it holds parameters that it lacks (blocks.2.0.weight and ")
    both = ckptools.open([tmp_path / "stage_0.pt", tmp_path / "stage_1.pt"])
    assert (both.in_parts, [p.message for p in both.problems]) == (True, [STATED])


def test_the_next_number_with_other_parameters_is_a_warning_with_a_code(tmp_path: Path) -> None:
    stages_with(tmp_path, {}, {}, name="stage_{}.pt")
    (beside,) = [p for p in ckptools.open(tmp_path / "stage_0.pt").problems if "stage_1.pt" in p.message]
    assert (beside.code, beside.severity) == ("CK011", "warning")


def test_the_next_number_of_the_same_model_is_another_save(tmp_path: Path) -> None:
    save(tmp_path, [trained(Model(2), seed).content for seed in range(2)], "model_{}.pt")
    assert verdict(tmp_path / "model_0.pt") == (True, "whole: one file holds everything")


def test_a_damaged_file_beside_it_is_not_its_matter(tmp_path: Path) -> None:
    save(tmp_path, [trained(Model(2), seed).content for seed in range(2)], "model_{}.pt")
    (tmp_path / "model_1.pt").write_bytes(b"PK\3\4")
    assert verdict(tmp_path / "model_0.pt")[0] is True


# -- numbers of layers -----------------------------------------------------------------------------------------------


def lazy(module: nn.Module, folder: Path, with_modules: bool = True) -> dict[str, Any]:
    state = module.state_dict()
    torch.save(state if with_modules else dict(state), folder / "x.pt")
    tree: dict[str, Any] = ckptools.open(folder / "x.pt").tree
    return tree


@pytest.mark.parametrize("with_modules", [True, False])
def test_modules_without_parameters_have_numbers_too(with_modules: bool, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert missing_layers([lazy(net, tmp_path, with_modules)]) == {}


def test_a_part_of_a_sequential_lacks_its_first_numbers(tmp_path: Path) -> None:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))[4:]
    assert missing_layers([lazy(net, tmp_path)]) == {"the model": "0..3"}


def test_layers_are_known_by_modules_in_them_where_none_are_listed(tmp_path: Path) -> None:
    layers = nn.ModuleDict({"layers": nn.ModuleDict({"2": nn.Sequential(nn.Linear(2, 2))})})
    assert missing_layers([lazy(layers, tmp_path, with_modules=False)]) == {"layers": "0, 1"}


def test_layers_on_several_ranks_are_counted_together(tmp_path: Path) -> None:
    halves = [nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))[part] for part in (slice(0, 2), slice(2, 4))]
    assert missing_layers([lazy(half, tmp_path) for half in halves]) == {}


def test_composer_states_its_world_size_in_the_metadata_of_its_state():
    assert stated_world_size([{"state": {"metadata": {"world_size": 8}}}]) == 8
    assert stated_world_size([{"world_size": 4}, {"state": {}}]) == 4
    assert stated_world_size([{"state": {"metadata": {"world_size": True}}}, []]) is None
