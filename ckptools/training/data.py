"""Synthetic text that a model can learn within a few steps.

A few common words follow one another by a fixed rule; one word in ten is replaced by any word at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ckptools.training.options import CreateOptions

SEQUENCES = 1024
COMMON_WORDS = 16
NOISE = 0.1


def sequences(vocab: int, context: int, seed: int) -> Tensor:
    """Make the training set.

    Args:
        vocab: tokens in the vocabulary.
        context: tokens that the model sees; one more is stored, as the target of the last.
        seed: the same seed gives the same tokens on every rank.

    Returns:
        int64 tokens (SEQUENCES, context + 1).
    """
    random = torch.Generator().manual_seed(seed)
    common = min(COMMON_WORDS, vocab)
    words = torch.randint(common, (SEQUENCES, 1), generator=random)
    tokens = (words + 5 * torch.arange(context + 1)) % common
    noisy = torch.rand(tokens.shape, generator=random) < NOISE
    return torch.where(noisy, torch.randint(vocab, tokens.shape, generator=random), tokens)


def make_loader(options: CreateOptions, rank: int, world_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Make this rank's share of the training set; every epoch shuffles anew, from the seed."""
    dataset = TensorDataset(sequences(options.size.vocab, options.size.context, options.seed))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset, world_size, rank, seed=options.seed)
    return DataLoader(dataset, batch_size=options.batch, sampler=sampler)


def batches(loader: DataLoader[tuple[Tensor, ...]], steps: int) -> Iterator[Tensor]:
    """Yield `steps` batches of int64 tokens (batch, context + 1), over as many epochs as that takes."""
    for step in range(steps):
        epoch, batch_in_epoch = divmod(step, len(loader))
        if batch_in_epoch == 0:
            cast("DistributedSampler[tuple[Tensor, ...]]", loader.sampler).set_epoch(epoch)
            epoch_batches = iter(loader)
        yield next(epoch_batches)[0]
