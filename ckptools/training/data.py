"""Synthetic text that a model can learn within a few steps.

A few common words follow one another by a fixed rule. While training, one word in ten is replaced by any word at
all: which ones NumPy draws, by which word Python, so that a run depends on every state that a checkpoint keeps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ckptools.training.options import CreateOptions

SEQUENCES = 1024
COMMON_WORDS = 16
NOISE = 0.1


def sequences(vocab: int, context: int, seed: int) -> Tensor:
    """Make the training set: int64 tokens (SEQUENCES, context + 1), as the last one needs a target too."""
    generator = torch.Generator().manual_seed(seed)
    common = min(COMMON_WORDS, vocab)
    words = torch.randint(common, (SEQUENCES, 1), generator=generator)
    return (words + 5 * torch.arange(context + 1)) % common


def with_noise(tokens: Tensor, vocab: int) -> Tensor:
    """Replace one token in ten by a random one; draws from NumPy's and Python's global generators."""
    noisy = torch.from_numpy(np.random.random(tokens.shape) < NOISE)
    tokens = tokens.clone()
    tokens[noisy] = torch.tensor([random.randrange(vocab) for _ in range(int(noisy.sum()))], dtype=tokens.dtype)
    return tokens


@dataclass(frozen=True)
class Position:
    """The progress of a run in its data.

    Attributes:
        epoch: whole passes over the training set.
        samples: sequences of the next pass that all ranks together have seen.
        exact: False where only the epoch is known.
    """

    epoch: int = 0
    samples: int = 0
    exact: bool = True

    def aligned(self, shares: int) -> Position:
        """Go back to where this number of shares have seen equally much, which may be less by a few samples."""
        samples = self.samples // shares * shares
        return Position(self.epoch, samples) if samples < SEQUENCES else Position(self.epoch + 1, 0)

    def after(self, samples: int, in_epoch: int) -> Position:
        """Move on by what all ranks together have seen; a pass ends after `in_epoch` samples."""
        samples += self.samples
        return Position(self.epoch, samples) if samples < in_epoch else Position(self.epoch + 1, 0)


def position_after(steps: int, shares: int, batch: int) -> Position:
    """The position after a number of steps from the start, each with `batch` samples of every share."""
    per_share = -(-SEQUENCES // shares)
    epoch, batch_in_epoch = divmod(steps, -(-per_share // batch))
    return Position(epoch, batch_in_epoch * batch * shares)


class ShareSampler(DistributedSampler[int]):
    """A DistributedSampler that can begin in the middle of an epoch, as a resumed run must."""

    begin = 0

    def go_to(self, position: Position) -> None:
        """Shuffle for this epoch, and leave out what this share has seen of it."""
        self.set_epoch(position.epoch)
        self.begin = position.samples // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.begin, None)


Loader = DataLoader[tuple[Tensor, ...]]


def make_loader(options: CreateOptions, share: int, shares: int) -> Loader:
    """Make one of `shares` shares of the training set; every epoch shuffles anew, from the seed."""
    dataset = TensorDataset(sequences(options.size.vocab, options.size.context, options.seed))
    sampler = ShareSampler(dataset, shares, share, seed=options.seed)
    # A loader draws a seed for its workers whenever it is iterated: not from the generator that a checkpoint keeps.
    return DataLoader(dataset, batch_size=options.batch, sampler=sampler, generator=torch.Generator())


def batches(loader: Loader, position: Position) -> Iterator[tuple[Tensor, Position]]:
    """Yield int64 tokens (batch, context + 1) and the position after them; does not end."""
    sampler = cast("ShareSampler", loader.sampler)
    while True:
        sampler.go_to(position)
        for (tokens,) in loader:
            position = position.after(len(tokens) * sampler.num_replicas, sampler.total_size)
            yield tokens, position
