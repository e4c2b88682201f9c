"""What a launcher is told: which ranks to start on this node, for what, and where they meet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptools.training.launchers.nodes import Node
from ckptools.training.options import CreateOptions


@dataclass(frozen=True)
class Job:
    """The ranks of one node.

    Attributes:
        options: checked, and the same on every node.
        node: this one; its rank and its port are known by now.
        counts: ranks of each node, by node rank.
        hosts: this process hosts the store where the nodes meet.
        partial: folder for files in the making, there already.
        run_id: the same on every node.
        verbose: rank 0 writes a line per step to stdout.
    """

    options: CreateOptions
    node: Node
    counts: tuple[int, ...]
    hosts: bool
    partial: Path
    run_id: str
    verbose: bool
