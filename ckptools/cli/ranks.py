"""A command that was started as one of several ranks (torchrun, srun, mpirun): all share its work, and one prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckptools.cli.ending import Ending
from ckptools.cli.printing import Output, remark
from ckptools.errors import CkptoolsError

SHARED = ("consolidate", "verify", "stats", "diff")
"""Commands whose work ranks share; of any other, each rank does it all."""


@contextmanager
def with_other_ranks(command: str, given: dict[str, Any]) -> Iterator[None]:
    """Share a command's work with all ranks that were started with this one; alone if there are none.

    Args:
        command: its name.
        given: its options; they get the threads that are this rank's on its machine.
    """
    if command not in SHARED or not may_be_a_rank():
        yield
        return
    from ckptools.cluster.environment import derive
    from ckptools.cluster.process import calm_torch

    place = derive(os.environ)
    if place.starter is None or (place.number("WORLD_SIZE") or 1) < 2:
        yield
        return
    calm_torch()  # before torch is imported
    from ckptools.cluster.ranks import joined

    given["jobs"] = given.get("jobs") or _threads(place.number("LOCAL_WORLD_SIZE") or 1)
    Ending.with_torch = True
    ranks = None
    try:
        with joined(place, " ".join(sys.argv[1:]), remark) as ranks:
            Output.silent = ranks.rank != 0
            yield
    except (CkptoolsError, KeyboardInterrupt):
        Output.silent = ranks is not None and not ranks.speaks
        raise
    except Exception:
        Output.silent = False  # a bug of ours is told by whoever met it
        raise


def _threads(ranks: int) -> int:
    """How many threads each rank has where so many share the machine; more than some do not copy faster."""
    return max(1, min(8, (os.cpu_count() or 1) // ranks))


def may_be_a_rank() -> bool:
    """Whether anything says that there are other ranks; most commands are started where nothing does."""
    words = ("WORLD_SIZE", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PBS_NODEFILE")
    return any(word in os.environ for word in words)
