"""The layouts of trainers hold what the trainers' own code writes, under the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ckptools
from ckptools.cli.create import fold
from ckptools.training import Created
from ckptools.training.demo import same

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def keys(tree: Any, depth: int) -> set[str]:
    """The keys of nested dicts, down to a depth, joined by dots."""
    if not isinstance(tree, dict) or not depth:
        return set()
    return {str(key) for key in tree} | {
        f"{key}.{sub}" for key, value in tree.items() for sub in keys(value, depth - 1)
    }


def test_composers_dcp_is_a_folder_named_by_epoch_and_batch(trainers_fsdp2: Path) -> None:
    names = files_in(trainers_fsdp2 / "composer-dcp")
    assert names == {f"ep0-ba2/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")}
    assert fold(sorted(names)) == ["ep0-ba2/.metadata", "ep0-ba2/__{0..1}_0.distcp"]


def test_what_to_open_of_a_folder_in_the_folder_is_that_folder(tmp_path: Path) -> None:
    names = ("ep0-ba2/.metadata", "ep0-ba2/__0_0.distcp", "full.pt")
    created = Created(tmp_path, tuple(tmp_path / name for name in names), (), 1, 0, 0)
    assert created.first == tmp_path / "ep0-ba2"


def test_composers_dcp_has_the_tree_of_the_rank_files(trainers_fsdp2: Path, fsdp2: Created) -> None:
    folder, files = ckptools.open(trainers_fsdp2 / "composer-dcp").raw, ckptools.open(fsdp2.first).raw
    # DCP keeps no empty list or dict.
    empty = {"state.algorithms", "state.callbacks"}
    assert keys(files, 3) - keys(folder, 3) <= empty
    assert keys(folder, 3) <= keys(files, 3)


def test_composers_dcp_has_the_random_states_of_every_rank(trainers_fsdp2: Path) -> None:
    one, other = ckptools.open(trainers_fsdp2 / "composer-dcp").raw["rng"]
    assert set(one) == set(other) == {"python", "numpy", "torch"}
    assert not same(one["torch"].load(), other["torch"].load())
