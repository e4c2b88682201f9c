"""A search for checkpoints below a folder: how many files and folders it looks into, and what it passes over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptools.formats import folder_search
from ckptools.formats.folder_search import PathSearch
from ckptools.formats.registry import FORMATS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for n in range(4):
        torch.save({"n": n}, tmp_path / f"a{n}.pt")  # no weights: no checkpoint, where it is read
    torch.save({"w": torch.ones(2)}, tmp_path / "b.weights")
    torch.save({"w": torch.ones(2)}, tmp_path / "c.pt")
    return tmp_path


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (9, ["b.weights", "c.pt"]),
        (6, ["b.weights", "c.pt"]),
        (5, ["b.weights", "c.pt"]),
        (4, ["c.pt"]),
        (3, ["a3.pt", "c.pt"]),
        (0, ["a0.pt", "a1.pt", "a2.pt", "a3.pt", "c.pt"]),
    ],
)
def test_beyond_so_many_files_the_name_decides(folder, files, found, monkeypatch):
    monkeypatch.setattr(folder_search, "MAX_READ", files)
    search = PathSearch(folder, formats=FORMATS).below()
    assert [path.name for path in search.found] == found


@pytest.mark.parametrize(("folders", "found"), [(0, ["top.pt"]), (1, ["top.pt", "x/in.pt"]), (2, None)])
def test_beyond_so_many_folders_none_is_entered(tmp_path, folders, found, monkeypatch):
    monkeypatch.setattr(folder_search, "MAX_FOLDERS", folders)
    every = ["top.pt", "x/in.pt", "y/in.pt"]
    for name in every:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        torch.save({"w": torch.ones(1)}, tmp_path / name)
    search = PathSearch(tmp_path).below()
    names = [path.relative_to(tmp_path).as_posix() for path in search.found]
    assert names == (every if found is None else found)


@pytest.mark.parametrize(("depth", "found", "deeper"), [(1, 1, ["x"]), (2, 2, ["x/y"]), (3, 3, [])])
def test_folders_that_lie_too_deep_are_kept_for_a_note(tmp_path, depth, found, deeper, monkeypatch):
    monkeypatch.setattr(folder_search, "MAX_DEPTH", depth)
    (tmp_path / "x" / "y").mkdir(parents=True)
    for name in ("a.pt", "x/a.pt", "x/y/a.pt"):
        torch.save({"w": torch.ones(1)}, tmp_path / name)
    search = PathSearch(tmp_path).below()
    assert len(search.found) == found
    assert [path.relative_to(tmp_path).as_posix() for path in search.deeper] == deeper
    assert [path.parent for path in search.weights_deeper()] == [tmp_path / name for name in deeper]
