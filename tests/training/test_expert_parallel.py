"""A mixture of experts: tokens go to the ranks of their experts and back, and nothing else changes by that."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ckptools.training.model import MixtureOfExperts
from ckptools.training.options import CreateOptions, ModelSize
from ckptools.training.output import Created
from tests.training.forked import create_forked
from tests.training.rank_files import assert_same_moments, load_all, local_tensors
from tools import demo

UP = "blocks.0.moe.experts.up"


def mixture() -> tuple[MixtureOfExperts, torch.Tensor]:
    torch.manual_seed(3)
    return MixtureOfExperts(ModelSize(width=6, experts=3)), torch.randn(4, 5, 6)


def test_every_token_is_answered_by_the_expert_that_the_router_prefers() -> None:
    moe, x = mixture()
    for token, answer in zip(x.flatten(0, 1), moe(x).flatten(0, 1), strict=True):
        sure, expert = moe.router(token).softmax(-1).max(-1)
        hidden = functional.gelu(moe.experts.up[expert] @ token)
        torch.testing.assert_close(answer, sure * (moe.experts.down[expert] @ hidden))


def test_the_router_learns_from_the_answers() -> None:
    moe, x = mixture()
    moe(x).square().sum().backward()
    assert moe.router.weight.grad is not None
    assert moe.router.weight.grad.abs().max() > 0


def test_an_expert_that_no_token_comes_to_has_gradients_of_zero() -> None:
    moe, x = mixture()
    moe.run(moe.experts, x.flatten(0, 1), torch.tensor([12, 0, 8])).sum().backward()
    assert moe.experts.up.grad is not None
    assert [bool(grad.any()) for grad in moe.experts.up.grad] == [True, False, True]


def test_experts_on_two_ranks_learn_what_they_learn_on_one(moe: Created, folder: Path) -> None:
    size = ModelSize(experts=4)
    on_one = create_forked(CreateOptions(folder / "moe-ddp", "ddp", world_size=2, layout="dcp", full=True, size=size))
    torch.testing.assert_close(moe.losses, on_one.losses, rtol=1e-5, atol=0)
    assert_same_moments(moe.out, on_one.out)
    assert moe.losses[-1] < moe.losses[0] - 1


def test_a_rank_saves_its_experts_and_all_of_the_rest(moe: Created) -> None:
    for content in load_all(moe.out, "ep0-*.pt"):
        model = content["state"]["model"]
        up = model[UP]
        assert (str(up.placements), tuple(up.shape), tuple(up._local_tensor.shape)) == (
            "(Shard(dim=0),)", (4, 261, 65), (2, 261, 65)
        )  # fmt: skip
        assert {name.rpartition(".")[0] for name, value in model.items() if isinstance(value, DTensor)} == {
            f"blocks.{n}.moe.experts" for n in range(3)
        }


def test_what_is_not_an_expert_stays_the_same_on_all_ranks(moe: Created) -> None:
    one, other = (dict(local_tensors(content["state"]["model"])) for content in load_all(moe.out, "ep0-*.pt"))
    moved = {name for name in one if not demo.same(one[name], other[name])}
    assert moved == {f"/blocks.{n}.moe.experts.{name}" for n in range(3) for name in ("up", "down")}


def test_tokens_of_every_rank_reach_every_expert(moe: Created) -> None:
    state = torch.load(moe.out / "full.pt")["optimizer"]["state"]
    assert [bool(expert.any()) for expert in state[UP]["exp_avg"]] == [True] * 4


def test_moe_without_a_number_has_four_experts() -> None:
    assert CreateOptions(Path("run"), "moe").completed().size.experts == 4
    assert CreateOptions(Path("run"), "ddp").completed().size.experts == 0
