"""From the deaths of ranks to one error that says why."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools import errors
from ckptools.cluster.remote_errors import remade
from ckptools.errors import WriteError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def failure_reason(out: Path, failures: Mapping[int, ProcessFailure]) -> Exception:
    """Make one line of what the ranks died from.

    When one rank dies, the others soon fail too, at the connection to it or by the launcher's SIGTERM. So a rank
    that another signal ended is believed first, then one that says what was wrong, then the earliest.

    Args:
        out: the folder that they were to write.
        failures: by rank.

    Returns:
        The ckptools error that the rank raised, WriteError for a rank that was killed, RuntimeError for a
        mistake in ckptools.
    """
    rank, failure = min(failures.items(), key=lambda item: _weight(item[1]))
    if failure.exitcode < 0:
        return WriteError(out, f"not written: rank {rank} was killed by {failure.signal_name()}")
    kind, _, message = _message(failure).partition(": ")
    return remade(kind, message) or RuntimeError(f"rank {rank}: {kind}: {message}".splitlines()[0])


def _weight(failure: ProcessFailure) -> tuple[bool, bool, bool, int]:
    told_to_stop = failure.exitcode == -signal.SIGTERM
    ours = hasattr(errors, _message(failure).partition(": ")[0])
    return told_to_stop, failure.exitcode >= 0, not ours, failure.timestamp


def _message(failure: ProcessFailure) -> str:
    recorded = failure.message
    return str(recorded["message"]) if isinstance(recorded, dict) else recorded
