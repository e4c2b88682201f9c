"""Synthetic text that a model can learn within a few steps.

A few common words follow one another by a fixed rule. While training, one word in ten is replaced by any word at
all: which ones NumPy draws, by which word Python, so that a run depends on every state that a checkpoint keeps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
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
    """Make the training set.

    Args:
        vocab: tokens in the vocabulary.
        context: tokens that the model sees; one more is stored, as the target of the last.
        seed: the same seed gives the same tokens on every rank.

    Returns:
        int64 tokens (SEQUENCES, context + 1).
    """
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


def make_loader(options: CreateOptions, share: int, shares: int) -> DataLoader[tuple[Tensor, ...]]:
    """Make one of `shares` shares of the training set; every epoch shuffles anew, from the seed."""
    dataset = TensorDataset(sequences(options.size.vocab, options.size.context, options.seed))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset, shares, share, seed=options.seed)
    return DataLoader(dataset, batch_size=options.batch, sampler=sampler)


def batches(loader: DataLoader[tuple[Tensor, ...]], steps: int) -> Iterator[Tensor]:
    """Yield `steps` batches of int64 tokens (batch, context + 1), over as many epochs as that takes."""
    for step in range(steps):
        epoch, batch_in_epoch = divmod(step, len(loader))
        if batch_in_epoch == 0:
            cast("DistributedSampler[tuple[Tensor, ...]]", loader.sampler).set_epoch(epoch)
            epoch_batches = iter(loader)
        yield next(epoch_batches)[0]
