"""A share of the data that is left in the middle of an epoch is gone on with there."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from ckptools.training.model import SEQUENCES, Loader, Position, batches, make_loader
from ckptools.training.options import CreateOptions

OPTIONS = CreateOptions(Path("unused"))


def words(loader: Loader, begin: Position, count: int) -> list[torch.Tensor]:
    return [tokens for tokens, _ in islice(batches(loader, begin), count)]


def test_three_shares_end_an_epoch_with_a_smaller_batch() -> None:
    seen = [(len(tokens), position) for tokens, position in islice(batches(make_loader(OPTIONS, 0, 3), Position()), 44)]
    assert seen[41] == (8, Position(0, 42 * 24))
    assert seen[42:] == [(6, Position(1, 0)), (8, Position(1, 24))]


@pytest.mark.parametrize("steps", [1, 42, 43, 44])
def test_batches_go_on_where_a_run_stopped(steps: int) -> None:
    *_, (_, position) = islice(batches(make_loader(OPTIONS, 1, 3), Position()), steps)
    whole = words(make_loader(OPTIONS, 1, 3), Position(), steps + 3)
    rest = words(make_loader(OPTIONS, 1, 3), position, 3)
    assert all(torch.equal(one, other) for one, other in zip(whole[steps:], rest, strict=True))
    assert not torch.equal(whole[0], rest[0])


def test_another_number_of_shares_sees_what_the_first_left() -> None:
    begin = Position(0, SEQUENCES // 2)
    halves = [words(make_loader(OPTIONS, share, 2), Position(), SEQUENCES // 32) for share in range(2)]
    rest = [words(make_loader(OPTIONS, share, 4), begin, SEQUENCES // 64) for share in range(4)]
    everything = torch.cat([tokens for share in (*halves, *rest) for tokens in share])
    truth = torch.cat(words(make_loader(OPTIONS, 0, 1), Position(), SEQUENCES // 8))
    assert sorted(everything.tolist()) == sorted(truth.tolist())


def test_iterating_a_loader_draws_nothing_from_the_generator_that_is_saved() -> None:
    before = torch.get_rng_state()
    words(make_loader(OPTIONS, 0, 1), Position(), 3)
    assert torch.equal(torch.get_rng_state(), before)
