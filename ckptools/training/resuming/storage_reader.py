"""A checkpoint that ckptools has opened, as a storage for torch.distributed.checkpoint: `dcp.load` fills a run from it.

`dcp.load` looks at the tensors of this rank's state dict and asks for the box of each that the rank holds: rows of a
DTensor on a mesh of any shape, of a ShardedTensor, or the whole of a plain tensor. So a rank reads what it keeps and no
more, and nothing here knows how the run is spread, or how the one that saved was.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptools import api
from ckptools.errors import CkptoolsError, ReadError
from ckptools.text import first_line

Saved = api.Tensor | Tensor
"""A whole tensor of a checkpoint: one that is read when it is sliced, or one that is here already."""


def here(saved: Saved) -> Saved:
    """Leave a tensor as it is: every rank reads for itself."""
    return saved


def sent_by_rank_0(saved: Saved) -> Saved:
    """Let rank 0 read a whole tensor and send it to all; a collective."""
    if isinstance(saved, Tensor):
        return saved
    sent: list[Tensor | CkptoolsError] = [torch.empty(0)]
    if dist.get_rank() == 0:
        try:
            sent = [saved.load()]
        except CkptoolsError as error:  # The others wait for an answer.
            sent = [error]
    dist.broadcast_object_list(sent)
    if isinstance(sent[0], CkptoolsError):
        raise sent[0]
    return sent[0]


class OpenedReader(StorageReader):
    """Reads boxes of whole tensors, the same on every rank, by their key; one tensor at a time is in memory.

    A tensor is made ready to be sliced by `fetch`: `here`, or `sent_by_rank_0`.
    """

    def __init__(self, tensors: Mapping[str, Saved], fetch: Callable[[Saved], Saved]) -> None:
        self.tensors, self.fetch = tensors, fetch

    def read_metadata(self, *_: Any, **_more: Any) -> Metadata:
        """Describe every tensor as one piece: how it lies in the files is for ckptools to know."""
        return Metadata({key: _described(saved) for key, saved in self.tensors.items()})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the boxes that this rank asks for, tensor by tensor, on all ranks in the same order."""
        wanted: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            wanted[item.storage_index.fqn].append(item)
        for key, saved in self.tensors.items():
            whole = self.fetch(saved)
            for item in wanted[key]:
                box = zip(item.storage_offsets, item.lengths, strict=True)
                target = planner.resolve_tensor(item).detach()
                target.copy_(whole[tuple(slice(offset, offset + length) for offset, length in box)])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load; nothing is kept of the last."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **_more: Any) -> None:
        """Begin; nothing has to be prepared."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Take the plan of this rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Take the plans of all ranks as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Take no path: what to read is opened already."""
        return False


def _described(saved: Saved) -> TensorStorageMetadata:
    """Say in DCP's words what a tensor is: one chunk that is all of it."""
    dtype = saved.dtype if isinstance(saved, Tensor) else getattr(torch, saved.dtype)
    size = torch.Size(saved.shape)
    return TensorStorageMetadata(
        TensorProperties(dtype), size, [ChunkStorageMetadata(torch.Size([0] * len(size)), size)]
    )


def fill(state: dict[str, Any], reader: OpenedReader, path: Path) -> None:
    """Read this rank's part of every tensor of a flat state dict into it; a collective.

    Raises:
        CkptoolsError: what a rank could not read, on all of them.
        ReadError: the checkpoint at `path` does not have what the state dict has.
    """
    try:
        load(state, storage_reader=reader)
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        if isinstance(failure, CkptoolsError):
            raise failure from None
        raise ReadError(path, f"cannot be read into this run: {first_line(failure)}") from error
