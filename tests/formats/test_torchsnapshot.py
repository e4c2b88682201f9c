"""torchsnapshot: values of every kind of entry, files that are lost or exchanged, and metadata that lies."""

from __future__ import annotations

import base64
import json
import shutil
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptools
from ckptools.errors import ReadError, UnsafePathError
from tests.truth import FIXTURES

SAMPLE = FIXTURES / "torchsnapshot-fsdp1" / "ckpt"
WHOLE = torch.arange(60.0).reshape(10, 6)


@pytest.fixture
def snapshot(tmp_path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "step_5"))


def errors(ck: ckptools.Checkpoint) -> set[tuple[str, int | None]]:
    return {(p.code, p.rank) for p in ck.problems if p.severity == "error"}


def edit(folder: Path, **entries: Any) -> dict[str, Any]:
    """Change entries of the manifest; `None` takes one out. `__` stands for `/`."""
    path = folder / ".snapshot_metadata"
    found: dict[str, Any] = json.loads(path.read_text())
    for name, entry in entries.items():
        found["manifest"].pop(name.replace("__", "/"), None)
        if entry is not None:
            found["manifest"][name.replace("__", "/")] = entry
    path.write_text(json.dumps(found))
    return found


def raw(location: str, shape: list[int], start: int | None = None, dtype: str = "float32") -> dict[str, Any]:
    nbytes = 4 * int(torch.Size(shape).numel())
    span = None if start is None else [start, start + nbytes]
    entry = {"type": "Tensor", "location": location, "serializer": "buffer_protocol", "dtype": f"torch.{dtype}"}
    return {**entry, "shape": shape, "replicated": False, "byte_range": span}


def pieces(*placed: tuple[int, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"offsets": [at, 0], "sizes": one["shape"], "tensor": one} for at, one in placed]


