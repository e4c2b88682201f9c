"""DCP folders: what is read from files that torch wrote, what is told of broken ones, and what is refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import ckptools
from ckptools.errors import NotWholeError, ReadError, RefusedError, UnsafePathError
from ckptools.files.opening import File
from ckptools.formats.dcp import locator
from ckptools.formats.dcp.folder import read_folder
from ckptools.formats.options import Options
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Lost, Opaque, tensors_in
from ckptools.tensor_io.dcp_items import locate as locate_item
from ckptools.tensor_io.read import read_box
from tests.truth import FIXTURES, load_truth
from tests.versions import TORCH

FSDP2 = FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt"
OBJECTS = FIXTURES / "dcp-objects" / "ckpt"
FABRIC = FIXTURES / "lightning-fabric-fsdp2" / "ckpt"
TITAN = FIXTURES / "torchtitan-fsdp-tp"
COMPOSER = FIXTURES / "composer-0.16.4-torch2.0.1-elastic-w4"

STATE = {
    "model": {
        "w": torch.arange(35.0).reshape(5, 7),
        "half": torch.arange(6.0, dtype=torch.bfloat16),
        "fp8": torch.arange(4.0).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "slash/key": torch.ones(2, dtype=torch.float64),
        "dot.key": torch.tensor([True, False]),
    },
    "nested": [{"t": torch.zeros(2)}, [torch.ones(1), 3]],
    "numbers": {5: torch.full((2,), 5.0), 6: "six"},
    "step": 11,
}


def save(folder: Path, state: dict[str, Any] | None = None, **options: Any) -> Path:
    """Let torch write a DCP folder in this process; skip what the oldest torch has no option for."""
    if missing := options.keys() - signature(dcp.FileSystemWriter).parameters - {"planner"}:
        pytest.skip(f"{TORCH} has no {', '.join(missing)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = options.pop("planner", None)
        writer = dcp.FileSystemWriter(folder, sync_files=False, **options)
        dcp.save(state or STATE, storage_writer=writer, planner=planner)
    return folder


def edit(folder: Path, change: Callable[[Metadata], None]) -> Path:
    """Change the metadata of a DCP folder with torch's own classes."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata, protocol=4))
    return folder


def copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def codes(ck: ckptools.Checkpoint) -> list[str]:
    return [p.code for p in ck.problems]


def same(tensor: Tensor, value: torch.Tensor) -> bool:
    read = read_box(tensor, Box.whole(tensor.shape))
    raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return (tensor.shape, f"torch.{tensor.dtype}", read.tobytes()) == (tuple(value.shape), str(value.dtype), raw)


@pytest.fixture
def saved(tmp_path) -> Path:
    return save(tmp_path / "step-11")


@pytest.fixture
def fsdp2(tmp_path) -> Path:
    return copy(FSDP2, tmp_path / "ckpt")


# -- what torch writes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"thread_count": 2}, {"single_file_per_rank": False}])
def test_every_tensor_and_value_comes_back(tmp_path, options):
    ck = ckptools.open(save(tmp_path / "out", **options), all_ranks=True)
    assert all(same(ck.tree["model"][fqn], value) for fqn, value in STATE["model"].items())
    assert list(ck.tree["model"]) == list(STATE["model"])
    assert (ck.tree["step"], ck.whole, ck.step.value) == (11, True, 11)


def test_nested_lists_come_back_and_integer_keys_are_text(saved):
    tree = ckptools.open(saved, all_ranks=True).tree
    assert same(tree["nested"][0]["t"], torch.zeros(2)) and same(tree["nested"][1][0], torch.ones(1))
    assert tree["nested"][1][1] == 3
    assert same(tree["numbers"]["5"], torch.full((2,), 5.0)) and tree["numbers"]["6"] == "six"


def test_of_many_items_none_is_located_and_a_tensor_finds_its_own_when_it_is_loaded(saved, monkeypatch):
    monkeypatch.setattr(locator, "MAX_LOCATED", 5)
    folder = read_folder(saved, Options())
    w = folder.flat["model.w"]
    assert w.shards[0].source is None and w.shards[0].item is not None and same(w, STATE["model"]["w"])
    assert {f.status for f in folder.files if f.rank is not None} == {"seen"}


def _moved(file: Path) -> None:
    """The same bytes in another order, as another save of the same size would have them."""
    data = file.read_bytes()
    file.write_bytes(data[100:] + data[:100])


def test_a_file_in_which_no_item_begins_where_it_should_is_told_without_being_asked(saved):
    file = next(saved.glob("*.distcp"))
    _moved(file)
    at_once, asked = ckptools.open(saved), ckptools.open(saved, all_ranks=True)
    assert (at_once.whole, asked.whole) == (False, False)
    assert {p.tensor for p in at_once.problems} == {p.tensor for p in asked.problems}
    assert all(file.name in p.message for p in at_once.problems if p.code == "CK106")


