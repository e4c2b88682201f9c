"""Shards that overlap, or lie outside of their tensor, whatever kind it is: nothing is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckptools
from ckptools import Checkpoint
from ckptools.errors import NotWholeError
from ckptools.model.facts import Fact, RankFile
from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.training_state.optimizers import AS_SAVED

KINDS = ("sharded_tensor", "dtensor", "chunks")

WRONG = {
    "overlap": ([((0,), (5,)), ((4,), (4,))], "CK102", "overlap"),
    "outside": ([((0,), (4,)), ((4,), (5,))], "CK102", "outside of [8]"),
    "outside of a whole one": ([((0,), (8,)), ((8,), (1,))], "CK102", "outside of [8]"),
    "gap": ([((0,), (4,)), ((5,), (3,))], "CK101", "1 of 8 elements"),
    "overlap and gap": ([((0,), (5,)), ((3,), (4,))], "CK102", "overlap"),
}


def checkpoint(path: Path, kind: str, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Checkpoint:
    """One tensor of 8 numbers, whose pieces all lie in one real file."""
    path.write_bytes(np.arange(16, dtype="<f4").tobytes())
    shards = []
    for rank, (offsets, sizes) in enumerate(boxes):
        source = Source(path, 4 * offsets[0], "float32", sizes, contiguous_strides(sizes), "r", (0, 64))
        shards.append(Shard(Box(offsets, sizes), rank, source))
    tensor = Tensor((8,), "float32", tuple(shards), kind)  # type: ignore[arg-type]
    return Checkpoint(
        path=path,
        name="made",
        format="rank_files",
        saved_as="made by hand",
        tree={"model": {"w": tensor}},
        files=(RankFile(path, 0, "", "read", 64, path.stat().st_mtime),),
        world_size=Fact(2, ("layout",)),
        step=Fact(None),
        module_order=AS_SAVED,
        all_ranks=True,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_that_cover_a_tensor_once_are_written(kind, tmp_path):
    ck = checkpoint(tmp_path / "bytes", kind, [((0,), (5,)), ((5,), (3,))])
    ckptools.consolidate(ck, tmp_path / "out.safetensors")
    again = ckptools.open(tmp_path / "out.safetensors").model["w"]
    assert again.numpy().tolist() == list(range(8))


@pytest.mark.parametrize(("boxes", "code", "words"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".dcp"])
def test_pieces_that_do_not_are_refused_with_the_tensors_name(suffix, kind, boxes, code, words, tmp_path):
    ck = checkpoint(tmp_path / "bytes", kind, boxes)
    with pytest.raises(NotWholeError, match="not whole") as refused:
        ckptools.consolidate(ck, tmp_path / f"out{suffix}")
    (problem,) = refused.value.problems
    assert (problem.code, problem.tensor) == (code, "model.w") and words in problem.message
    assert [p.name for p in tmp_path.iterdir()] == ["bytes"]
