"""Which node of a run this is, how many ranks each has, and where the nodes meet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from ckptools.cluster.environment import DEFAULT_PORT, Place
from ckptools.errors import UsageError
from ckptools.training.launchers.options import LaunchOptions

DEFAULT_WORLD_SIZE = 4


@dataclass(frozen=True)
class Node:
    """One node of a run.

    Attributes:
        nnodes: how many there are.
        node_rank: which it is; None: the nodes number themselves, by the order in which they come.
        nproc: ranks that it starts.
        address: where the nodes meet, an address of node 0.
        port: the port there; 0 takes any free one, which only a lone node can do.
        rdzv_backend: torch's name of how the nodes get their ranks.
        rdzv_id: name of the run.
    """

    nnodes: int
    node_rank: int | None
    nproc: int
    address: str
    port: int
    rdzv_backend: str
    rdzv_id: str

    @property
    def endpoint(self) -> str:
        """`HOST:PORT`, with brackets around an address that has colons itself."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def hosts(self) -> bool | None:
        """Whether this node hosts the rendezvous; None: the first of those at that address does."""
        return None if self.node_rank is None else self.node_rank == 0


def this_node(launch: LaunchOptions, world_size: int | None, place: Place) -> Node:
    """Make the node of the options, of a scheduler where they leave something out, and of defaults.

    Args:
        launch: checked already.
        world_size: of the option; None where it was not given.
        place: this process in the job of a scheduler; its rank is that of the node.

    Raises:
        UsageError: the options contradict each other, or one is missing.
    """
    counts = _counts(launch.nproc_per_node)
    nnodes = _nnodes(launch, counts, place)
    node_rank = _node_rank(launch, nnodes, counts, place)
    address, port = _endpoint(launch, nnodes, place)
    backend = launch.rdzv_backend or ("c10d" if port == 0 else "static")
    if node_rank is None and (backend == "static" or len(counts) > 1):
        why = "with --rdzv-backend static" if backend == "static" else "with a list of ranks per node"
        raise UsageError(None, f"--node-rank is missing: {why} each of the {nnodes} nodes says which it is, from 0")
    nproc = _nproc(counts, nnodes, node_rank, world_size)
    return Node(nnodes, node_rank, nproc, address, port, backend, launch.rdzv_id or "ckptools")


def _counts(text: str | None) -> tuple[int, ...]:
    """Read `--nproc-per-node`: empty where it was not given, one number for every node, or one for each."""
    if text is None:
        return ()
    if text in ("auto", "cpu", "gpu"):
        return (_devices(text),)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(None, f"--nproc-per-node is {text!r}, must be a number, one per node (2,1), or auto, cpu, gpu")
    return tuple(map(int, parts))


def _devices(word: str) -> int:
    """Count what `auto`, `cpu` or `gpu` means here, as torchrun does."""
    import torch

    gpus = torch.cuda.device_count() if word != "cpu" else 0
    if word == "gpu" and not gpus:
        raise UsageError(None, "--nproc-per-node gpu: there is no GPU here that torch can use; give a number, or cpu")
    return gpus or os.cpu_count() or 1


def _nnodes(launch: LaunchOptions, counts: tuple[int, ...], place: Place) -> int:
    listed = len(counts) if len(counts) > 1 else None
    if launch.nnodes is not None and listed not in (None, launch.nnodes):
        text = f"--nproc-per-node {launch.nproc_per_node} is a list for {listed} nodes, but --nnodes is {launch.nnodes}"
        raise UsageError(None, text)
    if launch.nnodes is not None:
        return launch.nnodes
    started = place.number("WORLD_SIZE") if place.starter else None
    return listed or started or 1


def _node_rank(launch: LaunchOptions, nnodes: int, counts: tuple[int, ...], place: Place) -> int | None:
    rank = launch.node_rank
    if rank is None:
        rank = place.number("RANK") if place.starter else None
    if rank is None:
        return 0 if nnodes == 1 else None
    if not 0 <= rank < nnodes:
        raise UsageError(None, f"--node-rank is {rank}, but --nnodes {nnodes} has node ranks 0 to {nnodes - 1}")
    return rank


def _endpoint(launch: LaunchOptions, nnodes: int, place: Place) -> tuple[str, int]:
    """Say where the nodes meet; `--rdzv-endpoint` goes before an address and a port of their own."""
    if launch.rdzv_endpoint:
        return parse_endpoint(launch.rdzv_endpoint)
    address = launch.master_addr or _fact(place, "MASTER_ADDR")
    port = launch.master_port or int(_fact(place, "MASTER_PORT") or 0)
    if nnodes > 1 and not address:
        raise UsageError(None, f"--nnodes {nnodes} needs --master-addr, the address of node 0, or --rdzv-endpoint")
    return (address or "localhost"), port or (DEFAULT_PORT if nnodes > 1 else 0)


def _fact(place: Place, name: str) -> str | None:
    return place.facts[name].value if name in place.facts else None


def parse_endpoint(text: str) -> tuple[str, int]:
    """Read `HOST:PORT`, `[::1]:29500` or `HOST` alone.

    Raises:
        UsageError: it is none of these.
    """
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError:
        host, port = None, 0
    if not host or "/" in text or "@" in text:
        raise UsageError(None, f"--rdzv-endpoint is {text!r}, must be HOST:PORT with a port from 1 to 65535")
    return host, port


def _nproc(counts: tuple[int, ...], nnodes: int, node_rank: int | None, world_size: int | None) -> int:
    if len(counts) > 1:
        _check_sum(sum(counts), world_size, counts)
        return counts[node_rank or 0]
    if counts:
        if nnodes == 1:
            _check_sum(counts[0], world_size, counts)
        return counts[0]
    wanted = DEFAULT_WORLD_SIZE if world_size is None else world_size
    if wanted % nnodes:
        text = f"a world size of {wanted} does not divide by --nnodes {nnodes}; say --nproc-per-node, such as 2,1"
        raise UsageError(None, text)
    return wanted // nnodes


def _check_sum(total: int, world_size: int | None, counts: tuple[int, ...]) -> None:
    if world_size not in (None, total):
        listed = ",".join(map(str, counts))
        raise UsageError(
            None, f"--world-size is {world_size}, but --nproc-per-node {listed} makes {total}; leave one of them out"
        )


def idle_gpus(nproc: int, gpus: int) -> str | None:
    """Warn of GPUs that no rank of this node will use; None where there are none."""
    if nproc >= gpus:
        return None
    return f"{gpus} GPUs on this node, but {nproc} ranks: {gpus - nproc} of them stay idle; see --nproc-per-node"
