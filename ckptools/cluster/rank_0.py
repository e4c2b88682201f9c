"""Let rank 0 of a process group make something for all of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ckptools.errors import CkptoolsError, RefusedError
from ckptools.text import first_line

T = TypeVar("T")


def made_by_rank_0(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Let rank 0 make something for all ranks; a collective.

    Raises:
        CkptoolsError, OSError: of rank 0, raised on every rank; `told_by` shortens it on the others.
        RefusedError: rank 0 failed in another way, or was interrupted; raised on the other ranks.
    """
    made: list[Any] = [None, None]
    failure: BaseException | None = None
    if dist.get_rank(group) == 0:
        try:
            made = [make(), None]
        except BaseException as error:  # whatever it is, an interrupt too, the others wait for an answer
            failure = error
            sent = isinstance(error, (CkptoolsError, OSError))
            made = [None, error if sent else RefusedError(None, f"rank 0 failed: {first_line(error)}")]
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(made, source, group)
    if failure is not None:
        raise failure
    if made[1] is not None:
        raise made[1]
    return cast("T", made[0])


def told_by(rank: int, error: CkptoolsError, path: object) -> CkptoolsError:
    """The error of one rank as the others raise it: all its facts, but few words, because that rank explains it."""
    short = copy(error)
    short.args = (f"{path}: is not loaded; rank {rank} says why",)
    return short
