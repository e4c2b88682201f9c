from __future__ import annotations

from pathlib import Path

import pytest

from ckptools.errors import OutputExistsError, UsageError
from ckptools.training import output


def touch(folder: Path, *names: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
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


def test_losses_go_into_the_folder_of_a_step_though_the_gathered_state_lies_above(tmp_path: Path) -> None:
    touch(tmp_path / "step-4", ".metadata", "__0_0.distcp")
    touch(tmp_path, "full.pt")
    assert output.common_folder(tmp_path) == tmp_path / "step-4"
    touch(tmp_path, "ep0-ba4-rank0.pt")
    assert output.common_folder(tmp_path) == tmp_path


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


@pytest.mark.parametrize(
    "new",
    ["model.safetensors", "model-00001-of-00003.safetensors", "sharded/shard-00001-model-00001-of-00001.safetensors"],
)
def test_force_takes_away_another_form_of_the_model(new: str, tmp_path: Path) -> None:
    others = ("model-00002-of-00002.safetensors", "model.safetensors.index.json", "model.safetensors")
    shard = "sharded/shard-00002-model-00001-of-00001.safetensors"
    touch_below(tmp_path, *others, shard, "shard-00001-model-00001-of-00001.safetensors", "other.safetensors")
    output.remove_older(tmp_path, touch_below(tmp_path, new))
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")} == {new, "other.safetensors"}


def test_force_takes_away_the_ranks_of_a_larger_world_by_their_template(tmp_path: Path) -> None:
    touch_below(tmp_path, "node1/gpu0.pt", "node0/gpu1.pt", "node0/gpu1.txt", "node1/cpu0.pt")
    output.remove_older(tmp_path, touch_below(tmp_path, "node0/gpu0.pt"), r"node\d+/gpu\d+\.pt")
    kept = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert kept == {"node0/gpu0.pt", "node0/gpu1.txt", "node1/cpu0.pt"}


def test_a_folder_that_is_left_empty_goes(tmp_path: Path) -> None:
    touch_below(tmp_path, "node1/gpu0.pt")
    output.remove_older(tmp_path, touch_below(tmp_path, "node0/gpu0.pt"), r"node\d+/gpu\d+\.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["node0"]


def test_a_new_sub_folder_moves_at_once(tmp_path: Path) -> None:
    with output.partial_folder(tmp_path / "run", "id") as partial:
        touch_below(partial, "step-5/__0_0.distcp", "step-5/.metadata")
        made = (partial / "step-5").stat().st_ino
        output.finish(partial, tmp_path / "run")
    assert (tmp_path / "run" / "step-5").stat().st_ino == made


def test_a_dcp_that_is_replaced_is_not_valid_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch_below(tmp_path / "run", "step-5/__0_0.distcp", "step-5/.metadata")
    moved = []
    replace = Path.replace

    def watch(path: Path, target: Path) -> Path:
        moved.append((path.name, (tmp_path / "run/step-5/.metadata").exists()))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", watch)
    with output.partial_folder(tmp_path / "run", "id") as partial:
        touch_below(partial, "step-5/__0_0.distcp", "step-5/.metadata")
        output.finish(partial, tmp_path / "run")
    assert moved == [("__0_0.distcp", False), (".metadata", False)]


def test_sub_folders_move_file_by_file(tmp_path: Path) -> None:
    touch_below(tmp_path, "run/ep0-ba5/notes.txt")
    with output.partial_folder(tmp_path / "run", "id") as partial:
        touch_below(partial, "ep0-ba5/__0_0.distcp", "ep0-ba5/.metadata", "full.pt")
        files = output.finish(partial, tmp_path / "run")
    assert [path.relative_to(tmp_path / "run").as_posix() for path in files] == [
        "ep0-ba5/.metadata", "ep0-ba5/__0_0.distcp", "full.pt"
    ]  # fmt: skip
    assert {path.name for path in (tmp_path / "run/ep0-ba5").iterdir()} == {"notes.txt", ".metadata", "__0_0.distcp"}


def test_a_failure_leaves_neither_pieces_nor_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), output.partial_folder(tmp_path / "run", "id") as partial:
        touch(partial, "ep0-ba5-rank0.pt")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    touch(tmp_path, "ep0-ba5-rank0.pt")
    with pytest.raises(RuntimeError), output.partial_folder(tmp_path, "id") as partial:
        touch(partial, "ep0-ba5-rank0.pt")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["ep0-ba5-rank0.pt"]


def test_finished_files_have_moved(tmp_path: Path) -> None:
    with output.partial_folder(tmp_path / "run", "id") as partial:
        touch(partial, "__0_0.distcp", ".metadata")
        files = output.finish(partial, tmp_path / "run")
    assert [path.name for path in files] == [".metadata", "__0_0.distcp"]
    assert sorted((tmp_path / "run").iterdir()) == list(files)
