"""Which of the random states that were saved a rank goes on with."""

from __future__ import annotations

import torch

from ckptools.training import model
from ckptools.training.model import RandomState


def states(*of_ranks: tuple[int, int]) -> list[RandomState]:
    """Real states of ranks: of Python's and NumPy's generators by one seed, of torch's by another."""
    found = []
    for noise, dropout in of_ranks:
        model.seed_all(noise)
        torch.manual_seed(dropout)
        found.append(model.capture_random_states(torch.device("cpu")))
    return found


RANKS_OF_THEIR_OWN = states((0, 0), (1, 1))
PAIRS = states((0, 0), (0, 0), (1, 1), (1, 1))
STAGES = states((0, 0), (0, 5))


def test_ranks_that_draw_the_noise_in_the_data_alike_are_of_one_share() -> None:
    assert model.first_of_shares(RANKS_OF_THEIR_OWN) == [0, 1]
    assert model.first_of_shares(PAIRS) == [0, 2]
    assert model.first_of_shares(STAGES) == [0]
    assert model.first_of_shares([]) == []


def test_a_rank_goes_on_with_the_states_of_its_share() -> None:
    assert model.own_random_states(RANKS_OF_THEIR_OWN, 1, 2) is RANKS_OF_THEIR_OWN[1]
    assert model.own_random_states(PAIRS, 1, 2) is PAIRS[2]
    assert model.own_random_states(PAIRS, 2, 4) is None


def test_a_stage_goes_on_with_its_own_states() -> None:
    assert model.own_random_states(STAGES, 0, 1, rank=1) is STAGES[1]


def test_ranks_of_a_share_draw_alike_where_stages_drew_apart() -> None:
    assert model.own_random_states(STAGES, 0, 1) is STAGES[0]


def test_stages_see_the_same_data_where_ranks_had_shares_of_their_own() -> None:
    assert model.own_random_states(RANKS_OF_THEIR_OWN, 0, 1, rank=1) is RANKS_OF_THEIR_OWN[0]
