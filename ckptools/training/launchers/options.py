"""What can be asked of launching: nodes, ranks per node, and where they meet. Plain data, free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from ckptools.cluster.environment import DEFAULT_PORT
from ckptools.errors import UsageError
from ckptools.option import option

LAUNCHERS = ("elastic", "spawn")
RDZV_BACKENDS = ("static", "c10d")
WORLD_SIZE_SOURCES = ("env", "argument")


@dataclass(frozen=True)
class LaunchOptions:
    """How the ranks are started, and where they meet; inside an outer launcher most of it is known already."""

    launcher: str | None = option(None, f"What starts the ranks: {', '.join(LAUNCHERS)}. [default: elastic]")
    nnodes: int | None = option(None, "Nodes; run the command on each. [default: 1]")
    node_rank: int | None = option(None, "Which of the nodes this is, from 0.")
    nproc_per_node: str | None = option(
        None, "Ranks on this node, or of all nodes as a list (2,1), or auto, cpu, gpu. [default: the world size]"
    )
    master_addr: str | None = option(None, "Address of node 0.")
    master_port: int | None = option(None, f"Port on node 0. [default: {DEFAULT_PORT}; one node takes a free one]")
    rdzv_endpoint: str | None = option(None, "HOST:PORT where nodes meet; goes before --master-addr and -port.")
    rdzv_backend: str | None = option(
        None, "How nodes get their ranks: static by --node-rank, c10d among themselves. [default: static]"
    )
    rdzv_id: str | None = option(None, "Name of the run, the same on every node; other runs may use the same endpoint.")
    world_size_from: str = option(
        "env", "How init_process_group learns rank and world size: env (left to the environment), argument."
    )
    timeout: float = option(300.0, "Seconds in which every node and rank must have come.")
    local_rank: int | None = option(
        None, "Passed by torch.distributed.launch.", flag="--local-rank --local_rank", hidden=True
    )

    @property
    def counts(self) -> tuple[int, ...]:
        """Ranks of each node, by node rank; empty where `nproc_per_node` is no list, or c10d makes other node ranks."""
        parts = (self.nproc_per_node or "").split(",")
        return tuple(map(int, parts)) if len(parts) > 1 and self.rdzv_backend != "c10d" else ()


def check(launch: LaunchOptions) -> None:
    """Refuse unknown words and numbers out of range.

    Raises:
        UsageError: one line that says which.
    """
    _check_word("launcher", launch.launcher, LAUNCHERS)
    _check_word("rdzv-backend", launch.rdzv_backend, RDZV_BACKENDS)
    _check_word("world-size-from", launch.world_size_from, WORLD_SIZE_SOURCES)
    if launch.nnodes is not None and launch.nnodes < 1:
        raise UsageError(None, f"--nnodes is {launch.nnodes}, must be at least 1")
    if launch.master_port is not None and not 0 < launch.master_port < 2**16:
        raise UsageError(None, f"--master-port is {launch.master_port}, must be from 1 to 65535")
    if not launch.timeout > 0:
        raise UsageError(None, f"--timeout is {launch.timeout:g}, must be more than 0 seconds")


def _check_word(name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise UsageError(None, f"--{name} {value} is not known; choose from {', '.join(known)}")
