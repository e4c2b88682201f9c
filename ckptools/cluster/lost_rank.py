"""Say that a rank has lost another one: torch raises an error of its backend, which names an address at most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from ckptools.errors import RendezvousError


def is_lost(error: BaseException) -> bool:
    """Whether a collective failed because another rank had gone; gloo has no class for it."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


@contextmanager
def lost_ranks_told(path: Path | None, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Inside this context, a collective that fails because another rank has gone says so.

    Args:
        path: what was being read or written; None if the message is to name none.
        group: the ranks; None for all.

    Raises:
        RendezvousError: the connection to a rank was lost.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        text = "lost the connection to another rank, which ended first; its node says why"
        raise RendezvousError(path, f"rank {dist.get_rank(group)} {text}") from error