def test_of_many_items_some_are_looked_at_all_over_the_files(fsdp2, monkeypatch):
    monkeypatch.setattr(locator, "MAX_LOCATED", 5)
    monkeypatch.setattr(locator, "MAX_LOOKED_AT", 30)
    _moved(fsdp2 / "__2_0.distcp")
    (problem,) = [p for p in read_folder(fsdp2, Options()).problems if p.severity == "error" and p.tensor is None]
    assert (problem.code, problem.rank) == ("CK018", 2)


def test_a_state_saved_flat_keeps_its_names(tmp_path):
    state = {"a.b": torch.ones(2), "c": {"whole": "dict"}}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    ck = ckptools.open(save(tmp_path / "out", state, planner=planner), all_ranks=True)
    assert list(ck.tree) == ["a.b", "c"] and ck.tree["c"] == {"whole": "dict"}


def test_an_empty_container_in_a_list_leaves_none_and_a_note(tmp_path):
    state = {"list": [{}, {"t": torch.ones(2)}, []], "w": torch.ones(1)}
    ck = ckptools.open(save(tmp_path / "out", state))
    assert ck.tree["list"][0] is None and isinstance(ck.tree["list"][1]["t"], Tensor)
    assert [(p.code, p.severity) for p in ck.problems] == [("CK007", "note")]