def write(folder: Path, world: int, entries: dict[str, Any], **files: bytes) -> Path:
    """A snapshot with one container, `model`, on each rank, and files by name."""
    folder.mkdir()
    manifest: dict[str, Any] = {}
    for rank in range(world):
        keys = [name.partition("/model/")[2] for name in entries if name.startswith(f"{rank}/")]
        shared = [n.partition("/model/")[2] for n, e in entries.items() if n.startswith("0/") and e.get("replicated")]
        manifest[f"{rank}/model"] = {"type": "OrderedDict", "keys": list(dict.fromkeys([*keys, *shared]))}
    metadata = {"version": "0.1.0", "world_size": world, "manifest": {**manifest, **entries}}
    (folder / ".snapshot_metadata").write_text(json.dumps(metadata))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def data(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def test_values_of_every_kind_are_read():
    ck = ckptools.open(SAMPLE)
    progress = ck.tree["progress"]
    assert (progress["best"], progress["blob"], progress["done"], progress["name"]) == (
        0.125,
        b"\0\1",
        False,
        "run of rank 0",
    )
    assert ck.optimizers["optim"].param_groups[0]["betas"] == (0.9, 0.95)
    assert type(ck.tree["model"]) is OrderedDict and list(ck.model)[:2] == ["embed.weight", "block.up.weight"]
    assert (ck.step.value, ck.world_size.value, ck.saved_as) == (5, 2, "torchsnapshot 0.1.0")


@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_read_as_it_was_saved(value, snapshot):
    entry = {"type": "bool", "serialized_value": str(value), "readable": None, "replicated": False}
    edit(snapshot, **{"0__progress__done": entry, "1__progress__done": entry})
    assert ckptools.open(snapshot).tree["progress"]["done"] is value


def test_what_ranks_have_for_themselves_is_kept():
    ck = ckptools.open(SAMPLE)
    assert ck.per_rank["progress", "name"] == {0: "run of rank 0", 1: "run of rank 1"}
    assert [shard.rank for shard in ck.tree["rng"]["rng_state"].shards] == [0, 1]
    note = next(p for p in ck.problems if "each rank's own" in p.message)
    assert note.severity == "note" and "model.stats.running_mean" in note.message


def test_pieces_of_ranks_replicas_and_chunks_are_put_together(tmp_path):
    sharded = {"type": "ShardedTensor"}
    chunks = pieces((0, raw("c0", [4, 6])), (4, raw("c1", [6, 6])))
    entries = {
        "0/model/w": {**sharded, "shards": pieces((0, raw("b", [3, 6], 0)), (3, raw("b", [2, 6], 72)))},
        "1/model/w": {**sharded, "shards": pieces((5, raw("s", [5, 6])))},
        "2/model/w": {**sharded, "shards": []},
        "0/model/same": {**raw("r", [10, 6]), "replicated": True},
        "0/model/large": {
            "type": "ChunkedTensor",
            "dtype": "torch.float32",
            "shape": [10, 6],
            "chunks": chunks,
            "replicated": True,
        },
    }
    files = {"b": data(WHOLE[:5]), "s": data(WHOLE[5:]), "r": data(WHOLE), "c0": data(WHOLE[:4]), "c1": data(WHOLE[4:])}
    ck = ckptools.open(write(tmp_path / "c", 3, entries, **files))
    assert (ck.whole, ck.world_size.value, [*map(str, ck.problems)]) == (True, 3, [])
    assert all(torch.equal(ck.model[name].load(), WHOLE) for name in ("w", "same", "large"))


def test_a_dtensor_of_two_replicas_is_read_as_its_shards_say(tmp_path):
    piece = {0: (0, WHOLE[:5]), 1: (5, WHOLE[5:]), 2: (0, WHOLE[:5]), 3: (5, WHOLE[5:])}
    entries = {
        f"{r}/model/w": {
            "type": "DTensor",
            "shards": pieces((at, raw(f"f{r}", [5, 6]))),
            "mesh": [[0, 1], [2, 3]],
            "dim_map": [[1], [-1]],
        }
        for r, (at, _) in piece.items()
    }
    ck = ckptools.open(write(tmp_path / "c", 4, entries, **{f"f{r}": data(t) for r, (_, t) in piece.items()}))
    assert ck.whole and torch.equal(ck.model["w"].load(), WHOLE)
    (tmp_path / "c" / "f1").unlink()
    ck = ckptools.open(tmp_path / "c")
    assert errors(ck) == {("CK001", 1)} and torch.equal(ck.model["w"].load(), WHOLE)


def test_keys_with_slashes_percent_signs_and_numbers_come_back(snapshot):
    keys = ["a/b", "100%", 3]
    text = {"type": "str", "serialized_value": "here", "replicated": False, "readable": None}
    edit(
        snapshot,
        **{"0/odd": {"type": "dict", "keys": keys}, "0/odd/a%2Fb": text, "0/odd/100%25": text, "0/odd/3": text},
    )
    assert ckptools.open(snapshot).tree["odd"] == dict.fromkeys(keys, "here")


def test_a_tensor_that_torch_saved_is_read(tmp_path):
    entry = {**raw("z", [2]), "serializer": "torch_save", "dtype": "torch.complex64"}
    folder = write(tmp_path / "c", 1, {"0/model/z": entry})
    torch.save(torch.tensor([1 + 2j, 3 - 4j]), folder / "z")
    assert ckptools.open(folder).model["z"].load().tolist() == [1 + 2j, 3 - 4j]


@pytest.mark.parametrize("harm", ["missing", "cut"])
def test_a_lost_object_is_named_and_the_model_written(snapshot, harm, tmp_path):
    path = snapshot / "1/optim/param_groups/0/betas"
    path.unlink() if harm == "missing" else path.write_bytes(path.read_bytes()[:99])
    ck = ckptools.open(snapshot)
    assert errors(ck) == {("CK001" if harm == "missing" else "CK002", 1)} and ck.whole is False
    assert [file.status for file in ck.files if file.path == path] == [harm]
    ckptools.consolidate(snapshot, tmp_path / "out.safetensors")


def test_a_batch_that_may_be_a_copy_of_one_as_long_is_written_with_a_warning(tmp_path):
    entries = {
        f"{r}/model/w": {"type": "ShardedTensor", "shards": pieces((5 * r, raw(f"f{r}", [5, 6])))} for r in (0, 1)
    }
    folder = write(tmp_path / "c", 2, entries, f0=data(WHOLE[:5]), f1=data(WHOLE[:5]))
    done = ckptools.consolidate(folder, tmp_path / "out.pt")
    assert any("CK009" in note and "f1 equals f0 in size" in note for note in done.notes)


def test_metadata_in_yaml_is_refused_by_name_with_the_way_out(snapshot):
    (snapshot / ".snapshot_metadata").write_text(
        "manifest:\n  0/model:\n    keys: []\n    type: dict\nversion: 0.0.3\nworld_size: 1\n"
    )
    with pytest.raises(ReadError, match=r"torchsnapshot metadata in YAML.*json\.dump"):
        ckptools.open(snapshot)


@pytest.mark.parametrize("location", ["../x", "/etc/passwd", "a/../../x", ""])
def test_a_file_outside_of_the_folder_is_refused(snapshot, location):
    edit(
        snapshot,
        **{
            "1/progress/odd": {
                "type": "object",
                "location": location,
                "serializer": "torch_save",
                "obj_type": "",
                "replicated": False,
            }
        },
    )
    ck = ckptools.open(snapshot)
    assert errors(ck) == {("CK007", 1)} and "only files below" in ck.problems[0].message


def test_metadata_behind_a_link_is_read_where_links_are_followed(snapshot, tmp_path):
    shutil.move(snapshot / ".snapshot_metadata", tmp_path / "metadata")
    (snapshot / ".snapshot_metadata").symlink_to(tmp_path / "metadata")
    with pytest.raises(UnsafePathError):
        ckptools.open(snapshot)
    ck = ckptools.open(snapshot, follow_symlinks=True)
    assert ck.whole and ck.world_size.sources == (".snapshot_metadata",)


HALF = base64.b64encode(struct.pack("<f", 1)).decode()
MORE = {"type": "int", "serialized_value": "1", "replicated": False}
FIVE = {"type": "int", "serialized_value": "five", "replicated": False}
LIES = {
    "an entry is lost": ({"0/model/embed.weight": None}, "embed.weight"),
    "an entry that nothing lists": ({"0/model/more": MORE}, "more"),
    "fewer bytes than elements": ({"0/rng/rng_state": raw("r", [4], 0) | {"byte_range": [0, 12]}}, ""),
    "an unknown dtype": ({"0/rng/rng_state": raw("r", [4], dtype="float3")}, "'float3'"),
    "a size of no tensor": (
        {"0/rng/rng_state": raw("r", [1]) | {"shape": [1 << 70]}},
        "71 bits], expected sizes",
    ),
    "no number": ({"0/progress/step": FIVE}, "a int of 'five'"),
    "half a float": ({"0/progress/best": {"type": "float", "serialized_value": HALF}}, f"a float of '{HALF}'"),
    "a rank beyond the world": ({"7/model": {"type": "dict", "keys": []}}, "'7/model' is of no rank of 2"),
    "no type": ({"0/model": {"keys": []}}, "'0/model' has no type"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_contradicts_itself_is_told_in_one_line(snapshot, lie):
    changes, words = LIES[lie]
    edit(snapshot, **changes)
    try:
        ck = ckptools.open(snapshot)
        assert ck.whole is False
        messages = [str(p) for p in ck.problems]
    except ReadError as error:
        messages = [str(error)]
        assert ".snapshot_metadata" in messages[0]
    assert any(words in message for message in messages) and not any("\n" in message for message in messages)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"version": "0.1.0", "manifest": {}}, "expected version, world_size and manifest"),
        ({"version": "0.1.0", "world_size": 0, "manifest": {}}, "world_size 0"),
        ({"version": "0.1.0", "world_size": 1, "manifest": {}}, "lists nothing"),
    ],
)
def test_metadata_that_makes_no_sense_is_refused_with_the_reason(metadata, said, snapshot):
    (snapshot / ".snapshot_metadata").write_text(json.dumps(metadata))
    with pytest.raises(ReadError, match=rf"\.snapshot_metadata: .*{said}"):
        ckptools.open(snapshot)


