"""Rank files by names that ckptools does not know: found where their contents prove it, and else said to be missing."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

import pytest

import ckptools
from ckptools.errors import SeveralError
from ckptools.formats.rank_search.rank_groups import count_as_ranks
from ckptools.formats.rank_search.rank_names import columns
from tests.truth import FIXTURES

RUNS = {
    "ShardedTensor": FIXTURES / "torch2.13.0-fsdp1-sharded-w4",
    "DTensor": FIXTURES / "torch2.4.1-fsdp2-w3",
}

NAMES = [
    "{rank}.pt",
    "model-{rank}-of-{world}.pt",
    "m{one:04d}.pt",
    "{rank}/model.pt",
    "ep0/ba5/{rank}.pth",
    "node{node}/gpu{local}.pt",
    "node{node}-gpu{local}.ckpt",
    "{node}-{local}.pt",
    "node{node}-gpu{local}-rank{rank}.pt",
]


def copied(kind: str, name: str, folder: Path) -> list[Path]:
    """The rank files of a fixture under other names, two ranks to a node."""
    files = sorted(RUNS[kind].glob("*rank*.pt"))
    assert len(files) > 2
    paths = []
    for rank, file in enumerate(files):
        values = {"rank": rank, "one": rank + 1, "node": rank // 2, "local": rank % 2, "world": len(files)}
        paths.append(folder / name.format(**values))
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, paths[-1])
    return paths


def says(path: Path) -> list[tuple[str, int | None]]:
    """Codes and ranks of what is wrong."""
    problems = ckptools.open(path, all_ranks=True).problems
    return [(problem.code, problem.rank) for problem in problems if problem.severity == "error"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_is_found_from_any_of_them(kind: str, name: str, tmp_path: Path) -> None:
    paths = copied(kind, name, tmp_path)
    for path in paths:
        checkpoint = ckptools.open(path)
        assert (checkpoint.whole, [file.path for file in checkpoint.files]) == (True, paths)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_such_files_is_one_checkpoint(name: str, tmp_path: Path) -> None:
    paths = copied("ShardedTensor", name, tmp_path)
    assert [file.path for file in ckptools.open(tmp_path).files] == paths


def test_values_are_those_of_the_files_by_their_own_names(tmp_path: Path) -> None:
    paths = copied("DTensor", "node{node}/gpu{local}.pt", tmp_path)
    found, expected = ckptools.open(paths[1]).model, ckptools.open(RUNS["DTensor"]).model
    assert found.keys() == expected.keys()
    assert all((found[fqn].load() == expected[fqn].load()).all() for fqn in found if hasattr(found[fqn], "load"))


def test_paths_are_spelled_as_the_one_that_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied("ShardedTensor", "node{node}/gpu{local}.pt", tmp_path)
    monkeypatch.chdir(tmp_path / "node1")
    found = [file.path.as_posix() for file in ckptools.open("gpu0.pt").files]
    assert found == ["../node0/gpu0.pt", "../node0/gpu1.pt", "gpu0.pt", "gpu1.pt"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "missing"), [("{rank}.pt", "2.pt"), ("m{one:04d}.pt", "m0003.pt")])
def test_a_missing_rank_is_named_as_its_file_would_be(name: str, missing: str, tmp_path: Path) -> None:
    paths = copied("ShardedTensor", name, tmp_path)
    paths[2].unlink()
    assert ("CK001", 2) in says(paths[0])
    assert any(missing in problem.message for problem in ckptools.open(paths[0]).problems)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["{rank}.pt", "{node}-{local}.pt", "node{node}/gpu{local}.pt"])
def test_a_rank_alone_is_one_of_several(name: str, tmp_path: Path) -> None:
    first, *others = copied("ShardedTensor", name, tmp_path)
    for path in others:
        path.unlink()
    checkpoint = ckptools.open(first)
    assert (says(first), checkpoint.whole) == ([("CK011", None)], False)
    assert "one rank of 4, and nothing proves" in checkpoint.problems[0].message


def test_a_lost_file_of_a_node_leaves_nothing_proven(tmp_path: Path) -> None:
    *_, last = paths = copied("ShardedTensor", "node{node}/gpu{local}.pt", tmp_path)
    last.unlink()
    assert [says(path) for path in paths[:3]] == [[("CK011", None)]] * 3


@pytest.mark.slow
def test_other_steps_are_other_checkpoints(tmp_path: Path) -> None:
    here = copied("ShardedTensor", "ba5-{rank}.pt", tmp_path)
    there = copied("ShardedTensor", "ba9-{rank}.pt", tmp_path)
    assert [file.path for file in ckptools.open(there[3]).files] == there
    assert [file.path for file in ckptools.open(here[3]).files] == here
    with pytest.raises(SeveralError):
        ckptools.open(tmp_path)


def test_another_run_beside_it_hides_no_missing_rank(tmp_path: Path) -> None:
    here, there = (copied("ShardedTensor", name, tmp_path) for name in ("run1/{rank}.pt", "run2/{rank}.pt"))
    here[2].unlink()
    assert ("CK001", 2) in says(here[0])
    assert says(there[0]) == []


def test_what_two_runs_have_left_is_not_one_checkpoint(tmp_path: Path) -> None:
    paths = copied("ShardedTensor", "run{one}-{rank}.pt", tmp_path)
    assert says(paths[0]) == [("CK011", None)]


def test_a_number_that_no_rank_has_proves_that_the_numbers_are_no_ranks(tmp_path: Path) -> None:
    paths = copied("ShardedTensor", "{rank}.pt", tmp_path)
    shutil.copy(paths[3], tmp_path / "7.pt")
    assert says(paths[0]) == [("CK011", None)]


def test_one_right_number_of_several_proves_nothing(tmp_path: Path) -> None:
    _, one, two, three = copied("ShardedTensor", "{rank}.pt", tmp_path)
    one.unlink()
    two.rename(one)
    three.rename(two)
    assert says(tmp_path / "0.pt") == [("CK011", None)]


def at_step_9(path: Path) -> None:
    """Let a file of step 5 say that its scheduler has made 9 steps."""
    with zipfile.ZipFile(path) as saved:
        members = {name: saved.read(name) for name in saved.namelist()}
    (pickle,) = (name for name in members if name.endswith("data.pkl"))
    said = rb"(last_epoch(?:q.|r.{4})K)\x05"
    members[pickle], changed = re.subn(said, lambda found: found[1] + b"\x09", members[pickle], flags=re.DOTALL)
    assert changed == 1
    with zipfile.ZipFile(path, "w") as changed_file:
        for name, data in members.items():
            changed_file.writestr(name, data)


def test_a_file_of_another_step_does_not_stand_for_one_that_is_lost(tmp_path: Path) -> None:
    *_, last = paths = copied("ShardedTensor", "node{node}/gpu{local}.pt", tmp_path)
    at_step_9(last)
    assert says(paths[0]) == [("CK011", None)]


def test_swapped_files_are_told(tmp_path: Path) -> None:
    paths = copied("ShardedTensor", "{rank}.pt", tmp_path)
    paths[0].rename(tmp_path / "x")
    paths[1].rename(paths[0])
    (tmp_path / "x").rename(paths[1])
    assert "CK022" in {problem.code for problem in ckptools.open(paths[2], all_ranks=True).problems}


def test_links_are_passed_over_unless_they_are_followed(tmp_path: Path) -> None:
    paths = copied("ShardedTensor", "here/{rank}.pt", tmp_path)
    paths[1].rename(tmp_path / "elsewhere")
    paths[1].symlink_to(tmp_path / "elsewhere")
    assert ("CK001", 1) in says(paths[0])
    assert ckptools.open(paths[0], follow_symlinks=True).whole


def test_only_this_file_looks_at_no_other(tmp_path: Path) -> None:
    paths = copied("ShardedTensor", "{rank}.pt", tmp_path)
    assert [file.path for file in ckptools.open(paths[0], only_this_file=True).files] == [paths[0]]


def test_numbers_that_tell_a_step_are_no_ranks() -> None:
    assert [(c.level, c.start) for c in columns(Path("/run7/step-5/ep0-ba5-gpu1-rank3.pt"))] == [
        (0, 11),
        (0, 17),
        (2, 3),
    ]


@pytest.mark.parametrize(
    ("numbers", "fits"),
    [
        ([[0], [1], [2]], True),
        ([[1], [2], [3]], True),
        ([[0, 0], [0, 1], [1, 0]], True),
        ([[1, 1], [1, 2], [2, 1]], True),
        ([[0, 0], [0, 1], [1, 2]], True),
        ([[0, 0, 0], [0, 1, 1], [1, 0, 2]], True),
        ([[5, 0], [5, 1], [5, 2]], True),
        ([[7, 0], [7, 1], [8, 2]], False),
        ([[0, 0], [1, 1], [2, 2]], False),
        ([[0, 0], [1, 1], [1, 2]], True),
        ([[0, 0], [0, 2], [1, 0]], False),
        ([[0], [2], [4]], False),
        ([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 2], [1, 0, 0, 3]], False),
    ],
)
def test_numbers_count_ranks_or_nodes_and_places_on_them(numbers: list[list[int]], fits: bool) -> None:
    assert count_as_ranks(numbers) is fits
