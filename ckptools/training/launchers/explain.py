"""`ckptools create --explain-env`: what launchers and schedulers have set here, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptools.cluster.environment import NEEDED, Place
from ckptools.cluster.variables import ALLOCATIONS, STARTERS, Variables

# Torch's launcher says by these that it hosts the rendezvous; they are shown and not interpreted.
_MORE = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")

_MEANING = {
    "RANK": "rank",
    "WORLD_SIZE": "world size",
    "LOCAL_RANK": "rank on this node",
    "LOCAL_WORLD_SIZE": "ranks on this node",
    "GROUP_RANK": "node rank",
    "MASTER_ADDR": "address of rank 0",
    "MASTER_PORT": "port there",
}


def explain(variables: Variables, place: Place) -> str:
    """Say in lines what was found, what follows and what is missing."""
    return "\n".join([*_found(variables), *_follows(place), *_missing(place)])


def _names() -> Iterator[str]:
    for starter in STARTERS:
        yield from (*starter.rank, *starter.world_size, *starter.local_rank)
        yield from (*starter.local_world_size, *starter.node_rank)
    for allocation in ALLOCATIONS:
        yield from (*allocation.job, *allocation.hosts, *allocation.tasks)
    yield from ("SLURM_STEP_ID", "PBS_TASKNUM", *_MORE)


def _found(variables: Variables) -> Iterator[str]:
    found = [name for name in dict.fromkeys(_names()) if name in variables]
    yield "found:" if found else "found: no variable of a launcher or scheduler"
    yield from _columns((name, variables[name]) for name in found)


def _follows(place: Place) -> Iterator[str]:
    if place.starter is None:
        where = f" in a {place.allocation.name} job" if place.allocation else ""
        yield f"follows: nothing started this process as a rank{where}; ckptools create starts the ranks itself"
        return
    yield f"follows: this process is a rank that {place.starter.name} started"
    known = [name for name in _MEANING if name in place.facts]
    rows = [(name, place.facts[name].value, _MEANING[name], f"from {place.facts[name].source}") for name in known]
    yield from _columns(rows)


def _missing(place: Place) -> Iterator[str]:
    if place.starter is None:
        return
    yield "missing: " + (", ".join(place.missing) or f"nothing; torch needs {', '.join(NEEDED)}")


def _columns(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
