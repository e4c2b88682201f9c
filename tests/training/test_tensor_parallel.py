"""Tensor parallel, alone and under FSDP2: what is cut how, and that it trains the model that one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.training.output import Created
from tests.training.rank_files import assert_same_moments, load, load_all, local_tensors
from tools import demo

pytestmark = pytest.mark.slow


def placements(created: Created, name: str) -> str:
    """How a tensor of the model lies on the ranks, as the file of rank 1 says."""
    return said_of(load(created.out / "ep0-ba5-rank1.pt")["state"]["model"][name])


def said_of(value: Any) -> str:
    return str(value.placements) if isinstance(value, DTensor) else "plain"


def test_tensor_parallel_trains_what_one_process_trains(tp: Created, one_rank: Created) -> None:
    torch.testing.assert_close(tp.losses, one_rank.losses, rtol=1e-5, atol=0)
    assert_same_moments(tp.out, one_rank.out)


def test_every_group_is_one_share_of_the_data(fsdp2_tp: Created, ddp: Created) -> None:
    torch.testing.assert_close(fsdp2_tp.losses, ddp.losses, rtol=1e-5, atol=0)
    assert_same_moments(fsdp2_tp.out, ddp.out)


@pytest.mark.parametrize(
    ("name", "alone", "under_fsdp2"),
    [
        ("blocks.0.up.weight", "(Shard(dim=0),)", "(_StridedShard(dim=0, sf=2), Shard(dim=0))"),
        ("blocks.0.down.weight", "(Shard(dim=1),)", "(Shard(dim=0), Shard(dim=1))"),
        ("blocks.0.down.bias", "(Replicate(),)", "(Shard(dim=0), Replicate())"),
        ("blocks.2.attn.qkv.bias", "(Shard(dim=0),)", "(_StridedShard(dim=0, sf=2), Shard(dim=0))"),
        ("emb.weight", "(Shard(dim=0),)", "(_StridedShard(dim=0, sf=2), Shard(dim=0))"),
        ("norm.weight", "plain", "(Shard(dim=0),)"),
        ("positions", "plain", "plain"),
    ],
)
def test_columns_rows_and_the_vocabulary_are_cut(
    name: str, alone: str, under_fsdp2: str, tp: Created, fsdp2_tp: Created
) -> None:
    assert (placements(tp, name), placements(fsdp2_tp, name)) == (alone, under_fsdp2)


def test_odd_sizes_make_uneven_parts(tp: Created) -> None:
    parts = [content["state"]["model"]["blocks.1.up.weight"] for content in load_all(tp.out, "ep0-*.pt")]
    assert [tuple(part._local_tensor.shape) for part in parts] == [(131, 65), (130, 65)]


def test_what_is_not_cut_stays_the_same_on_all_ranks_of_a_group(tp: Created) -> None:
    one, other = (content["state"]["model"] for content in load_all(tp.out, "ep0-*.pt"))
    whole = [name for name in one if "Shard" not in said_of(one[name])]
    mine, theirs = (dict(local_tensors({name: model[name] for name in whole})) for model in (one, other))
    assert len(whole) == 28
    assert all(demo.same(mine[name], theirs[name]) for name in mine)


def test_the_embedding_stays_the_head(tp: Created, fsdp2_tp: Created) -> None:
    for created in (tp, fsdp2_tp):
        full = torch.load(created.out / "full.pt")
        assert torch.equal(full["model"]["emb.weight"], full["model"]["head.weight"])
        assert "head.weight" not in full["optimizer"]["state"]


def test_replicas_of_shards_hold_the_same_bits(hsdp_tp: Created) -> None:
    ranks = [dict(local_tensors(content["state"]["model"])) for content in load_all(hsdp_tp.out, "ep0-*.pt")]
    for one, other in zip(ranks[:4], ranks[4:], strict=True):
        assert all(demo.same(one[name], other[name]) for name in one if name != "/seen")


def test_composer_counts_the_samples_of_a_group_once(tp: Created, fsdp2_tp: Created) -> None:
    stamps: list[dict[str, Any]] = [load(c.first)["state"]["timestamp"]["Timestamp"] for c in (tp, fsdp2_tp)]
    assert [stamp["sample"] for stamp in stamps] == [5 * 8, 5 * 8 * 2]


def test_the_refusal_comes_before_anything_starts(tmp_path: Path) -> None:
    asked = ["create", str(tmp_path / "run"), "--strategy", "fsdp2-tp", "--world-size", "5"]
    done = CliRunner().invoke(app, asked)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "run").exists()
