"""Recipes: which parts of a folder are read, and what is said of one that is missing, unreadable or a link."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptools.errors import ReadError, UnsafePathError
from ckptools.formats.dcp.folder import PLANNED
from ckptools.formats.options import Options
from ckptools.formats.recipe import Part, PartsBuilder, Recipe, stated
from ckptools.model.checkpoint import Checkpoint
from ckptools.training_state.optimizers import AS_SAVED
from tests.formats.test_accelerate import save

RECIPE = Recipe(
    NAME="toy",
    READS="a toy",
    KNOWN_BY="its signs",
    signs=(("model/.metadata", "model.pt"), ("counters.json", "state/rank_0.pt")),
    parts=(
        Part(("model.pt", "model"), "model", PartsBuilder.add_dcp, "error", " of this toy", needed=True),
        Part(("state/rank_{rank}.pt",), "state", PartsBuilder.add_states, "warning"),
        Part(("rest/counters.json", "counters.json"), "counters", PartsBuilder.add_file, "note"),
    ),
    saved_as="a toy, {parts.form}",
    world_size=stated("counters", "ranks"),
)


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "toy"
    save(path / "model", {"w": torch.ones(3)})
    (path / "state").mkdir()
    for rank in range(3):
        torch.save({"seed": rank}, path / f"state/rank_{rank}.pt")
    (path / "counters.json").write_text(json.dumps({"step": 5, "ranks": 3}))
    return path


def opened(folder: Path, recipe: Recipe = RECIPE) -> Checkpoint:
    return recipe.read(folder, Options())


def said(folder: Path, recipe: Recipe = RECIPE) -> list[tuple[str, str, str | None, int | None, str]]:
    return [(p.code, p.severity, p.tensor, p.rank, p.message) for p in opened(folder, recipe).problems]


def test_every_part_stands_under_its_key(folder):
    ck = opened(folder)
    assert (list(ck.tree), list(ck.tree["state"])) == (["model", "state", "counters"], [0, 1, 2])
    assert (ck.world_size.value, ck.world_size.sources) == (3, ("counters.ranks",))
    assert (ck.saved_as[:18], ck.step.value, ck.problems) == ("a toy, DCP folders", 5, ())
    assert ck.module_order == PLANNED
    assert {f.status for f in ck.files} <= {"read", "seen"} and ck.bytes_expected == sum(f.nbytes for f in ck.files)


@pytest.mark.parametrize(
    ("gone", "known"), [("model", False), ("counters.json", True), ("state", True), ("state counters.json", False)]
)
def test_a_folder_is_recognised_by_one_file_of_each_group(folder, gone, known):
    for name in gone.split():
        (shutil.rmtree if (folder / name).is_dir() else Path.unlink)(folder / name)
    assert RECIPE.detect(folder) is known and not RECIPE.detect(folder / "model")
    assert not replace(RECIPE, confirmed=lambda path: False).detect(folder)


def test_of_two_places_the_first_is_read(folder):
    torch.save({"w": torch.zeros(3)}, folder / "model.pt")
    (folder / "rest").mkdir()
    (folder / "rest/counters.json").write_text('{"step": 6}')
    ck = opened(folder)
    assert (ck.saved_as, ck.tree["counters"]) == ("a toy, the model whole", {"step": 6})
    assert ck.module_order == AS_SAVED


def test_a_missing_part_is_as_bad_as_its_recipe_says(folder):
    for name in ("model", "state"):
        shutil.rmtree(folder / name)
    assert said(folder) == [
        ("CK001", "error", "model", None, "no file model.pt of this toy"),
        ("CK001", "warning", "state", None, "no folder state"),
    ]
    (folder / "counters.json").unlink()
    with pytest.raises(ReadError, match=r"no part of it can be read: no file model.pt of this toy"):
        opened(folder)


@pytest.mark.parametrize(("here", "absent"), [([], "folder rest"), (["rest"], "file rest/counters.json")])
def test_of_a_path_the_outermost_folder_that_is_missing_is_named(folder, here, absent):
    (folder / "counters.json").unlink()
    for name in here:
        (folder / name).mkdir()
    assert said(folder) == [("CK001", "note", "counters", None, f"no {absent}")]


def test_ranks_that_left_no_file_are_errors(folder):
    (folder / "state/rank_1.pt").unlink()
    assert said(folder) == [("CK001", "error", "state", 1, "no file state/rank_1.pt")]
    assert [f.status for f in opened(folder).files if f.rank == 1] == ["missing"]


def test_where_no_rank_left_a_file_the_part_is_missing(folder):
    for path in (folder / "state").iterdir():
        path.unlink()
    assert said(folder) == [("CK001", "warning", "state", 0, "no file state/rank_0.pt")]
    optional = replace(RECIPE.parts[1], missing=None)
    ranks = [row[3] for row in said(folder, replace(RECIPE, parts=(RECIPE.parts[0], optional, RECIPE.parts[2])))]
    assert ranks == [0, 1, 2]


def test_a_world_size_that_nothing_states_is_that_of_the_writers(folder):
    (folder / "counters.json").write_text('{"ranks": "many"}')
    assert (opened(folder).world_size.value, opened(folder).world_size.sources) == (1, ("files found",))


def test_ranks_of_a_world_that_nothing_states_are_missed_up_to_the_last_writer(folder):
    one = replace(RECIPE.parts[1], at=("state/rank_{rank}.pt",), missing=None)
    model = Part(("ranks/r{rank}.pt",), "model", PartsBuilder.add_ranks)
    (folder / "ranks").mkdir()
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, folder / f"ranks/r{rank}.pt")
    (folder / "state/rank_0.pt").unlink()
    (folder / "state/rank_2.pt").unlink()
    assert [row[3] for row in said(folder, replace(RECIPE, parts=(model, one))) if row[0] == "CK001"] == [0]


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, None])
def test_what_is_no_number_of_ranks_is_not_taken_for_one(folder, ranks):
    (folder / "counters.json").write_text(json.dumps({"ranks": ranks}))
    assert opened(folder).world_size.sources == ("files found",)


def test_an_unreadable_part_is_named_by_its_file_and_the_rest_is_read(folder):
    (folder / "model/.metadata").write_bytes(b"\x80\x02")
    optional = replace(RECIPE.parts[0], needed=False)
    recipe = replace(RECIPE, parts=(optional, *RECIPE.parts[1:]))
    ((code, severity, tensor, _, message),) = said(folder, recipe)
    assert (code, severity, tensor) == ("CK002", "error", "model") and message.startswith("model/.metadata ")
    assert opened(folder, recipe).problems[0].files == ("model/.metadata",)
    assert list(opened(folder, recipe).tree) == ["state", "counters"]
    with pytest.raises(ReadError):
        opened(folder)


def test_a_damaged_file_is_listed_as_what_it_is(folder):
    torch.save({"w": torch.zeros(3)}, folder / "model.pt")
    (folder / "model.pt").write_bytes((folder / "model.pt").read_bytes()[:-9])
    (folder / "counters.json").write_text("{")
    found = {f.path.name: f.status for f in opened(folder).files}
    assert (found["model.pt"], found["counters.json"]) == ("cut", "bad")
    assert [row[4].split()[0] for row in said(folder)] == ["model.pt", "counters.json"]


def test_a_file_that_its_format_cannot_read_is_listed_as_damaged(folder):
    def unreadable(parts: PartsBuilder, path: Path, key: str) -> None:
        raise ReadError(path, "is cut", "cut")

    (folder / "a.bin").write_bytes(b"x")
    recipe = replace(RECIPE, parts=(*RECIPE.parts, Part(("a.bin",), "a", unreadable)))
    assert said(folder, recipe) == [("CK002", "error", "a", None, "a.bin is cut")]
    assert [(f.path.name, f.part) for f in opened(folder, recipe).files if f.status == "cut"] == [("a.bin", "a")]


def test_a_key_that_is_no_other_than_the_parts_own_is_not_repeated(folder):
    def model(parts: PartsBuilder, path: Path, key: str) -> None:
        parts.add_dcp(path, key, "model")

    recipe = replace(RECIPE, parts=(Part(("model",), "model", model),))
    assert list(opened(folder, recipe).tree["model"]) == ["w"]
    for tops, below in ((("model",), ["w"]), (("model", "loss"), ["loss", "model"])):
        shutil.rmtree(folder / "model")
        save(folder / "model", {top: {"w": torch.ones(3)} for top in tops})
        assert sorted(opened(folder, recipe).tree["model"]) == below


@pytest.mark.parametrize("form", ["dcp", "folder", "file"])
def test_weights_are_read_in_any_form(folder, form):
    shutil.rmtree(folder / "model")
    (folder / "model").mkdir()
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / "model/model.safetensors")
    save_file({"c": torch.ones(2)}, folder / "model/other.safetensors")
    if form == "dcp":
        save(folder / "model", {"model": {"a": torch.ones(2), "b": torch.ones(3)}})
    at = "model/model.safetensors" if form == "file" else "model"
    ck = opened(folder, replace(RECIPE, parts=(Part((at,), "model", PartsBuilder.add_weights, "error"),)))
    assert sorted(ck.tree["model"]) == ["a", "b"] and all(p.severity == "note" for p in ck.problems)


def test_a_folder_without_weights_is_missing_them(folder):
    (folder / "empty").mkdir()
    recipe = replace(RECIPE, parts=(*RECIPE.parts, Part(("empty",), "more", PartsBuilder.add_weights, "error")))
    assert said(folder, recipe) == [("CK001", "error", "more", None, "empty: holds no weights")]


@pytest.mark.parametrize("name", ["model", "state", "state/rank_1.pt", "counters.json"])
def test_a_part_behind_a_link_out_of_the_folder_is_refused(folder, name):
    shutil.move(folder / name, folder.parent / "away")
    (folder / name).symlink_to(folder.parent / "away")
    with pytest.raises(UnsafePathError):
        opened(folder)
    assert RECIPE.read(folder, Options(follow_symlinks=True)).problems == ()


def test_a_folder_on_the_way_to_a_part_may_be_no_link_either(folder):
    (folder.parent / "away").mkdir()
    shutil.move(folder / "counters.json", folder.parent / "away" / "counters.json")
    (folder / "rest").symlink_to(folder.parent / "away")
    with pytest.raises(UnsafePathError, match="rest"):
        opened(folder)
