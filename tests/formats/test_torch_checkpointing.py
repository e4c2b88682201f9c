"""torch_checkpointing: pieces placed by metadata.pkl on other meshes too, and files that are lost or swapped."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptools
from ckptools.errors import NotWholeError, ReadError
from ckptools.formats import torch_checkpointing
from tests.truth import FIXTURES

PT = FIXTURES / "torch-checkpointing-pt-fsdp2" / "ckpt"
ST = FIXTURES / "torch-checkpointing-st-fsdp2" / "ckpt"
WHOLE = torch.arange(60.0).reshape(10, 6)


@pytest.fixture(params=["pt", "st"])
def folder(request, tmp_path) -> Path:
    return Path(shutil.copytree({"pt": PT, "st": ST}[request.param], tmp_path / "step_5"))


@pytest.fixture
def st(tmp_path) -> Path:
    return Path(shutil.copytree(ST, tmp_path / "step_5"))


def errors(ck: ckptools.Checkpoint) -> set[tuple[str, int | None]]:
    return {(p.code, p.rank) for p in ck.problems if p.severity == "error"}


def dtensor(ranks: tuple[int, ...], mesh: tuple[int, ...], *placements: dict[str, Any]) -> dict[str, Any]:
    spec = {"device_type": "cpu", "mesh_shape": mesh, "mesh_data": ranks, "mesh_dim_names": None}
    data = {"global_shape": [10, 6], "dtype": "torch.float32", "stride": [6, 1], "mesh_spec": spec}
    return {
        "ranks": ranks,
        "sharding_metadata": {"type": "DTensorShardingMetadata", "data": {**data, "placements": list(placements)}},
    }


def listed(rank: int, at: int, rows: int) -> dict[str, Any]:
    data = {"global_shape": [10, 6], "global_offsets": [[at, 0]], "local_offsets": [[0, 0]], "local_sizes": [[rows, 6]]}
    return {
        "ranks": (rank,),
        "sharding_metadata": {"type": "default_tensor_v1", "data": {**data, "dtype": "torch.float32"}},
    }


def write(folder: Path, pieces: dict[int, torch.Tensor], groups: list[dict[str, Any]], **more: Any) -> Path:
    """A checkpoint of one tensor in safetensors, with the metadata that says how it is cut."""
    folder.mkdir()
    for rank, piece in pieces.items():
        save_file({"w": piece.contiguous()}, folder / f"model_{rank}.safetensors")
    layout = {"type": "SafetensorsSerialization"}
    files = {r: {"file_path": f"model_{r}.safetensors", "serialization_format": layout} for r in pieces}
    item = {"nested_path_to_metadata": {'["w"]': groups}, "rank_to_layout_info": files}
    metadata = {"metadata": {"model": item}, "world_size": len(pieces), "version": "2.0", **more}
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    return folder


SHARD, COLUMNS, SAME = {"type": "Shard", "dim": 0}, {"type": "Shard", "dim": 1}, {"type": "Replicate"}
STRIDED = {"type": "StridedShard", "dim": 0, "split_factor": 2}
GRID = ((0, 1, 2, 3), (2, 2))


@pytest.mark.parametrize(
    ("pieces", "groups"),
    [
        ([WHOLE[:4], WHOLE[4:8], WHOLE[8:]], [dtensor((0, 1, 2), (3,), SHARD)]),
        ([WHOLE[0:3], WHOLE[5:8], WHOLE[3:5], WHOLE[8:10]], [dtensor(*GRID, STRIDED, SHARD)]),
        ([WHOLE[:5, :3], WHOLE[:5, 3:], WHOLE[5:, :3], WHOLE[5:, 3:]], [dtensor(*GRID, SHARD, COLUMNS)]),
        ([WHOLE[:5], WHOLE[5:], WHOLE[:5], WHOLE[5:]], [dtensor(*GRID, SAME, SHARD)]),
        # Each tensor-parallel rank has a mesh of its own, of the ranks that share its piece.
        ([WHOLE[:5], WHOLE[:5], WHOLE[5:], WHOLE[5:]], [dtensor((0, 2), (2,), SHARD), dtensor((1, 3), (2,), SHARD)]),
        ([WHOLE[:7], WHOLE[7:]], [listed(0, 0, 7), listed(1, 7, 3)]),
    ],
    ids=["uneven", "strided", "grid", "HSDP", "two meshes", "listed"],
)
def test_pieces_are_placed_as_the_metadata_says(pieces, groups, tmp_path):
    ck = ckptools.open(write(tmp_path / "c", dict(enumerate(pieces)), groups))
    assert (ck.format, ck.whole, ck.world_size.value) == ("torch_checkpointing", True, len(pieces))
    assert torch.equal(ck.model["w"].load(), WHOLE)


def test_the_first_version_of_the_metadata_is_read_too(tmp_path):
    folder = write(tmp_path / "c", {0: WHOLE[:5], 1: WHOLE[5:]}, [])
    mapping = {
        r: {
            "model": {
                "file_path": f"model_{r}.safetensors",
                "serialization_format": {"type": "SafetensorsSerialization"},
            }
        }
        for r in (0, 1)
    }
    old = {"metadata": {'["model","w"]': [dtensor((0, 1), (2,), SHARD)]}, "rank_to_layout_info_mappings": mapping}
    (folder / "metadata.pkl").write_bytes(pickle.dumps({**old, "world_size": 2}))
    assert torch.equal(ckptools.open(folder).model["w"].load(), WHOLE)


def test_files_lie_where_the_layout_puts_them(tmp_path):
    folder = write(tmp_path / "c", {0: WHOLE[:5], 1: WHOLE[5:]}, [dtensor((0, 1), (2,), SHARD)])
    metadata = pickle.loads((folder / "metadata.pkl").read_bytes())
    for rank, layout in metadata["metadata"]["model"]["rank_to_layout_info"].items():
        layout["file_path"] = f"rank_{rank}/weights"
        (folder / f"rank_{rank}").mkdir()
        (folder / f"model_{rank}.safetensors").rename(folder / f"rank_{rank}/weights")
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    for path in (folder, folder / "rank_1" / "weights"):
        assert torch.equal(ckptools.open(path).model["w"].load(), WHOLE)


@pytest.mark.parametrize("name", ["../model_0.safetensors", "/etc/passwd", "a/../../b"])
def test_a_file_outside_of_the_folder_is_refused(name, tmp_path):
    folder = write(tmp_path / "c", {0: WHOLE}, [dtensor((0,), (1,), SHARD)])
    metadata = pickle.loads((folder / "metadata.pkl").read_bytes())
    metadata["metadata"]["model"]["rank_to_layout_info"][0]["file_path"] = name
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    ck = ckptools.open(folder)
    assert ck.whole is False and any("only files below" in p.message for p in ck.problems)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"world_size": -1}, ""), ({"world_size": 1 << 70}, ""),
        ({"metadata": []}, ""), ({"metadata": {"model": {}}}, ""),
        ({"version": "9.9"}, "is not what torch_checkpointing writes: version '9.9'; 1.0 and 2.0 are read"),
        ({"metadata": None}, "is not what torch_checkpointing writes: no 'metadata'"),
    ],
    ids=str,
)  # fmt: skip
def test_metadata_of_another_kind_is_a_problem_in_one_line(broken, why, tmp_path):
    folder = write(tmp_path / "c", {0: WHOLE[:5], 1: WHOLE[5:]}, [dtensor((0, 1), (2,), SHARD)])
    metadata = pickle.loads((folder / "metadata.pkl").read_bytes()) | broken | {"more": "sharding_metadata"}
    (folder / "metadata.pkl").write_bytes(pickle.dumps({k: v for k, v in metadata.items() if v is not None}))
    ck = ckptools.open(folder)
    messages = [p.message for p in ck.problems]
    assert ck.whole is False and ("CK002", None) in errors(ck)
    assert "\n" not in "".join(messages) and any(why in message for message in messages)
    with pytest.raises(ReadError):
        ck.model["w"].load()


@pytest.mark.parametrize(
    ("change", "problem"),
    [(lambda group: group.update(lr=7.0), ("CK105", None)), (lambda group: group.pop("amsgrad"), ("CK105", 2))],
    ids=["another value", "lacks one"],
)
def test_groups_that_differ_between_ranks_are_told(change, problem, st):
    groups = json.loads((st / "param_groups_2.json").read_text())
    change(groups[1])
    (st / "param_groups_2.json").write_text(json.dumps(groups))
    assert problem in errors(ckptools.open(st))


def test_nothing_that_the_metadata_names_is_called(tmp_path):
    folder = write(tmp_path / "c", {0: WHOLE}, [dtensor((0,), (1,), SHARD)])
    (folder / "metadata.pkl").write_bytes(b"\x80\x02cos\nsystem\nX\x11\x00\x00\x00sharding_metadata\x85R.")
    ck = ckptools.open(folder)
    assert ck.whole is False and ("CK002", None) in errors(ck)


def test_the_optimizer_has_its_groups_which_safetensors_cannot_hold():
    ck = ckptools.open(ST)
    optimizer = ck.optimizers["optimizer"]
    assert [len(group.names) for group in optimizer.param_groups] == [4, 5] and "param_groups" not in ck.tree
    assert optimizer.naming.by == "fqn" and optimizer.param_groups[0]["weight_decay"] == 0.1


def test_an_optimizer_without_groups_is_no_model(st):
    for file in st.glob("param_groups_*"):
        file.unlink()
    ck = ckptools.open(st)
    assert [s.kind for s in ck.sections if s.name == "optimizer"] == ["optimizer"]
    assert any(p.severity == "warning" and "param groups" in p.message for p in ck.problems)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model_1", "optimizer_3", "step_2", "trainer_0"])
@pytest.mark.parametrize("harm", ["missing", "cut"])
def test_a_lost_file_is_named_with_its_rank(folder, name, harm, tmp_path):
    file = next(folder.glob(f"{name}.*"))
    file.unlink() if harm == "missing" else file.write_bytes(file.read_bytes()[:-1])
    ck = ckptools.open(folder)
    assert ck.whole is False and ("CK001" if harm == "missing" else "CK002", int(name[-1])) in errors(ck)
    if name.startswith(("model", "optimizer")):
        with pytest.raises(NotWholeError):
            ckptools.consolidate(folder, tmp_path / "out.pt", only="all")
    else:  # the ranks share it
        notes = ckptools.consolidate(folder, tmp_path / "out.pt", only="all").notes
        assert any(note.startswith(f"what rank {name[-1]} shared is read from ranks ") for note in notes)
    if not name.startswith("model"):
        ckptools.consolidate(folder, tmp_path / "out.safetensors")


@pytest.mark.parametrize("content", [b"[{", b""])
def test_a_damaged_json_is_listed_once_and_as_damaged(content, st):
    (st / "param_groups_1.json").write_bytes(content)
    files = ckptools.open(st).files
    assert [file.status for file in files if file.path.name == "param_groups_1.json"] == ["bad"]
    assert [file.status for file in files if file.path.name == "param_groups_2.json"] == ["read"]


def test_a_file_of_another_item_in_a_ranks_place_is_a_warning(st):
    shutil.copy(st / "step_0.pt", st / "trainer_2.pt")
    (problem,) = (p for p in ckptools.open(st).problems if p.severity == "warning")
    assert (problem.code, problem.tensor) == ("CK010", "trainer")
    assert problem.message == "files of one part hold different things: epoch, tokens of ranks 0, 1, 3; int of rank 2"


def test_a_file_that_may_be_a_copy_of_another_ranks_is_written_with_a_warning(st, tmp_path):
    shutil.copy2(st / "model_1.safetensors", st / "model_2.safetensors")
    assert [p.code for p in ckptools.verify(st).problems] == ["CK009"]
    done = ckptools.consolidate(st, tmp_path / "out.safetensors")
    assert any("model_2.safetensors equals model_1.safetensors in size" in note for note in done.notes)


def test_without_metadata_safetensors_are_shown_and_refused(st, tmp_path):
    (st / "metadata.pkl").unlink()
    for path in (st, st / "model_1.safetensors"):
        ck = ckptools.open(path)
        assert (ck.format, ck.whole, errors(ck)) == ("torch_checkpointing", False, {("CK001", None)})
    with pytest.raises(NotWholeError, match=r"metadata\.pkl"):
        ckptools.consolidate(st, tmp_path / "out.safetensors")


def test_without_metadata_distributed_tensors_say_themselves_how_they_are_cut(tmp_path):
    folder = Path(shutil.copytree(PT, tmp_path / "step_5", ignore=shutil.ignore_patterns("metadata.pkl")))
    ck = ckptools.open(folder / "optimizer_2.pt")
    assert (ck.whole, ck.world_size.value, len(ck.optimizers["optimizer"].state)) == (True, 4, 8)
    assert ck.model["embed.weight"].shape == (33, 17)


def test_whole_models_of_two_epochs_are_left_alone(tmp_path):
    for epoch in (0, 1):
        save_file({"w": WHOLE + epoch}, tmp_path / f"model_{epoch}.safetensors")
        torch.save({"w": WHOLE + epoch}, tmp_path / f"ema_{epoch}.pt")
        torch.save({"w": WHOLE + epoch}, tmp_path / f"other_{epoch}.pt")
    assert not torch_checkpointing.detect(tmp_path)


def test_a_part_of_a_tensor_that_no_rank_is_said_to_hold_is_a_gap(tmp_path):
    folder = write(tmp_path / "c", {0: WHOLE[:5], 1: WHOLE[6:]}, [listed(0, 0, 5), listed(1, 6, 4)])
    ck = ckptools.open(folder)
    assert ck.whole is False and "CK101" in {code for code, _ in errors(ck)}


def test_where_no_file_can_be_read_the_folder_is_named(tmp_path):
    folder = Path(shutil.copytree(PT, tmp_path / "step_5"))
    for file in folder.glob("*_?.pt"):
        file.write_bytes(b"")
    with pytest.raises(ReadError, match="none of its files can be read") as refused:
        ckptools.open(folder)
    assert refused.value.path == folder
