"""Data files of a DCP that are not those which its metadata describes: exchanged, copied, cut or overwritten."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

import ckptools
from ckptools.errors import NotWholeError
from ckptools.formats.dcp import locator
from ckptools.model import cover
from tests.formats.test_dcp import codes, edit, same, save
from tests.truth import FIXTURES

SHARDS = [torch.arange(12.0).reshape(4, 3) + 100 * rank for rank in range(2)]
GROUPS = {"param_groups": [{"lr": 0.1, "params": ["a"]}]}
OPTIMIZER = {"optimizer": {"state": {"a": {"exp_avg": torch.ones(8, 3)}}, **GROUPS}}, {"optimizer": GROUPS}
"""What each rank has beside its shards of the model: rank 0 a moment, behind them."""

MOMENT = "optimizer.state.a.exp_avg"


def of_two_ranks(folder: Path, extra: Sequence[dict[str, Any]] = OPTIMIZER) -> Path:
    """A DCP in which two ranks have a half of each of two weights, at the same places of their files."""
    metadata = []
    for rank, shard in enumerate(SHARDS):
        part = save(folder.with_name(f"of-{rank}"), {"model": {"a": shard, "b": -shard}, **extra[rank]})
        folder.mkdir(exist_ok=True)
        (part / "__0_0.distcp").rename(folder / f"__{rank}_0.distcp")
        metadata.append(pickle.loads((part / ".metadata").read_bytes()))
    first, second = metadata
    for index, info in second.storage_data.items():
        info.relative_path = "__1_0.distcp"
        if index.fqn not in ("model.a", "model.b") and index not in first.storage_data:
            first.storage_data[index] = info
            first.state_dict_metadata[index.fqn] = second.state_dict_metadata[index.fqn]
            first.planner_data[index.fqn] = second.planner_data[index.fqn]
        if index.fqn not in ("model.a", "model.b"):
            continue
        entry = first.state_dict_metadata[index.fqn]
        entry.size, (chunk,) = torch.Size([8, 3]), second.state_dict_metadata[index.fqn].chunks
        chunk.offsets = torch.Size([4, 0])
        entry.chunks.append(chunk)
        first.storage_data[MetadataIndex(index.fqn, [4, 0], 1)] = info
    (folder / ".metadata").write_bytes(pickle.dumps(first, protocol=4))
    return folder


def exchange(folder: Path) -> None:
    one, other = folder / "__0_0.distcp", folder / "__1_0.distcp"
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def refused(folder: Path, only: str, tmp_path: Path) -> bool:
    with pytest.raises(NotWholeError):
        ckptools.consolidate(folder, tmp_path / f"{only}.safetensors", only=only)
    return True


@pytest.fixture
def even(tmp_path) -> Path:
    return of_two_ranks(tmp_path / "step-3")


def where(folder: Path, fqn: str, offsets: list[int] | None = None) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes()).storage_data[
        MetadataIndex(fqn, None if offsets is None else torch.Size(offsets))
    ]


def test_the_folder_is_whole_and_its_items_lie_at_the_same_places(even, tmp_path):
    assert ckptools.open(even).whole and ckptools.verify(even, deep=True).ok
    assert where(even, "model.b", [0, 0]).offset == where(even, "model.b", [4, 0]).offset
    ckptools.consolidate(even, tmp_path / "model.safetensors")
    assert same(ckptools.open(tmp_path / "model.safetensors").tree["a"], torch.cat(SHARDS))


@pytest.mark.parametrize("all_ranks", [False, True])
def test_exchanged_files_are_refused_though_all_of_the_model_fits_its_place(even, all_ranks, tmp_path):
    exchange(even)
    ck = ckptools.open(even, all_ranks=all_ranks)
    assert {(p.code, p.rank) for p in ck.problems if p.tensor is None} == {("CK018", 0), ("CK018", 1)}
    assert ck.whole is False and not ckptools.verify(even).ok
    assert all(refused(even, only, tmp_path) for only in ("model", "optimizer", "all", "a"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_copied_over_another_is_refused(even, rank, tmp_path):
    shutil.copyfile(even / f"__{1 - rank}_0.distcp", even / f"__{rank}_0.distcp")
    (problem,) = [p for p in ckptools.open(even).problems if p.tensor is None]
    assert (problem.code, problem.rank) == ("CK018", rank)
    assert refused(even, "model", tmp_path)


def test_exchanged_files_of_one_length_are_told_by_an_item_of_another_shape(tmp_path):
    flat, square = torch.arange(48.0), torch.arange(48.0).reshape(6, 8)
    folder = of_two_ranks(tmp_path / "even", ({"x": flat.reshape(48, 1)}, {"y": square}))
    sizes = {path.stat().st_size for path in folder.glob("*.distcp")}
    exchange(folder)
    assert len(sizes) == 1 and refused(folder, "model", tmp_path)
    assert codes(ckptools.open(folder)).count("CK018") == 2


def test_an_item_that_lies_between_those_of_the_metadata_tells_of_another_file(even, tmp_path):
    file, item = even / "__0_0.distcp", where(even, MOMENT, [0, 0])
    shorter = save(tmp_path / "shorter", {"x": torch.zeros(1)}) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[item.offset : item.offset + shorter.stat().st_size] = shorter.read_bytes()
    file.write_bytes(data)
    told = [p.message for p in ckptools.open(even).problems if p.code == "CK018"]
    assert len(told) == 1 and "which the metadata does not list" in told[0]
    assert refused(even, "model", tmp_path)


@pytest.mark.parametrize("part", ["begin", "end"])
def test_a_place_that_was_overwritten_hides_nothing_else(even, part, tmp_path):
    file, item = even / "__0_0.distcp", where(even, MOMENT, [0, 0])
    at = item.offset if part == "begin" else item.offset + item.length - 40
    data = bytearray(file.read_bytes())
    data[at : at + 40] = bytes(40)
    file.write_bytes(data)
    assert [(p.code, p.tensor) for p in ckptools.open(even).problems] == [("CK106", MOMENT)]
    ckptools.consolidate(even, tmp_path / "model.safetensors")


def test_a_cut_file_is_not_trusted_but_what_lies_before_the_cut_can_be_had(even, tmp_path):
    file, item = even / "__0_0.distcp", where(even, MOMENT, [0, 0])
    file.write_bytes(file.read_bytes()[: item.offset + 50])
    assert "CK002" in codes(ckptools.open(even))
    assert refused(even, "model", tmp_path)
    done = ckptools.consolidate(even, tmp_path / "model.safetensors", allow_missing=True)
    assert (done.tensors, done.left_out) == (2, {})


def test_a_file_cut_where_an_item_ends_may_be_another_one(even, tmp_path):
    file, item = even / "__0_0.distcp", where(even, MOMENT, [0, 0])
    file.write_bytes(file.read_bytes()[: item.offset])
    assert "CK018" in codes(ckptools.open(even)) and refused(even, "model", tmp_path)


def test_zeros_behind_the_last_item_are_told_and_harm_nothing(even, tmp_path):
    with (even / "__1_0.distcp").open("ab") as file:
        file.write(bytes(100))
    (problem,) = ckptools.open(even).problems
    assert (problem.code, problem.severity, problem.rank) == ("CK003", "warning", 1)
    assert "100 bytes behind its last item, all zeros" in problem.message
    ckptools.consolidate(even, tmp_path / "all.pt", only="all")


@pytest.mark.parametrize("most", [locator.MAX_LOCATED, 0])
def test_a_file_that_may_not_be_read_is_told_once(most, large_world, tmp_path, monkeypatch):
    from ckptools.errors import ReadError
    from ckptools.formats.dcp.items import ItemReader

    opened = ItemReader.open

    def refuse(self: ItemReader, path: Path) -> Any:
        if path.name == "__1_0.distcp":
            raise ReadError(path, "permission denied", "no access")
        return opened(self, path)

    monkeypatch.setattr(ItemReader, "open", refuse)
    monkeypatch.setattr(locator, "MAX_LOCATED", most)
    folder = of_two_ranks(tmp_path / "step-3", ({}, {}))
    assert [(p.code, p.rank) for p in ckptools.open(folder).problems if p.tensor is None] == [("CK015", 1)]


def test_metadata_that_gives_an_item_to_two_names_does_not_damn_its_file(even):
    edit(
        even,
        lambda m: m.storage_data.__setitem__(
            MetadataIndex("model.b", [0, 0]), m.storage_data[MetadataIndex("model.a", [0, 0])]
        ),
    )
    assert set(codes(ckptools.open(even))) == {"CK106"}


def test_a_compressed_item_that_does_not_begin_where_it_should_tells_of_another_file(tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "dcp-zstd" / "ckpt", tmp_path / "ckpt"))
    file = folder / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[100:] + data[:100])
    (problem,) = [p for p in ckptools.open(folder, all_ranks=True).problems if p.code == "CK018"]
    assert problem.rank == 0 and "does not begin where it should" in problem.message


def test_chunks_too_many_to_compare_are_told_with_the_name_of_their_tensor(even, monkeypatch):
    monkeypatch.setattr(cover, "MAX_COMPARISONS", 0)
    edit(even, lambda m: m.state_dict_metadata["model.a"].chunks.pop())
    told = [(p.code, p.tensor) for p in ckptools.open(even).problems if "too tangled to find gaps" in p.message]
    assert told == [("CK106", "model.a")]