def test_an_optimizer_keyed_by_number_gets_its_numbers_back(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    ck = ckptools.open(save(tmp_path / "out", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    assert list(ck.tree["optimizer"]["state"]) == [0, 1]
    assert list(ck.optimizers["optimizer"].state) == ["weight", "bias"]


def test_an_optimizer_that_is_all_of_a_folder_gets_its_numbers_back(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    ck = ckptools.open(save(tmp_path / "out", optimizer.state_dict()))
    assert list(ck.tree["state"]) == [0, 1]
    assert [problem.code for problem in ck.problems] == ["CK210"]  # its numbers have no names


def test_an_optimizer_without_state_that_is_all_of_a_folder_has_an_empty_one(tmp_path):
    optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters())
    assert ckptools.open(save(tmp_path / "out", optimizer.state_dict())).tree["state"] == {}


def test_safetensors_items_are_read_by_their_own_header(tmp_path):
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "n": 3}
    ck = ckptools.open(save(tmp_path / "out", state, serialization_format=_safetensors()))
    assert same(ck.tree["a"], state["a"]) and same(ck.tree["b"], state["b"]) and ck.tree["n"] == 3


def _safetensors() -> Any:
    formats = getattr(dcp.filesystem, "SerializationFormat", None)
    return formats.SAFETENSORS if formats else None


class Mirror:
    """A transform of one's own, with the methods of torch's `StreamTransformExtension`: every bit the other way."""

    @staticmethod
    def registry_name() -> str:
        return "stream.mirror"

    @staticmethod
    def from_descriptor(version: str) -> Mirror:
        return Mirror()

    def get_descriptor(self) -> str:
        return "stream.mirror/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Writer(io.RawIOBase):
            def write(self, data: Any) -> int:
                return output.write(bytes(b ^ 0xFF for b in memoryview(data).cast("B")))

        return cast("IO[bytes]", Writer())

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(bytes(b ^ 0xFF for b in input.read()))


def test_settings_and_counters_beside_it_are_shown_and_its_own_keys_come_first(tmp_path):
    folder = save(tmp_path / "step-11")
    (folder / "hparams.yaml").write_text("lr: 0.1\n")
    (folder / "train_state.json").write_text('{"step": 11, "shard": 3}')
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "args.yaml").write_text("a: !!python/name:os.system x\n")
    ck = ckptools.open(folder)
    assert (ck.tree["hparams"], ck.tree["train"]["shard"], ck.tree["step"]) == ({"lr": 0.1}, 3, 11)
    assert ck.whole and not {"config", "args"} & ck.tree.keys()
    assert any("args.yaml" in problem.message for problem in ck.problems)


def compressed(folder: Path, state: dict[str, Any] | None = None) -> Path:
    extension = pytest.importorskip("torch.distributed.checkpoint._extension", reason=f"{TORCH} has no _extensions")
    return save(folder, state, _extensions=[extension.ZStandard()])


def test_compressed_items_are_read_and_consolidated(tmp_path):
    folder = compressed(tmp_path / "out")
    ck = ckptools.open(folder)
    assert ck.whole and all(same(ck.tree["model"][k], v) for k, v in STATE["model"].items())
    assert (ck.tree["step"], ck.tree["nested"][1][1]) == (11, 3)
    ckptools.consolidate(folder, tmp_path / "all.pt")
    again = torch.load(tmp_path / "all.pt", weights_only=False)
    assert all(torch.equal(again["model"][k], v) for k, v in STATE["model"].items() if k != "fp8")


def test_looking_at_compressed_items_unpacks_objects_only(tmp_path):
    folder = compressed(tmp_path / "out", {"w": torch.zeros(1 << 20), "lr": 0.5})
    ck = ckptools.open(folder)
    assert (ck.tree["lr"], ck.tree["w"].found) == (0.5, ())
    assert ck.tree["w"][5:7].tolist() == [0.0, 0.0]


def test_a_flipped_bit_in_a_compressed_item_is_told(tmp_path):
    noise = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    file = compressed(tmp_path / "out", {"w": noise, "x": torch.ones(3)}) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    ck = ckptools.open(tmp_path / "out", all_ranks=True)
    told = [*ck.problems, *ck.verify(deep=True).problems]
    assert {(p.severity, p.tensor) for p in told} == {("error", "w")}
    assert all("out/" not in str(p) and "__0_0.distcp" in str(p) for p in told)


def test_a_compressed_item_that_unpacks_to_more_than_its_tensor_is_refused(tmp_path):
    def shrink(m: Metadata) -> None:
        entry: Any = m.state_dict_metadata["w"]
        entry.size, entry.chunks[0].sizes = torch.Size([4]), torch.Size([4])

    folder = edit(compressed(tmp_path / "out", {"w": torch.zeros(1 << 20)}), shrink)
    (problem,) = ckptools.open(folder, all_ranks=True).problems
    assert "unpack to more than the 65552 that it may hold" in problem.message
    with pytest.raises(ReadError, match=r"__0_0\.distcp: item at byte 0: .*unpack to more"):
        ckptools.open(folder).tree["w"].load()


def test_a_transform_of_ones_own_is_named_and_refused(tmp_path):
    folder = save(tmp_path / "out", {"w": torch.ones(9), "lr": 0.5}, _extensions=[Mirror()])
    ck = ckptools.open(folder)
    assert "went through stream.mirror/1" in ck.tree["w"].note and isinstance(ck.tree["lr"], Lost)
    with pytest.raises(NotWholeError, match=r"stream\.mirror"):
        ckptools.consolidate(folder, tmp_path / "all.pt")


def test_the_package_that_compressed_items_need_is_named(tmp_path, monkeypatch):
    folder = compressed(tmp_path / "out", {"w": torch.ones(9), "lr": 0.5})
    monkeypatch.setitem(sys.modules, "zstandard", None)
    ck = ckptools.open(folder)
    assert {p.code for p in ck.problems} == {"CK005", "CK106"}
    assert all("pip install 'ckptools[compressed]'" in p.message for p in ck.problems)


# -- real folders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dcp-multifile", "dcp-objects", "lightning-fabric-fsdp2"])
def test_of_a_buffer_that_differs_per_rank_one_copy_is_kept(name):
    ck = ckptools.open(FIXTURES / name / "ckpt", all_ranks=True)
    buffer, truth = ck.model["stats.running_mean"], load_truth(name)
    (shard,) = buffer.shards
    assert read_box(buffer, Box.whole(buffer.shape)).tobytes() == truth[f"rank{shard.rank}/stats.running_mean"][1]


def test_objects_are_read_without_running_them():
    extra = ckptools.open(OBJECTS, all_ranks=True).tree["extra"]
    assert (extra["str"], extra["none"], extra["bool"], extra["bigint"]) == ("hello", None, True, 1 << 70)
    assert (extra["complex"], extra["set"], extra["5"]) == (1 + 2j, {1, 2}, "int key")
    assert isinstance(extra["dataclass"], Opaque) and extra["dataclass"].name == "__main__.TrainState"
    assert same(extra["list_of_tensors"][0], torch.ones(2)) and same(
        extra["rank_obj"]["rank2"]["t"], torch.full((2,), 2.0)
    )
    assert isinstance(extra["slash/key"], Tensor) and isinstance(extra["dot.key"], Tensor)


def test_the_last_export_of_torchtitan_is_a_model_alone():
    ck = ckptools.open(TITAN / "ckpt" / "step-6", all_ranks=True)
    truth = load_truth("torchtitan-fsdp-tp/truth-step-6")
    assert [s.kind for s in ck.sections] == ["model"] and ck.step.value == 6
    for fqn, (dtype, data, shape) in ((k.removeprefix("model/"), v) for k, v in truth.items()):
        tensor = ck.model[fqn]
        assert (tensor.dtype, tensor.shape, read_box(tensor, Box.whole(shape)).tobytes()) == (dtype, shape, data)


@pytest.mark.parametrize("keys", [("model", "optimizer_0", "optimizer_1"), ("model", "optimizer")])
def test_meta_pt_is_missed_where_the_parts_are_called_as_lightning_calls_them(tmp_path, keys):
    state = {key: {"w": torch.ones(2)} for key in keys}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt")
    found = [(p.code, p.severity) for p in ckptools.open(tmp_path / "ckpt").problems if "meta.pt" in p.message]
    assert found == ([("CK001", "warning")] if "optimizer_0" in keys else [])


def test_a_damaged_meta_pt_is_listed_and_the_rest_is_read(tmp_path):
    folder = Path(shutil.copytree(FABRIC, tmp_path / "ckpt"))
    os.truncate(folder / "meta.pt", 99)
    ck = ckptools.open(folder)
    assert (ck.files[-1].path.name, ck.files[-1].status) == ("meta.pt", "cut")
    assert [(p.code, p.message.partition(" ")[0]) for p in ck.problems] == [("CK002", "meta.pt:")]


def test_meta_pt_does_not_take_the_place_of_what_dcp_holds(tmp_path):
    folder = copy(FABRIC, tmp_path / "ckpt")
    torch.save({"model": "another", "step": 5}, folder / "meta.pt")
    ck = ckptools.open(folder)
    assert isinstance(ck.tree["model"], dict) and "meta.pt" in ck.problems[0].message


def test_a_file_beside_it_that_is_not_read_is_named(tmp_path):
    folder = copy(FABRIC, tmp_path / "ckpt")
    torch.save({"offset": 7}, folder / "dataloader_0.pt")
    ck = ckptools.open(folder)
    assert [(p.code, p.files) for p in ck.problems] == [("CK013", ("dataloader_0.pt",))] and ck.whole


# -- which folder is meant --------------------------------------------------------------------------------------


def test_an_interrupted_save_is_one_line(saved):
    (saved / ".metadata").rename(saved / ".metadata.tmp")
    with pytest.raises(ReadError, match=r"\.metadata is not: the save has not ended, or it died$"):
        ckptools.open(saved)


def test_data_without_metadata_is_one_line(saved):
    (saved / ".metadata").unlink()
    with pytest.raises(ReadError, match=r"1 \.distcp file without \.metadata"):
        ckptools.open(saved)


# -- files ------------------------------------------------------------------------------------------------------


def test_a_lost_object_is_named_and_refused(saved, tmp_path):
    edit(saved, lambda m: m.storage_data.pop(MetadataIndex("step")))
    ck = ckptools.open(saved)
    assert [(p.code, p.tensor) for p in ck.problems] == [("CK005", "step")] and isinstance(ck.tree["step"], Lost)
    with pytest.raises(NotWholeError, match="step"):
        ckptools.consolidate(saved, tmp_path / "all.pt")
    assert "step" in ckptools.consolidate(saved, tmp_path / "all.pt", allow_missing=True).left_out


def test_a_file_that_the_metadata_does_not_name_is_told(saved):
    shutil.copy(saved / "__0_0.distcp", saved / "__7_0.distcp")
    (problem,) = ckptools.open(saved).problems
    assert (problem.code, problem.severity, problem.rank) == ("CK009", "warning", 7)


def test_a_parameter_that_was_frozen_for_a_while_is_no_sign_of_another_save(tmp_path):
    moments = {"step": torch.tensor(6.0), "exp_avg": torch.arange(4.0)}
    state = {f"p{n}": {**moments, "step": torch.tensor(2.0 if n == 0 else 6.0)} for n in range(8)}
    folder = save(tmp_path / "ckpt", {"optim": {"state": state}}, thread_count=2)
    assert not [p for p in ckptools.open(folder).problems if p.severity == "error"]


def test_equal_files_of_two_ranks_are_written_with_a_warning_that_names_both(tmp_path):
    folder = copy(FIXTURES / "dcp-multifile" / "ckpt", tmp_path / "ckpt")
    shutil.copy(folder / "__0_0.distcp", folder / "__1_0.distcp")  # as ranks with one seed save them
    ck = ckptools.open(folder, all_ranks=True)
    (problem,) = ck.problems
    assert (problem.code, problem.severity, problem.rank, ck.whole) == ("CK009", "warning", 1, True)
    assert problem.message.startswith("__1_0.distcp equals __0_0.distcp in size, at both ends and in its values")
    assert any("CK009" in note for note in ckptools.consolidate(folder, tmp_path / "out.pt").notes)


def test_a_stale_file_of_the_same_size_is_noticed_by_shape_or_dtype(tmp_path):
    new = save(tmp_path / "new", {"a": torch.ones(8), "b": torch.ones(2, 3)})
    old = save(tmp_path / "old", {"a": torch.ones(2, 4), "b": torch.ones(6)})
    size = (new / "__0_0.distcp").stat().st_size
    assert size == (old / "__0_0.distcp").stat().st_size
    shutil.copy(old / "__0_0.distcp", new / "__0_0.distcp")
    ck = ckptools.open(new, all_ranks=True)
    assert [(p.code, p.tensor) for p in ck.problems] == [("CK018", None)]
    assert "expected float32 [8], found float32 [2, 4]; damaged or stale" in ck.problems[0].message
    assert ck.problems[0].message.endswith("it should hold a, b")
    with pytest.raises(NotWholeError, match="stale"):
        ckptools.consolidate(new, tmp_path / "all.pt")


def test_a_damaged_item_does_not_hide_the_others(saved):
    where = pickle.loads((saved / ".metadata").read_bytes()).storage_data[MetadataIndex("model.w", [0, 0])]
    data = bytearray((saved / "__0_0.distcp").read_bytes())
    data[where.offset + where.length - 30 : where.offset + where.length] = bytes(30)
    (saved / "__0_0.distcp").write_bytes(data)
    ck = ckptools.open(saved, all_ranks=True)
    assert [(p.code, p.tensor) for p in ck.problems] == [("CK106", "model.w")]
    assert ck.problems[0].message.startswith(f"__0_0.distcp: item at byte {where.offset}: ")
    assert same(ck.tree["model"]["half"], STATE["model"]["half"])


# -- paths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../x.distcp", "/etc/passwd", "a/../../x", "", "s3://bucket/x", "a\0b", "C:\\x", ".", 7]
)
def test_a_file_outside_of_the_folder_is_refused(saved, name):
    edit(saved, lambda m: setattr(next(iter(m.storage_data.values())), "relative_path", name))
    with pytest.raises(UnsafePathError) as error:
        ckptools.open(saved)
    assert "names no file in this folder" in str(error.value) and "\n" not in str(error.value)


