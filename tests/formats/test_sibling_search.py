"""Rank files by names that ckptools does not know: found where their contents prove it, and else said to be missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptools
from ckptools.errors import SeveralError
from tests.truth import FIXTURES

RUNS = {
    "ShardedTensor": FIXTURES / "torch2.13.0-fsdp1-sharded-w4",
    "DTensor": FIXTURES / "torch2.4.1-fsdp2-w3",
}

NAMES = ["{rank}.pt", "model-{rank}-of-{world}.pt", "m{one:04d}.pt", "ep0/ba5/7b-{rank}.pth", "node{rank}-rank0.pt"]
NAMES += ["{node}-{local}.pt", "node{node}-gpu{local}-rank{rank}.pt"]
OF_FOUR = ["rank_{rank}/model.pt", "node{node}/gpu{local}.pt", "tp{local}_pp{node}_rank{rank}.pt"]


def copied(name: str, folder: Path, kind: str = "ShardedTensor") -> list[Path]:
    """The rank files of a fixture under other names, two ranks to a node."""
    files = sorted(RUNS[kind].glob("*rank*.pt"))
    paths = []
    for rank, file in enumerate(files):
        values = {"rank": rank, "one": rank + 1, "node": rank // 2, "local": rank % 2, "world": len(files)}
        paths.append(folder / name.format(**values))
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, paths[-1])
    assert len(paths) > 2
    return paths


def says(path: Path) -> list[tuple[str, int | None]]:
    """Codes and ranks of what is wrong."""
    problems = ckptools.open(path, all_ranks=True).problems
    return [(problem.code, problem.rank) for problem in problems if problem.severity == "error"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_is_found_from_any_of_them_and_from_their_folder(kind: str, name: str, tmp_path: Path) -> None:
    paths = copied(name, tmp_path, kind)
    for path in (*paths, tmp_path):
        checkpoint = ckptools.open(path)
        assert (checkpoint.whole, [file.path for file in checkpoint.files]) == (True, paths)


def test_values_are_those_of_the_files_by_their_own_names(tmp_path: Path) -> None:
    paths = copied("gpu{rank}.pt", tmp_path, "DTensor")
    found, expected = ckptools.open(paths[1]).model, ckptools.open(RUNS["DTensor"]).model
    assert found.keys() == expected.keys()
    assert all((found[fqn].load() == expected[fqn].load()).all() for fqn in found if hasattr(found[fqn], "load"))


def test_paths_are_spelled_as_the_one_that_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied("{rank}.pt", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert [file.path.as_posix() for file in ckptools.open("1.pt").files] == ["0.pt", "1.pt", "2.pt", "3.pt"]


@pytest.mark.parametrize(("name", "missing"), [("{rank}.pt", "2.pt"), ("m{one:04d}.pt", "m0003.pt")])
def test_a_missing_rank_is_named_as_its_file_would_be(name: str, missing: str, tmp_path: Path) -> None:
    paths = copied(name, tmp_path)
    paths[2].unlink()
    assert ("CK001", 2) in says(paths[0])
    assert any(missing in problem.message for problem in ckptools.open(paths[0]).problems)


def alone(paths: list[Path]) -> None:
    for path in paths[1:]:
        path.unlink()


def another_rank_7(paths: list[Path]) -> None:
    shutil.copy(paths[3], paths[3].with_name("7.pt"))


def renumbered(paths: list[Path]) -> None:
    paths[1].unlink()
    paths[2].rename(paths[1])
    paths[3].rename(paths[2])


def last_lost(paths: list[Path]) -> None:
    paths[3].unlink()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("{rank}.pt", alone),
        ("{rank}.pt", another_rank_7),
        ("{rank}.pt", renumbered),
        ("{node}-{local}.pt", last_lost),
        ("run{one}-{rank}.pt", None),
    ],
)
def test_a_file_whose_siblings_nothing_proves_is_one_of_several(name, change, tmp_path: Path) -> None:
    paths = copied(name, tmp_path)
    if change:
        change(paths)
    checkpoint = ckptools.open(paths[0])
    assert (says(paths[0]), checkpoint.whole) == ([("CK011", None)], False)
    assert "one rank of 4, and nothing proves" in checkpoint.problems[0].message


@pytest.mark.parametrize("name", OF_FOUR)
def test_every_rank_is_found_by_its_place_on_several_axes(name: str, tmp_path: Path) -> None:
    paths = copied(name, tmp_path)
    for path in paths:
        assert [file.path for file in ckptools.open(path).files] == paths
    assert ckptools.open(paths).whole


@pytest.mark.parametrize("name", ["{node}-{local}.pt", *OF_FOUR])
def test_a_lost_rank_of_such_files_is_not_made_up_for(name: str, tmp_path: Path) -> None:
    paths = copied(name, tmp_path)
    paths[2].unlink()
    assert not ckptools.open(paths[0]).whole


def test_other_steps_are_other_checkpoints(tmp_path: Path) -> None:
    for step in (5, 9):
        copied(f"ba{step}-{{rank}}.pt", tmp_path)
    for step in (5, 9):
        files = [file.path.name for file in ckptools.open(tmp_path / f"ba{step}-3.pt").files]
        assert files == [f"ba{step}-{rank}.pt" for rank in range(4)]
    with pytest.raises(SeveralError):
        ckptools.open(tmp_path)


def test_swapped_files_are_told(tmp_path: Path) -> None:
    paths = copied("{rank}.pt", tmp_path)
    paths[0].rename(tmp_path / "x")
    paths[1].rename(paths[0])
    (tmp_path / "x").rename(paths[1])
    assert "CK022" in {problem.code for problem in ckptools.open(paths[2], all_ranks=True).problems}


def test_links_are_passed_over_unless_they_are_followed(tmp_path: Path) -> None:
    paths = copied("here/{rank}.pt", tmp_path)
    paths[1].rename(tmp_path / "elsewhere")
    paths[1].symlink_to(tmp_path / "elsewhere")
    assert ("CK001", 1) in says(paths[0])
    assert ckptools.open(paths[0], follow_symlinks=True).whole


def test_only_this_file_looks_at_no_other(tmp_path: Path) -> None:
    paths = copied("{rank}.pt", tmp_path)
    assert [file.path for file in ckptools.open(paths[0], only_this_file=True).files] == [paths[0]]
