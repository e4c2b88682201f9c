"""A piece of one tensor that does not fit the tensor: it is named, and the rank's other tensors are here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.tensor import Replicate, Shard

import ckptools
from ckptools.errors import NotWholeError
from tests.pickles.test_dtensor import FULL, distributed, save_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor")
WORLD, RANK = 4, 2
CHANGES = {
    "another dtype": (lambda local: local.bfloat16(), "bfloat16 [3, 7], expected float32 [3, 7]"),
    "another shape": (lambda local: local[:-1].clone(), "float32 [2, 7], expected float32 [3, 7]"),
}


def as_dtensor(mesh, change):
    tensor = distributed(mesh, [Shard(0)])
    if dist.get_rank() == RANK:
        tensor._local_tensor = change(tensor._local_tensor)
    return tensor


def as_sharded_tensor(mesh, change):
    chunks = FULL.chunk(WORLD)
    listed = [ShardMetadata([3 * r, 0], list(c.shape), f"rank:{r}/cpu") for r, c in enumerate(chunks)]
    own = LocalShard(chunks[dist.get_rank()].clone(), listed[dist.get_rank()])
    metadata = ShardedTensorMetadata(listed, FULL.size(), TensorProperties())
    tensor = ShardedTensor._init_from_local_shards_and_global_metadata([own], metadata)
    if dist.get_rank() == RANK:
        own.tensor = change(own.tensor)
    return tensor


def kept(local):
    return local


@pytest.mark.parametrize("make", [as_dtensor, as_sharded_tensor])
@pytest.mark.parametrize("how", CHANGES)
def test_a_piece_that_does_not_fit_is_named_and_the_others_are_here(tmp_path, make, how):
    change, words = CHANGES[how]
    path = save_ranks(tmp_path, (WORLD,), lambda mesh: {"odd": make(mesh, change), "sound": make(mesh, kept)})
    ck = ckptools.open(path, all_ranks=True)
    (problem,) = [p for p in ck.problems if p.severity == "error"]
    assert (problem.code, problem.rank, problem.tensor, ck.whole) == ("CK104", RANK, "model.odd", False)
    assert words in problem.message
    assert torch.equal(ck.model["sound"].load(), FULL) and torch.equal(ck.model["odd"][:6], FULL[:6])
    (alone,) = [
        p for p in ckptools.open(tmp_path / f"rank{RANK}.pt", only_this_file=True).problems if p.code == "CK104"
    ]
    assert words in alone.message


def test_an_output_leaves_out_the_tensor_with_a_piece_that_does_not_fit(tmp_path):
    change, words = CHANGES["another shape"]
    path = save_ranks(
        tmp_path, (WORLD,), lambda mesh: {"odd": as_dtensor(mesh, change), "sound": as_dtensor(mesh, kept)}
    )
    with pytest.raises(NotWholeError, match=r"CK104  rank 2, model.odd"):
        ckptools.consolidate(path, tmp_path / "out.pt")
    done = ckptools.consolidate(path, tmp_path / "out.pt", allow_missing=True)
    assert words in str(done.left_out)
    assert torch.equal(torch.load(tmp_path / "out.pt")["model"]["sound"], FULL)


def test_a_replica_of_another_dtype_is_named(tmp_path):
    def make(mesh):
        tensor = distributed(mesh, [Replicate()])
        if dist.get_rank() == 1:
            tensor._local_tensor = tensor._local_tensor.half()
        return {"w": tensor}

    ck = ckptools.open(save_ranks(tmp_path, (3,), make), all_ranks=True)
    assert [(p.code, p.rank, p.tensor) for p in ck.problems if p.severity == "error"] == [("CK104", 1, "model.w")]
