from __future__ import annotations

from pathlib import Path

import pytest

from ckptools.errors import OutputExistsError, UsageError
from ckptools.training import output


def touch(folder: Path, *names: str) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(name)
    return [folder / name for name in names]


def test_a_folder_with_notes_is_no_checkpoint(tmp_path: Path) -> None:
    touch(tmp_path, "notes.txt")
    output.refuse_existing(tmp_path, force=False)


@pytest.mark.parametrize("name", ["ep0-ba5-rank0.pt", ".metadata", "__0_0.distcp", "model.safetensors"])
def test_a_folder_with_a_checkpoint_needs_force(name: str, tmp_path: Path) -> None:
    touch(tmp_path, name)
    with pytest.raises(OutputExistsError, match=name):
        output.refuse_existing(tmp_path, force=False)
    output.refuse_existing(tmp_path, force=True)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (file,) = touch(tmp_path, "run")
    with pytest.raises(UsageError, match="is a file"):
        output.refuse_existing(file, force=True)


def test_force_takes_away_the_ranks_of_a_larger_world(tmp_path: Path) -> None:
    touch(tmp_path, "ep0-ba5-rank1.pt", "ep0-ba5-rank12.pt", "ep0-ba9-rank12.pt", "full.pt", "notes.txt")
    output.remove_older(tmp_path, touch(tmp_path, "ep0-ba5-rank0.pt", "ep0-ba5-rank1.pt"))
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"ep0-ba5-rank0.pt", "ep0-ba5-rank1.pt", "ep0-ba9-rank12.pt", "notes.txt"}


def test_force_knows_world_sizes_and_dcp_files(tmp_path: Path) -> None:
    touch(tmp_path, "model_world_size_8_rank_7.pt", "__7_0.distcp")
    output.remove_older(tmp_path, touch(tmp_path, "model_world_size_4_rank_0.pt", "__0_0.distcp"))
    assert {path.name for path in tmp_path.iterdir()} == {"model_world_size_4_rank_0.pt", "__0_0.distcp"}


def touch_below(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return [folder / name for name in names]


def test_a_checkpoint_in_a_sub_folder_needs_force(tmp_path: Path) -> None:
    touch_below(tmp_path, "ep0-ba5/.metadata")
    with pytest.raises(OutputExistsError, match=r"ep0-ba5/\.metadata"):
        output.refuse_existing(tmp_path, force=False)


def test_force_takes_away_ranks_in_sub_folders_and_leaves_what_else_is_there(tmp_path: Path) -> None:
    touch_below(tmp_path, "ep0-ba5/__0_0.distcp", "ep0-ba5/__7_0.distcp", "ep0-ba9/__7_0.distcp", "ep0-ba5/notes.txt")
    output.remove_older(tmp_path, touch_below(tmp_path, "ep0-ba5/__0_0.distcp"))
    kept = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*") if path.is_file()}
    assert kept == {"ep0-ba5/__0_0.distcp", "ep0-ba5/notes.txt", "ep0-ba9/__7_0.distcp"}


def test_sub_folders_move_file_by_file(tmp_path: Path) -> None:
    touch_below(tmp_path, "run/ep0-ba5/notes.txt")
    with output.open_partial_folder(tmp_path / "run", "id") as partial:
        touch_below(partial, "ep0-ba5/__0_0.distcp", "ep0-ba5/.metadata", "full.pt")
        files = output.finish(partial, tmp_path / "run")
    assert [path.relative_to(tmp_path / "run").as_posix() for path in files] == [
        "ep0-ba5/.metadata", "ep0-ba5/__0_0.distcp", "full.pt"
    ]  # fmt: skip
    assert {path.name for path in (tmp_path / "run/ep0-ba5").iterdir()} == {"notes.txt", ".metadata", "__0_0.distcp"}


def test_a_failure_leaves_neither_pieces_nor_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), output.open_partial_folder(tmp_path / "run", "id") as partial:
        touch(partial, "ep0-ba5-rank0.pt")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    touch(tmp_path, "ep0-ba5-rank0.pt")
    with pytest.raises(RuntimeError), output.open_partial_folder(tmp_path, "id") as partial:
        touch(partial, "ep0-ba5-rank0.pt")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["ep0-ba5-rank0.pt"]


def test_finished_files_have_moved(tmp_path: Path) -> None:
    with output.open_partial_folder(tmp_path / "run", "id") as partial:
        touch(partial, "__0_0.distcp", ".metadata")
        files = output.finish(partial, tmp_path / "run")
    assert [path.name for path in files] == [".metadata", "__0_0.distcp"]
    assert sorted((tmp_path / "run").iterdir()) == list(files)
