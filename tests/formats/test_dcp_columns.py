"""What a DCP folder's shards are by column is what they are one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.run import consolidate
from ckptools.formats.dcp import tensors
from ckptools.formats.dcp.locator import FoundTensor, Locator
from ckptools.formats.dcp.metadata import DcpMetadata, StoredItems, TensorMetadata
from ckptools.formats.open import open_checkpoint
from ckptools.formats.shared.checkpoint_builder import StatedFile
from ckptools.model.extents import Extents
from ckptools.model.problems import Problem
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.tensor_io.dcp_items import ItemLocator
from tests.truth import FIXTURES

ROWS = 4
ITEM = st.tuples(st.integers(0, 3), st.sampled_from(["w", "v"]), st.integers(0, 1), st.integers(0, 90))


def placed(described: TensorMetadata, stored: StoredItems, size: int) -> tuple[list[object], str]:
    """The shards of `w`, and its fault."""
    metadata = DcpMetadata(Path("x"), None, {"w": described}, (), ("w",), stored, None, {}, (), "", 0, 0.0)
    files = {f"f{n}": StatedFile(Path(f"f{n}"), n, size, 0.0, 100) for n in range(2)}
    found = FoundTensor(described, Extents("float32"))
    tensors._place(found, "w", described, metadata, {name: tensors._holding_files(f) for name, f in files.items()})
    columns = found.shards
    return list(zip(columns.offsets, columns.sizes, columns.starts, columns.lengths, map(str, columns), strict=True)), (
        found.bad
    )


@given(st.lists(st.integers(0, 3), unique=True), st.lists(ITEM), st.booleans(), st.sampled_from([60, 100]))
def test_chunks_are_placed_by_column_as_one_by_one(rows, items, in_order, size):
    offsets = tuple((row,) for row in rows)
    described = TensorMetadata("float32", "", "strided", (ROWS,), offsets, ((1,),) * len(rows), False)
    stored = StoredItems()
    for row, fqn, file, start in [*((row, "w", 0, 10 * row) for row in rows if in_order), *items]:
        stored.offsets.append((row,))
        stored.fqns.append(fqn)
        stored.files.append(f"f{file}")
        stored.starts.append(start)
        stored.lengths.append(10)
    by_column = placed(described, stored, size)
    with mock.patch.object(tensors, "_place_all", return_value=False):
        assert placed(described, stored, size) == by_column


def saved(folder: Path) -> Path:
    """A DCP of one process, with many tensors of few sizes."""
    state = {f"w{n}": torch.full((64, 4), float(n)) for n in range(8)}
    dcp.save({"model": state, "half": torch.arange(8.0)}, checkpoint_id=folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "torch2.13.0-fsdp2-dcp-w3", "dcp-multifile"])
@pytest.mark.parametrize("check", [False, True])
def test_a_plan_by_column_is_the_plan_shard_by_shard(tmp_path: Path, name: str, check: bool) -> None:
    folder = FIXTURES / name / "ckpt" if name else saved(tmp_path / "d")
    opened = open_checkpoint(folder, all_ranks=True)
    columns = [tensor for _, tensor in tensors_in(opened.tree)]
    assert any(isinstance(tensor.shards, Extents) for tensor in columns)
    listed = replace(opened, tree=_listed(opened.tree))
    options = ConsolidateOptions(only="all", dry_run=True, check=check)
    both = [consolidate(ck, tmp_path / "out.pt", options) for ck in (opened, listed)]
    plans, checksums = [one.planned for one in both], [one.checksums for one in both]
    assert plans[0].files == plans[1].files and list(plans[0].copies) == list(plans[1].copies)
    assert len(plans[0].copies) == len(plans[1].copies) == len([*plans[1].copies]) and checksums[0] == checksums[1]


def _listed(node: object) -> object:
    """The tree with shards one by one."""
    if isinstance(node, Tensor):
        return replace(node, shards=tuple(node.shards))
    if isinstance(node, list):
        return [*map(_listed, node)]
    return {key: _listed(value) for key, value in node.items()} if isinstance(node, dict) else node


def located(folder: Path, closely: bool = False) -> tuple[list[list[Shard]], tuple[Problem, ...]]:
    """The shards of all tensors, and the problems; each item may be looked at closely."""
    with pytest.MonkeyPatch.context() as patched:
        if closely:
            patched.setattr(ItemLocator, "knows", lambda self, kind: False)
        opened = open_checkpoint(folder, all_ranks=True)
    return [[*tensor.shards] for _, tensor in tensors_in(opened.tree)], opened.problems


@pytest.mark.parametrize(
    "name", ["torch2.13.0-fsdp2-dcp-w3", "dcp-multifile", "dcp-zstd", "torch1.13.1-fsdp1-sharded-dcp-w3"]
)
def test_items_of_real_runs_are_located_together_as_one_by_one(name: str) -> None:
    folder = FIXTURES / name / "ckpt"
    assert located(folder) == located(folder, closely=True)


def test_items_that_are_alike_are_not_looked_at_one_by_one(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    looked_at = Locator._look_at
    with mock.patch.object(Locator, "_look_at", autospec=True, side_effect=looked_at) as closely:
        found, _ = located(folder)
    assert closely.call_count == 3  # the first two of a kind, and the only item of another
    assert all(shard.source is not None for shards in found for shard in shards)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """The one file of a DCP's items, and what torch wrote into it."""
    folder = tmp_path_factory.mktemp("d")
    state = {f"w{n}": torch.arange(64.0) * n if n % 7 else torch.ones(3 + n % 2, 5) for n in range(30)}
    dcp.save(state | {"step": 5}, checkpoint_id=folder)
    (path,) = folder.glob("*.distcp")
    return path, path.read_bytes()


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4), st.sampled_from([0, 9]))
def test_items_with_damaged_bytes_are_located_by_column_as_one_by_one(sound, damage, cut):
    path, whole = sound
    data = bytearray(whole)
    for place, value in damage:
        data[int(place * len(data))] = value
    path.write_bytes(data[: len(data) - cut])
    assert located(path.parent) == located(path.parent, closely=True)
