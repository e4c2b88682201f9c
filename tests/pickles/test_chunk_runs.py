"""Entries of DCP metadata, read in runs: the same as opcode by opcode, whatever the pickle does."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptools.errors import ReadError
from ckptools.formats.dcp import metadata as dcp_metadata
from ckptools.formats.dcp.metadata import StoredItem
from ckptools.model.regions import Ints
from ckptools.pickles.machine import Machine
from tests.truth import FIXTURES

BY_COLUMN = dcp_metadata.BY_COLUMN
REAL = sorted(FIXTURES.glob("*/**/.metadata"))


def described(ranks: int, fqns: list[str], ndim: int = 2) -> Metadata:
    """Metadata of tensors cut along dim 0, with the names of each rank as it sent them."""
    rest = [7] * (ndim - 1)
    plans = [
        {
            MetadataIndex(fqn, [r * 300, *[0] * (ndim - 1)], r): _StorageInfo(f"__{r}_0.distcp", r << 33, 70_000)
            for fqn in fqns
        }
        for r in range(ranks)
    ]
    tensors = {
        fqn: TensorStorageMetadata(
            TensorProperties(dtype=torch.float32),
            torch.Size([300 * ranks, *rest]),
            [
                ChunkStorageMetadata(torch.Size([r * 300, *[0] * (ndim - 1)]), torch.Size([300, *rest]))
                for r in range(ranks)
            ],
        )
        for fqn in fqns
    }
    sent = [pickle.loads(pickle.dumps(plan)) for plan in plans]
    return Metadata(tensors, None, {k: v for plan in sent for k, v in plan.items()})


def write(folder: Path, metadata: Any, protocol: int = 4) -> Path:
    path = folder / ".metadata"
    path.write_bytes(pickle.dumps(metadata, protocol))
    return path


def both(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dcp_metadata.Metadata]:
    """Read it in runs and opcode by opcode."""
    fast = dcp_metadata.read_metadata(path)
    monkeypatch.setattr(dcp_metadata, "BY_COLUMN", ())
    return [fast, dcp_metadata.read_metadata(path)]


def same_or_refused_both_ways(path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether it is the same, or refused with the same line, in batches and opcode by opcode."""
    found = []
    for by_column in (BY_COLUMN, ()):
        monkeypatch.setattr(dcp_metadata, "BY_COLUMN", by_column)
        try:
            found.append(dcp_metadata.read_metadata(path))
        except ReadError as error:
            found.append(str(error))
    return found[0] == found[1]


def place(metadata: dcp_metadata.DcpMetadata, fqn: str, offsets: Ints | None = None) -> StoredItem:
    found, _ = metadata.stored.of(fqn)
    return metadata.stored[found[offsets]]


def in_runs(path: Path) -> bool:
    machine = Machine(path.read_bytes(), by_column=BY_COLUMN, stay=True)
    machine.load()
    return bool(machine.batches.batches)


@pytest.mark.slow
@pytest.mark.parametrize("path", REAL, ids=lambda p: str(p.relative_to(FIXTURES).parent))
def test_real_metadata_is_read_the_same_both_ways(path, monkeypatch):
    fast, slow = both(path, monkeypatch)
    # Megatron adds plans, which refer into the entries, and whose objects are equal to themselves only.
    assert replace(fast, extra={}) == replace(slow, extra={}) and list(fast.extra) == list(slow.extra)
    # ByteCheckpoint's plans refer into the entries too.
    assert in_runs(path) or "all_local_plans" in fast.extra or fast.writer == "ByteCheckpoint"


@pytest.mark.slow
@pytest.mark.parametrize(("ndim", "protocol"), [(1, 4), (2, 5), (3, 4), (5, 4)])
def test_large_metadata_is_read_the_same_both_ways(tmp_path, monkeypatch, ndim, protocol):
    path = write(tmp_path, described(300, ["a", "b.weight", "offset", "x" * 300], ndim), protocol)
    fast, slow = both(path, monkeypatch)
    assert fast == slow and in_runs(path)
    assert len(fast.stored) == 1200 and place(fast, "a", (299 * 300, *[0] * (ndim - 1))).offset == 299 << 33


@pytest.mark.slow
@given(st.lists(st.lists(st.sampled_from([1, 300, 70_000, 1 << 33]), min_size=1, max_size=9), min_size=1, max_size=6))
def test_lists_of_chunks_that_begin_alike_and_any_places_are_read_the_same_both_ways(tmp_path_factory, lists):
    metadata = described(9, [str(n) for n in range(len(lists))])
    for tensor, sizes in zip(metadata.state_dict_metadata.values(), lists, strict=True):
        del tensor.chunks[len(sizes) :]
        for chunk, size in zip(tensor.chunks[2:], sizes[2:], strict=False):
            chunk.sizes = torch.Size([size, 7])
    for place, start in zip(metadata.storage_data.values(), cycle(lists[0]), strict=False):
        place.offset = start - 1
    with pytest.MonkeyPatch.context() as patch:
        fast, slow = both(write(tmp_path_factory.mktemp("m"), metadata), patch)
    assert fast == slow


@pytest.mark.parametrize("protocol", [2, 3])
def test_other_protocols_are_read_the_same_both_ways(tmp_path, monkeypatch, protocol):
    path = write(tmp_path, described(20, ["a", "b"]), protocol)
    fast, slow = both(path, monkeypatch)
    assert fast == slow and in_runs(path)


