"""What the ranks send each other in one step, counted by torch's profiler.

Collectives are called by every rank of a group together: all_reduce (everybody gets the sum), all_gather (everybody
gets all pieces), reduce_scatter (everybody gets a piece of the sum), broadcast, all_to_all, barrier. Point to point
are send and recv: one rank to one other. Some are started by threads of autograd, which the profiler sees too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

BACKENDS = ("gloo:", "nccl:", "mpi:")


def recorded(step: Callable[[], float], report: Callable[[str], None]) -> float:
    """Take a step and report what each rank sent and received in it; a collective.

    Args:
        step: returns the loss.
        report: takes one line at a time; called on every rank alike.
    """
    # Kineto announces itself on stderr otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as events:
        loss = step()
    everyone: list[dict[str, tuple[int, int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, counted(events))
    for line in table(everyone):
        report(line)
    return loss


def counted(events: Any) -> dict[str, tuple[int, int]]:
    """Calls and elements of each operation, by its name: `{"all_reduce": (2, 171234)}`."""
    calls: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for event in events.events():
        if event.name.startswith(BACKENDS):
            name = event.name.partition(":")[2]
            calls[name] += 1
            elements[name] += sum(prod(shape) for shape in event.input_shapes if shape)
    return {name: (count, elements[name]) for name, count in calls.items()}


def table(everyone: list[dict[str, tuple[int, int]]]) -> Iterator[str]:
    """Lines of what each rank did; ranks that did the same share one."""
    yield "one step            calls   elements   ranks"
    rows: dict[tuple[str, int, int], list[int]] = {}
    for rank, operations in enumerate(everyone):
        for name, (calls, elements) in sorted(operations.items()):
            rows.setdefault((name, calls, elements), []).append(rank)
    for (name, calls, elements), ranks in sorted(rows.items()):
        yield f"  {name:<16} {calls:>6} {elements:>10}   {', '.join(map(str, ranks))}"