def test_ranks_of_which_nothing_is_listed_are_named(snapshot):
    path = snapshot / ".snapshot_metadata"
    path.write_text(path.read_text().replace('"world_size": 2', '"world_size": 4'))
    (problem,) = [p for p in ckptools.open(snapshot).problems if p.code == "CK007"]
    assert (problem.rank, problem.ranks) == (2, (2, 3)) and "nothing of rank 2, 3 of 4" in problem.message


def test_a_world_size_that_lies_costs_nothing(snapshot):
    path = snapshot / ".snapshot_metadata"
    path.write_text(path.read_text().replace('"world_size": 2', '"world_size": 1000000'))
    ck = ckptools.open(snapshot)
    assert ("CK007", 2) in errors(ck) and len(ck.files) == 11


@pytest.mark.parametrize("end", [0, 1, 900, -3])
def test_metadata_that_is_cut_is_one_error(snapshot, end):
    path = snapshot / ".snapshot_metadata"
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(ReadError, match="snapshot metadata"):
        ckptools.open(snapshot)


def test_a_range_of_other_bytes_than_the_shape_has_is_said_with_both_numbers(snapshot):
    found = json.loads((snapshot / ".snapshot_metadata").read_text())["manifest"]
    name, entry = next((n, e) for n, e in found.items() if e["type"] == "Tensor" and e.get("byte_range"))
    first, last = entry["byte_range"]
    edit(snapshot, **{name.replace("/", "__"): {**entry, "byte_range": [first, last - 1]}})
    said = [p.message for p in ckptools.open(snapshot).problems]
    assert any(f"{last - first - 1} bytes for" in text and f"expected {last - first}" in text for text in said)


@pytest.mark.parametrize("more", [0, 1])
def test_metadata_larger_than_any_is_not_read(snapshot, monkeypatch, more):
    nbytes = (snapshot / ".snapshot_metadata").stat().st_size
    monkeypatch.setattr("ckptools.formats.torchsnapshot.MAX_METADATA", nbytes - more)
    if not more:
        assert ckptools.open(snapshot).whole
        return
    with pytest.raises(ReadError) as error:
        ckptools.open(snapshot)
    assert error.value.reason == f"has {nbytes} bytes; at most {nbytes - 1} are read"
