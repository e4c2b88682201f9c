"""Optimizers that stages of a pipeline saved by number: each rank's are named by its own model, or kept apart."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptools
from ckptools.errors import NotWholeError, RefusedError, UsageError
from ckptools.formats.rank_files import NO_MODEL
from tests.formats import stages
from tests.formats.stages import Trained, by_decay, save, train_stages, trained


def contents(ranks: list[Trained]) -> list[dict[str, Any]]:
    return [one.content for one in ranks]


def without_metadata(ranks: list[Trained]) -> list[dict[str, Any]]:
    """Files whose state dicts have lost the list of their modules, so that their order proves nothing."""
    return [{**one.content, "model": dict(one.content["model"])} for one in ranks]


def moments_in(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path)["optimizer"]["state"]
    return state


def assert_moments(found: dict[str, Any], ranks: list[Trained]) -> None:
    expected = {name: slots for one in ranks for name, slots in one.moments.items()}
    assert found.keys() == expected.keys()
    for name, slots in expected.items():
        for slot, value in slots.items():
            assert torch.equal(found[name][slot], value), (name, slot)


def errors(ck: ckptools.Checkpoint, deep: bool = True) -> list[str]:
    return [p.message for p in ckptools.verify(ck, deep=deep).problems if p.severity == "error"]


@pytest.mark.parametrize("count", [2, 4])
def test_every_moment_gets_the_name_it_has_on_its_own_rank(count: int, tmp_path: Path) -> None:
    ranks = train_stages(count)
    folder = save(tmp_path / "run", contents(ranks))
    assert errors(ckptools.open(folder)) == []
    ckptools.consolidate(folder, tmp_path / "all.pt")
    assert_moments(moments_in(tmp_path / "all.pt"), ranks)


def test_param_groups_are_joined_by_name(tmp_path: Path) -> None:
    ranks = train_stages(params=by_decay)
    ckptools.consolidate(save(tmp_path / "run", contents(ranks)), tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt")
    assert_moments(state["optimizer"]["state"], ranks)
    for group, many in zip(state["optimizer"]["param_groups"], (True, False), strict=True):
        assert set(group["params"]) == {n for n, t in state["model"].items() if (t.ndim > 1) is many}


def test_names_by_order_are_called_assumed(tmp_path: Path) -> None:
    naming = ckptools.open(save(tmp_path, contents(train_stages()))).optimizers["optimizer"].naming
    assert (naming.by, len(naming.assumed) > 0, naming.unnamed) == ("order", True, ())


def test_names_that_each_rank_lists_are_believed(tmp_path: Path) -> None:
    ranks = train_stages(params=lambda model: model.named_parameters())
    ck = ckptools.open(save(tmp_path / "run", contents(ranks)))
    assert (ck.optimizers["optimizer"].naming.by, errors(ck)) == ("fqn", [])
    assert_moments(
        {name: {} for name in ck.optimizers["optimizer"].state}, [Trained({}, {n: {} for n in names(ranks)})]
    )


def test_lists_of_names_that_are_none_on_one_rank_are_not_joined(tmp_path: Path) -> None:
    one, other = contents(train_stages(params=lambda model: model.named_parameters()))
    other["optimizer"]["param_groups"][0]["param_names"] = 7
    ck = ckptools.open(save(tmp_path / "run", [one, other]))
    assert [p.tensor for p in ck.problems if p.code == "CK105"] == ["optimizer.param_groups.0.param_names"]


def names(ranks: list[Trained]) -> list[str]:
    return [name for one in ranks for name in one.moments]


def test_replicas_of_a_stage_have_one_name_and_are_compared(tmp_path: Path) -> None:
    first, second = train_stages()
    folder = save(tmp_path / "run", contents([first, first, second, second]))
    assert errors(ckptools.open(folder)) == []
    other = trained(stages.stage(1, 2), seed=7)
    torch.save({**second.content, "optimizer": other.content["optimizer"]}, folder / "ckpt-rank3.pt")
    assert any("rank 3 holds other bytes than rank 2" in message for message in errors(ckptools.open(folder)))


def test_numbers_that_nothing_names_are_never_joined(tmp_path: Path) -> None:
    ranks = train_stages()
    folder = save(tmp_path / "run", without_metadata(ranks))
    ck = ckptools.open(folder)
    unnamed = [key for key in ck.optimizers["optimizer"].state if key.startswith("?")]
    assert len(ck.optimizers["optimizer"].state) == len(names(ranks))
    assert {key.rpartition(" ")[2] for key in unnamed} == {"0", "1"}
    with pytest.raises(NotWholeError, match=r"every rank numbers its own.*names FROM") as refused:
        ckptools.consolidate(folder, tmp_path / "all.pt")
    assert "prefer-rank" not in str(refused.value)
    assert not (tmp_path / "all.pt").exists()


def test_the_model_is_written_where_its_optimizer_has_no_names(tmp_path: Path) -> None:
    ranks = train_stages()
    ckptools.consolidate(save(tmp_path / "run", without_metadata(ranks)), tmp_path / "model.pt", only="model")
    saved, expected = (
        torch.load(tmp_path / "model.pt"),
        {k: t for one in ranks for k, t in one.content["model"].items()},
    )
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


def test_a_rank_is_not_preferred_to_those_with_other_parameters(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", without_metadata(train_stages()))
    with pytest.raises(NotWholeError, match="every rank numbers its own"):
        ckptools.consolidate(folder, tmp_path / "all.pt", prefer_rank=1)


def test_one_name_for_two_parameters_is_no_matter_of_preference(tmp_path: Path) -> None:
    first, second = (dict(one.content) for one in train_stages())
    second["model"] = {k.replace("blocks.2", "blocks.0"): v for k, v in second["model"].items()}
    with pytest.raises(NotWholeError, match="one name may stand for two") as refused:
        ckptools.consolidate(save(tmp_path / "run", [first, second]), tmp_path / "all.pt", only="model")
    assert "prefer-rank" not in str(refused.value)


@pytest.mark.parametrize("told", ["list", "module"])
def test_names_that_are_told_are_those_of_all_ranks(told: str, tmp_path: Path) -> None:
    ranks = train_stages()
    folder = save(tmp_path / "run", without_metadata(ranks))
    given: Any = names(ranks) if told == "list" else stages.Model(4)
    ck = ckptools.open(folder, names=given)
    assert errors(ck) == []
    ck.consolidate(tmp_path / "all.pt")
    assert_moments(moments_in(tmp_path / "all.pt"), ranks)


def test_names_in_a_json_that_do_not_fit_a_rank_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", without_metadata(train_stages()))
    (tmp_path / "names.json").write_text(json.dumps(["emb.weight", "head.weight"]))
    with pytest.raises(RefusedError, match="for rank 0: has the names of 1 parameters, and the optimizer numbers 13"):
        ckptools.open(folder, names=tmp_path / "names.json")


def test_names_are_not_asked_for_where_the_ranks_say_them(tmp_path: Path) -> None:
    ranks = [
        {**one.content, "optimizer": {"state": one.moments, "param_groups": [{"lr": 0.1, "params": list(one.moments)}]}}
        for one in train_stages()
    ]
    with pytest.raises(UsageError, match="no optimizer here is keyed by number"):
        ckptools.open(save(tmp_path, ranks), names=["emb.weight"])


def test_ranks_that_all_have_the_model_keep_their_numbers(tmp_path: Path) -> None:
    one = trained(stages.Model(2), seed=1)
    ckptools.consolidate(save(tmp_path / "run", [one.content, one.content]), tmp_path / "all.pt")
    assert set(moments_in(tmp_path / "all.pt")) == set(range(len(one.moments)))


# -- no model beside -----------------------------------------------------------------------------------------------


def without_model(ranks: list[Trained]) -> list[dict[str, Any]]:
    return [{"optimizer": one.content["optimizer"], "step": 3} for one in ranks]


def equal_stages() -> list[Trained]:
    """Two stages with as many parameters of the same shapes."""
    return [trained(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), seed) for seed in (1, 2)]


@pytest.mark.parametrize("ranks", [train_stages, equal_stages])
def test_numbers_of_stages_without_their_models_are_kept_apart_and_no_rank_is_preferred(ranks, tmp_path: Path) -> None:
    folder = save(tmp_path / "run", without_model(ranks()))
    ck = ckptools.open(folder)
    assert {key.rpartition(" of rank ")[2] for key in ck.optimizers["optimizer"].state} == {"0", "1"}
    assert {t.note for entry in ck.optimizers["optimizer"].state.values() for t in entry.values()} == {NO_MODEL}
    assert not any(problem.code == "CK105" for problem in ckptools.verify(ck, deep=True).problems)
    with pytest.raises(NotWholeError, match="numbered rank by rank, and no model of each rank is here") as refused:
        ckptools.consolidate(folder, tmp_path / "all.pt")
    assert "prefer-rank" not in str(refused.value) and "--only model" not in str(refused.value)


def test_copies_of_an_optimizer_without_a_model_are_one(tmp_path: Path) -> None:
    first, _ = equal_stages()
    ck = ckptools.open(save(tmp_path / "run", without_model([first, first])))
    assert list(ck.optimizers["optimizer"].state) == [0, 1, 2, 3]
    assert {check.name: check.result for check in ckptools.verify(ck).checks}["copies equal"] == "ok"


def test_a_copy_of_an_optimizer_with_other_bytes_somewhere_is_still_a_copy(tmp_path: Path) -> None:
    first, _ = equal_stages()
    one, other = (copy.deepcopy(content) for content in without_model([first, first]))
    other["optimizer"]["state"][2]["exp_avg"] += 1
    ck = ckptools.open(save(tmp_path / "run", [one, other]))
    assert list(ck.optimizers["optimizer"].state) == [0, 1, 2, 3]
    assert [p.tensor for p in ckptools.verify(ck).problems if p.code == "CK105"] == ["optimizer.state.2.exp_avg"]


def test_of_copies_that_differ_none_is_preferred_and_one_may_be_opened(
    tmp_path: Path,
) -> None:
    one, other = without_metadata(equal_stages())
    folder = save(tmp_path / "run", [one, other])
    assert list(ckptools.open(folder).optimizers["optimizer"].state) == [0, 1, 2, 3]
    with pytest.raises(NotWholeError, match="prefer_rank 1 would write one rank's values for all"):
        ckptools.consolidate(folder, tmp_path / "all.pt", prefer_rank=1)
    (file,) = folder.glob("*rank1.pt")
    ckptools.open(file, only_this_file=True).consolidate(tmp_path / "all.pt", only="all")
    written = torch.load(tmp_path / "all.pt")["optimizer"]["state"]
    assert torch.equal(written[0]["exp_avg"], other["optimizer"]["state"][0]["exp_avg"])


def test_names_that_are_told_are_those_of_every_rank(tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps(["0.weight", "0.bias", "1.weight", "1.bias"]))
    folder = save(tmp_path / "run", without_model(equal_stages()))
    ck = ckptools.open(folder, names=tmp_path / "names.json")
    assert list(ck.optimizers["optimizer"].state) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    folder = save(tmp_path / "more", without_model(train_stages()))
    with pytest.raises(RefusedError, match="has the names of 4 parameters, and the optimizer numbers 13"):
        ckptools.open(folder, names=tmp_path / "names.json")


def test_ranks_that_number_not_as_many_are_no_copies_although_one_has_every_name_of_the_model(tmp_path: Path) -> None:
    small, large = (
        trained(nn.Sequential(nn.Linear(4, 4)), 1),
        trained(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2),
    )
    ck = ckptools.open(save(tmp_path / "run", contents([small, large])))
    keys = [key for key in ck.optimizers["optimizer"].state if isinstance(key, int)]
    assert keys == [] and not ckptools.verify(ck).ok


def test_the_model_and_the_optimizer_of_a_rank_in_two_files_are_no_sign_of_a_copied_file(tmp_path: Path) -> None:
    for rank, one in enumerate(train_stages()):
        for part, key in (("model", "model"), ("optim", "optimizer")):
            torch.save(one.content[key], tmp_path / f"{part}_world_size_2_rank_{rank}.pt")
    ck = ckptools.open(tmp_path)
    assert (ck.in_parts, [p for p in ck.problems if p.severity != "note"]) == (True, [])


def by_name(*names: str, state: tuple[str, ...] = ()) -> dict[str, Any]:
    """An optimizer that is keyed by name, as FSDP saves one; moments are those of `state` or of all names."""
    moments = {name: {"exp_avg": torch.full((3, 2), len(name) / 8)} for name in state or names}
    return {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(names)}]}


def test_names_that_ranks_list_in_another_order_are_one_list(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", [by_name("a", "bb", "ccc"), by_name("ccc", "a", "bb")])
    assert errors(ckptools.open(folder)) == []
    ckptools.consolidate(folder, tmp_path / "all.pt")
    assert torch.load(tmp_path / "all.pt")["param_groups"][0]["params"] == ["a", "bb", "ccc"]


def test_a_parameter_that_one_rank_alone_owns_is_its_own(tmp_path: Path) -> None:
    ranks = [by_name("a", f"sparse.{rank}") for rank in range(3)]
    folder = save(tmp_path / "run", ranks)
    assert ckptools.verify(folder, deep=True).problems == ()
    ckptools.consolidate(folder, tmp_path / "all.pt")
    assert torch.load(tmp_path / "all.pt")["param_groups"][0]["params"] == ["a", "sparse.0", "sparse.1", "sparse.2"]


def test_a_name_that_a_rank_has_state_for_and_does_not_list_is_a_difference(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", [by_name("a", "bb"), by_name("a", state=("a", "bb"))])
    assert any("param_groups.0.params" in str(p) for p in ckptools.verify(folder).problems)