def test_values_that_entries_share_are_found(tmp_path, monkeypatch):
    metadata = described(50, ["a", "b"])
    size = metadata.state_dict_metadata["a"].chunks[30].sizes
    metadata.state_dict_metadata["b"].chunks[40].sizes = size
    metadata.storage_data[MetadataIndex("a", [300, 0])] = metadata.storage_data[MetadataIndex("b", [600, 0])]
    fast, slow = both(write(tmp_path, metadata), monkeypatch)
    assert fast == slow
    assert place(fast, "a", (300, 0)) == place(fast, "b", (600, 0))


def test_entries_with_transforms_and_objects_lie_between_the_others(tmp_path, monkeypatch):
    metadata = described(50, ["a"])
    metadata.storage_data[MetadataIndex("a", [3000, 0])].transform_descriptors = ["stream.zstd/1"]
    metadata.storage_data[MetadataIndex("lr")] = _StorageInfo("__0_0.distcp", 5, 6)
    fast, slow = both(write(tmp_path, metadata), monkeypatch)
    assert fast == slow and place(fast, "lr").length == 6
    assert place(fast, "a", (3000, 0)).transforms == ("stream.zstd/1",)


def test_entries_elsewhere_are_none_of_the_tensors(tmp_path, monkeypatch):
    metadata = described(50, ["a"])
    metadata.others = [ChunkStorageMetadata(torch.Size([n, 0]), torch.Size([1, 7])) for n in range(20)]
    fast, slow = both(write(tmp_path, metadata), monkeypatch)
    assert replace(fast, extra={}) == replace(slow, extra={})
    assert [one.state for one in fast.extra["others"]] == [one.state for one in slow.extra["others"]]
    assert len(fast.extra["others"]) == 20


def test_transforms_of_entries_that_follow_each_other_are_found(tmp_path, monkeypatch):
    metadata = described(50, ["a"])
    for n, place in enumerate(metadata.storage_data.values()):
        place.transform_descriptors = ["stream.zstd/1", str(n)]
    fast, slow = both(write(tmp_path, metadata), monkeypatch)
    assert fast == slow and fast.stored.transforms[30] == ("stream.zstd/1", "30")


def test_a_text_that_is_fetched_before_it_was_there_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path, described(50, ["a", "b"]))
    data = path.read_bytes()
    fetch = data.index(b"j", data.index(b"__30_0.distcp") + 14)
    for number in range(1, 60):
        later = int.from_bytes(data[fetch + 1 : fetch + 5], "little") + number
        path.write_bytes(data[:fetch] + b"j" + later.to_bytes(4, "little") + data[fetch + 5 :])
        with pytest.MonkeyPatch.context() as patch:
            assert same_or_refused_both_ways(path, patch)


@pytest.mark.parametrize("field", ["offset", "length"])
def test_a_negative_number_in_a_run_is_refused(tmp_path, field):
    metadata = described(50, ["a"])
    setattr(metadata.storage_data[MetadataIndex("a", [3000, 0])], field, -1)
    with pytest.raises(ReadError, match="offset and length of an item"):
        dcp_metadata.read_metadata(write(tmp_path, metadata))


def test_a_chunk_before_the_tensor_is_refused(tmp_path):
    metadata = described(50, ["a"])
    metadata.state_dict_metadata["a"].chunks[30].offsets = torch.Size([-300, 0])
    with pytest.raises(ReadError, match="offsets of a chunk"):
        dcp_metadata.read_metadata(write(tmp_path, metadata))


def test_a_state_set_on_an_entry_again_counts(tmp_path):
    data = write(tmp_path, described(50, ["a"])).read_bytes()
    end, frame = data.index(b"ube") + 2, data.index(b"\x95")
    path = tmp_path / ".metadata"
    path.write_bytes(data[:frame] + data[frame + 9 : end] + b"}b" + data[end:])
    with pytest.raises(ReadError, match="'a': offsets of a chunk None"):
        dcp_metadata.read_metadata(path)


@pytest.mark.parametrize("keep", [0.3, 0.5, 0.8, 0.99])
def test_a_cut_run_is_one_line(tmp_path, keep):
    path = write(tmp_path, described(300, ["a", "b"]))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ReadError, match="DCP metadata") as error:
        dcp_metadata.read_metadata(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("opcodes", [b"0", b"2", b"\x85", b"\x940", b"\x86a0"])
def test_entries_that_are_not_only_collected_are_read_opcode_by_opcode(tmp_path, monkeypatch, opcodes):
    data = write(tmp_path, described(50, ["a"])).read_bytes()
    end, frame = data.index(b"ube") + 2, data.index(b"\x95")
    path = tmp_path / ".metadata"
    path.write_bytes(data[:frame] + data[frame + 9 : end] + opcodes + data[end:])
    assert same_or_refused_both_ways(path, monkeypatch)


@pytest.mark.parametrize("number", [b"\x8a\x01\xff", b"\x8a\x01\x05", b"M\xff\xff", b"K\xff", b"J\xff\xff\xff\x7f"])
def test_a_place_is_the_number_that_its_opcode_means(tmp_path, monkeypatch, number):
    metadata = described(50, ["a"])
    for place in metadata.storage_data.values():
        place.offset = 0x12345
    data = write(tmp_path, metadata).read_bytes()
    frame, spelled = data.index(b"\x95"), b"J\x45\x23\x01\0"
    behind_first = data.index(spelled) + len(spelled)
    path = tmp_path / ".metadata"
    path.write_bytes(data[:frame] + data[frame + 9 : behind_first] + data[behind_first:].replace(spelled, number))
    assert same_or_refused_both_ways(path, monkeypatch)