def test_a_linked_folder_on_the_way_is_refused_too(saved, tmp_path):
    (tmp_path / "out").mkdir()
    (saved / "__0_0.distcp").rename(tmp_path / "out" / "__0_0.distcp")
    (saved / "sub").symlink_to(tmp_path / "out")
    edit(saved, lambda m: [setattr(i, "relative_path", "sub/__0_0.distcp") for i in m.storage_data.values()])
    with pytest.raises(UnsafePathError, match="follow_symlinks"):
        ckptools.open(saved)


# -- metadata that contradicts itself ---------------------------------------------------------------------------


def _w(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["model.w"]


def _chunk(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _info(metadata: Metadata, fqn: str, offset: list[int]) -> Any:
    return metadata.storage_data[MetadataIndex(fqn, offset)]


def _move(m: Metadata) -> None:
    _info(m, "model.half", [0]).offset = _info(m, "model.w", [0, 0]).offset + 64


def _share(m: Metadata) -> None:
    m.storage_data[MetadataIndex("model.half", [0])] = _info(m, "model.w", [0, 0])


def _stretch(m: Metadata) -> None:
    _info(m, "model.w", [0, 0]).length += _info(m, "model.half", [0]).length


def _grow(m: Metadata) -> None:
    _w(m).size, _w(m).chunks = torch.Size([1 << 30, 1 << 30]), [_chunk([0, 0], [1 << 30, 1 << 30])]


CONTRADICTIONS = {
    "CK102 a chunk outside": lambda m: setattr(_w(m), "size", torch.Size([4, 7])),
    "CK101 a gap": lambda m: setattr(_w(m), "size", torch.Size([6, 7])),
    "CK101 no chunk at all": lambda m: _w(m).chunks.clear(),
    "CK102 chunks that overlap": lambda m: (
        _w(m).chunks.append(_chunk([4, 0], [1, 7])),
        m.storage_data.update({MetadataIndex("model.w", [4, 0]): m.storage_data.pop(MetadataIndex("model.half", [0]))}),
        m.state_dict_metadata.pop("model.half"),
    ),
    "CK106 a chunk that lies nowhere": lambda m: m.storage_data.pop(MetadataIndex("model.w", [0, 0])),
    "CK106 items that share bytes": _move,
    "CK106 two names for one item": _share,
    "CK106 an item as long as two": _stretch,
    "CK106 more elements than bytes": _grow,
}


@pytest.mark.parametrize("what", CONTRADICTIONS, ids=lambda w: w[6:])
def test_a_contradiction_is_told_by_inspect_and_refused_by_consolidate(saved, what, tmp_path):
    edit(saved, CONTRADICTIONS[what])
    ck = ckptools.open(saved)
    assert what[:5] in codes(ck) and not ck.whole
    assert all("\n" not in str(p) and len(str(p)) < 400 for p in ck.problems)
    with pytest.raises(RefusedError, match="w"):
        ckptools.consolidate(saved, tmp_path / "all.pt")
    assert not (tmp_path / "all.pt").exists()


def test_one_place_described_twice_is_told(saved):
    edit(saved, lambda m: m.storage_data.update({MetadataIndex("model.w", [77, 77]): _info(m, "model.half", [0])}))
    data = (saved / ".metadata").read_bytes()
    (saved / ".metadata").write_bytes(data.replace(b"KMKM", b"K\0K\0"))
    ck = ckptools.open(saved)
    assert any(p.tensor == "model.w" and "twice" in p.message for p in ck.problems)


DAMAGE = {
    "size": lambda m: setattr(_w(m), "size", torch.Size([-5, 7])),
    "offsets": lambda m: setattr(_w(m).chunks[0], "offsets", torch.Size([0, -1])),
    "dimensions": lambda m: setattr(_w(m).chunks[0], "sizes", torch.Size([35])),
    "model.w' has 2 dimensions": lambda m: setattr(_w(m), "chunks", [ChunkStorageMetadata(*[torch.Size([35])] * 2)]),
    "size .*9223372036854775808": lambda m: setattr(_w(m), "size", (1 << 63, 7)),
    "offset and length": lambda m: setattr(next(iter(m.storage_data.values())), "length", -1),
    "storage_data": lambda m: setattr(m, "storage_data", [1, 2]),
    "state_dict_metadata": lambda m: setattr(m, "state_dict_metadata", None),
    "expected a tensor's or bytes'": lambda m: m.state_dict_metadata.update({"model.w": 3}),
    "planner data": lambda m: m.planner_data.update({"model.w": ("model", 1.5)}),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_metadata_that_makes_no_sense_is_one_line(saved, what):
    edit(saved, DAMAGE[what])
    with pytest.raises(ReadError, match=what) as error:
        ckptools.open(saved)
    assert "\n" not in str(error.value) and str(error.value).endswith("damaged or forged")


PATHS = {
    "an absurd place in a list": lambda m: m.planner_data.update({"model.w": ("model", "x", 1 << 40)}),
    "two names for one place": lambda m: m.planner_data.update({"model.w": ("model", "half")}),
    "a name inside of a value": lambda m: m.planner_data.update({"model.w": ("step", "w")}),
    "a place before the first": lambda m: m.planner_data.update({"model.w": ("x", -1)}),
    "a place beside a name": lambda m: m.planner_data.update({"model.w": ("model", 0)}),
    "very deep": lambda m: m.planner_data.update({"model.w": ("a",) * 5000}),
}


@pytest.mark.parametrize("what", PATHS)
def test_paths_that_are_no_tree_leave_the_names_flat_and_are_refused(saved, what, tmp_path):
    edit(saved, PATHS[what])
    ck = ckptools.open(saved)
    assert "model.w" in ck.tree and [p.code for p in ck.problems] == ["CK007"]
    with pytest.raises(NotWholeError, match="contradict themselves"):
        ckptools.consolidate(saved, tmp_path / "all.pt")


def test_another_pickle_is_not_taken_for_metadata(saved):
    (saved / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ReadError, match=r"expected torch\.distributed\.checkpoint's Metadata"):
        ckptools.open(saved)


def test_metadata_that_would_run_code_runs_none_and_is_told(saved, tmp_path):
    class Runs:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    edit(saved, lambda m: setattr(m, "planner_data", {**m.planner_data, "x": Runs()}))
    with pytest.raises(ReadError, match="planner data"):
        ckptools.open(saved)
    edit_extra = lambda m: setattr(m, "mcore_data", Runs())  # noqa: E731 - two lines of one test
    save(saved)
    edit(saved, edit_extra)
    ck = ckptools.open(saved)
    assert any(name.endswith(".system") for name in ck.names)
    assert not (tmp_path / "ran").exists()


def test_chunks_that_cover_a_third_of_a_tensor_are_a_gap_for_every_command(saved, tmp_path):
    def grow(m: Metadata) -> None:
        _w(m).size = torch.Size([3 * _w(m).size[0], *_w(m).size[1:]])

    line = "NOT WHOLE: gap in a tensor: model.w"
    assert ckptools.open(edit(saved, grow)).verdict.headline == line
    assert ckptools.verify(saved).verdict.headline == line
    assert [row.verdict for row in ckptools.checkpoints_in(saved).rows] == [line]
    with pytest.raises(NotWholeError, match=line):
        ckptools.consolidate(saved, tmp_path / "out.pt", only="all")


# -- metadata of each rank --------------------------------------------------------------------------------------


def of_rank(folder: Path, rank: int, state: dict[str, Any]) -> None:
    """Write what a rank saves without collectives: its own metadata, its own files."""
    alone = save(folder.parent / f"alone{rank}", state)
    (alone / "__0_0.distcp").rename(folder / f"__{rank}_0.distcp")
    edit(alone, lambda m: [setattr(i, "relative_path", f"__{rank}_0.distcp") for i in m.storage_data.values()])
    (alone / ".metadata").rename(folder / f"__{rank}.metadata")


def test_metadata_of_each_rank_is_one_checkpoint(tmp_path):
    (tmp_path / "out").mkdir()
    for rank in (0, 1):
        of_rank(tmp_path / "out", rank, {"w": torch.ones(3), f"own{rank}": torch.full((2,), float(rank)), "seed": rank})
    ck = ckptools.open(tmp_path / "out", all_ranks=True)
    assert [s.rank for s in ck.tree["w"].shards] == [0, 1] and ck.differing == (("seed",),)
    assert same(ck.tree["own1"], torch.full((2,), 1.0)) and ck.whole
    assert ckptools.consolidate(tmp_path / "out", tmp_path / "all.pt").tensors == 3


def test_what_ranks_with_metadata_of_their_own_have_for_themselves_is_kept_for_each(tmp_path):
    (tmp_path / "out").mkdir()
    for rank in (0, 1):
        state = {"model": {"w": torch.ones(3)}, "app": {"rng": {"python": (3, (rank, 5), None)}, "pos": 10 * rank}}
        of_rank(tmp_path / "out", rank, state)
    done = ckptools.consolidate(tmp_path / "out", tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt")
    assert state["app"]["rng"] == {"python": [(3, (0, 5), None), (3, (1, 5), None)]}
    assert state["app"]["pos"] == [0, 10] and "(app.rng.python, app.pos)" in done.notes[0]


def test_settings_of_ranks_with_metadata_of_their_own_have_to_agree(tmp_path):
    (tmp_path / "out").mkdir()
    for rank in (0, 1):
        of_rank(
            tmp_path / "out", rank, {"model": {"w": torch.ones(3)}, "sched": {"last_epoch": 3, "gamma": 0.1 + rank}}
        )
    assert [(p.code, p.tensor) for p in ckptools.open(tmp_path / "out").problems] == [("CK105", "sched.gamma")]


def test_copies_of_ranks_that_differ_are_refused(tmp_path):
    (tmp_path / "out").mkdir()
    for rank in (0, 1):
        of_rank(tmp_path / "out", rank, {"model": {"w": torch.full((3,), float(rank)), "v": torch.ones(1)}})
    with pytest.raises(NotWholeError, match="rank 1 holds other bytes than rank 0"):
        ckptools.consolidate(tmp_path / "out", tmp_path / "all.pt")


@pytest.mark.parametrize("other", [torch.ones(4), torch.ones(3, dtype=torch.int32)], ids=["shape", "dtype only"])
def test_ranks_that_disagree_on_a_tensor_are_told(other, tmp_path):
    (tmp_path / "out").mkdir()
    for rank, tensor in enumerate((torch.ones(3), other)):
        of_rank(tmp_path / "out", rank, {"w": tensor})
    first, *_ = ckptools.open(tmp_path / "out").problems
    assert (first.code, first.rank, first.tensor) == ("CK104", 1, "w")
    assert first.message == f"{str(other.dtype)[6:]} {list(other.shape)}, the first rank has float32 [3]"


@pytest.mark.parametrize("other", [torch.ones(4, 2), torch.ones(2, 4, dtype=torch.int32)], ids=["shape", "dtype only"])
def test_a_stale_file_of_safetensors_is_noticed_by_shape_or_dtype(other, tmp_path):
    folders = [tmp_path / "new", tmp_path / "old"]
    for folder, tensor in zip(folders, (torch.ones(2, 4), other), strict=True):
        save(folder, {"a": tensor}, serialization_format=_safetensors())
    new, old = ((folder / "__0_0.distcp").read_bytes() for folder in folders)
    start = pickle.loads((folders[0] / ".metadata").read_bytes()).storage_data[MetadataIndex("a", [0, 0])].offset
    (folders[0] / "__0_0.distcp").write_bytes(old)
    (problem,) = ckptools.open(folders[0]).problems
    assert (len(new), start, problem.code) == (len(old), 0, "CK106")
    assert "expected float32 [2, 4], found" in problem.message


def test_the_safetensors_header_must_hold_the_piece_that_is_meant(tmp_path):
    folder = save(tmp_path / "out", {"a": torch.ones(2, 3)}, serialization_format=_safetensors())
    data = (folder / "__0_0.distcp").read_bytes()
    moved = data.replace(
        json.dumps({"saved_offsets": [0, 0]})[1:-1].replace('"', '\\"').encode(), b'\\"saved_offsets\\": [2, 0]'
    )
    assert moved != data
    (folder / "__0_0.distcp").write_bytes(moved)
    (problem,) = ckptools.open(folder).problems
    assert problem.code == "CK106" and "holds the piece at [2, 0], expected the one at [0, 0]" in problem.message


# -- items of other classes ---------------------------------------------------------------------------------------

ADAM = FIXTURES / "torchao-fsdp2-adamw8bit-dcp/ckpt"


@pytest.mark.parametrize("located", [0, 10_000], ids=["few items are looked at", "all are"])
@pytest.mark.parametrize("every", [False, True], ids=["one rank", "all ranks"])
def test_an_item_of_codes_is_shorter_than_its_chunk_and_not_damaged(monkeypatch, located, every):
    monkeypatch.setattr(locator, "MAX_LOCATED", located)
    ck = ckptools.open(ADAM, all_ranks=every)
    assert [p.code for p in ck.problems if p.severity == "error"] == []
    assert [p.code for p in ck.problems if "quantized as torchao OptimState8bit" in p.message] == ["CK106"]
    tensor = ck.optimizers["optim"].state["block.up.weight"]["exp_avg"]
    assert (tensor.kind, tensor.dtype, [s.was_read for s in tensor.shards]) == ("chunks", "float32", [True, True])


def test_a_short_item_that_holds_no_class_is_damaged(tmp_path):
    folder = Path(shutil.copytree(ADAM, tmp_path / "ckpt"))
    (shard, _) = ckptools.open(folder, all_ranks=True).optimizers["optim"].state["block.up.weight"]["exp_avg"].shards
    codes = shard.sources[0]
    with codes.path.open("r+b") as file:
        file.seek(codes.offset - 600)
        file.write(bytes(64))
    ck = ckptools.open(folder, all_ranks=True)
    assert [p.tensor for p in ck.problems if p.code == "CK106" and p.severity == "error"] == [
        "optim.state.block.up.weight.exp_avg"
    ]


def test_items_that_are_alike_are_found_where_opening_each_one_finds_it(tmp_path: Path) -> None:
    state = {f"w{n}": torch.full((300,), float(n)) for n in range(6)} | {"other": torch.arange(3)}
    folder = read_folder(save(tmp_path / "d", state), Options(all_ranks=True))
    shards = {path[-1]: tensor.shards[0] for path, tensor in tensors_in(folder.tree)}
    assert len({shard.source.crc for shard in shards.values()}) == 7
    for shard in shards.values():
        with File(shard.item.path) as file:
            assert locate_item(file, shard.item) == shard.source


@pytest.mark.parametrize("damaged", ["local header", "directory"])
def test_an_item_that_is_not_like_the_others_is_opened_itself(tmp_path: Path, damaged: str) -> None:
    folder = save(tmp_path / "d", {f"w{n}": torch.full((300,), float(n)) for n in range(6)})
    item = next(t.shards[0].item for p, t in tensors_in(read_folder(folder, Options()).tree) if p[-1] == "w4")
    data = bytearray(item.path.read_bytes())
    at = item.offset if damaged == "local header" else data.rindex(b"PK\1\2", 0, item.offset + item.length)
    data[at + 1] ^= 1
    item.path.write_bytes(data)
    broken = read_folder(folder, Options(all_ranks=True))
    assert [(p.code, p.tensor) for p in broken.problems] == [("CK106", "w4")]


@pytest.mark.parametrize("names", [["w"], [0]], ids=["by name", "by number"])
def test_an_optimizer_without_state_yet_is_one_though_dcp_saves_no_empty_dict(tmp_path, names):
    optim = {"state": {}, "param_groups": [{"lr": 0.1, "params": names}]}
    dcp.save({"model": {"w": torch.ones(2)}, "optim": optim}, checkpoint_id=tmp_path / "sgd")
    with ckptools.open(tmp_path / "sgd") as ck:
        assert (len(ck.optimizers["optim"].param_groups), ck.raw["optim"]) == (1, optim)
        ck.consolidate(tmp_path / "all.pt", only="all")
    assert torch.load(tmp_path / "all.pt")["optim"] == optim
