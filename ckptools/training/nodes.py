"""The nodes of a run: which one this is, and what all have in common: an address, options and a folder."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ckptools.cluster.environment import DEFAULT_PORT, ProcessInfo
from ckptools.errors import UsageError, WriteError
from ckptools.training import output
from ckptools.training.options import CreateOptions, LaunchOptions

if TYPE_CHECKING:
    from ckptools.cluster.rendezvous import Meeting

DEFAULT_WORLD_SIZE = 4


@dataclass(frozen=True)
class Node:
    """One node of a run.

    Attributes:
        node_rank: None: the nodes number themselves, by the order in which they come.
        nproc: ranks that it starts.
        address: where the nodes meet, an address of node 0.
        port: the port there; 0 takes any free one, which only a lone node can do.
        rdzv_backend: torch's name of how the nodes get their ranks.
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


def this_node(launch: LaunchOptions, world_size: int | None, place: ProcessInfo) -> Node:
    """Make the node of the options, of a scheduler where they leave something out, and of defaults.

    Of `place`, this process in the job of a scheduler, the rank is that of the node.

    Raises:
        UsageError: the options contradict each other, or one is missing.
    """
    counts = _counts(launch.nproc_per_node)
    listed = len(counts) if len(counts) > 1 else None
    if launch.nnodes is not None and listed not in (None, launch.nnodes):
        text = f"--nproc-per-node {launch.nproc_per_node} is a list for {listed} nodes, but --nnodes is {launch.nnodes}"
        raise UsageError(None, text)
    started = place.number("WORLD_SIZE") if place.starter else None
    nnodes = launch.nnodes or listed or started or 1
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
        import torch

        gpus = torch.cuda.device_count() if text != "cpu" else 0
        if text == "gpu" and not gpus:
            raise UsageError(
                None, "--nproc-per-node gpu: there is no GPU here that torch can use; give a number, or cpu"
            )
        return (gpus or os.cpu_count() or 1,)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(None, f"--nproc-per-node is {text!r}, must be a number, one per node (2,1), or auto, cpu, gpu")
    return tuple(map(int, parts))


def _node_rank(launch: LaunchOptions, nnodes: int, counts: tuple[int, ...], place: ProcessInfo) -> int | None:
    rank = launch.node_rank
    if rank is None:
        rank = place.number("RANK") if place.starter else None
    if rank is None:
        return 0 if nnodes == 1 else None
    if not 0 <= rank < nnodes:
        raise UsageError(None, f"--node-rank is {rank}, but --nnodes {nnodes} has node ranks 0 to {nnodes - 1}")
    return rank


def _endpoint(launch: LaunchOptions, nnodes: int, place: ProcessInfo) -> tuple[str, int]:
    """Say where the nodes meet; `--rdzv-endpoint` goes before an address and a port of their own."""
    if launch.rdzv_endpoint:
        return parse_endpoint(launch.rdzv_endpoint)
    found = place.facts.get("MASTER_ADDR")
    address = launch.master_addr or (found.value if found else None)
    port = launch.master_port or place.number("MASTER_PORT") or 0
    if nnodes > 1 and not address:
        raise UsageError(None, f"--nnodes {nnodes} needs --master-addr, the address of node 0, or --rdzv-endpoint")
    return (address or "localhost"), port or (DEFAULT_PORT if nnodes > 1 else 0)


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
    if (len(counts) > 1 or (counts and nnodes == 1)) and world_size not in (None, sum(counts)):
        makes = f"--nproc-per-node {','.join(map(str, counts))} makes {sum(counts)}"
        raise UsageError(None, f"--world-size is {world_size}, but {makes}; leave one of them out")
    if counts:
        return counts[(node_rank or 0) if len(counts) > 1 else 0]
    wanted = DEFAULT_WORLD_SIZE if world_size is None else world_size
    if wanted % nnodes:
        text = f"a world size of {wanted} does not divide by --nnodes {nnodes}; say --nproc-per-node, such as 2,1"
        raise UsageError(None, text)
    return wanted // nnodes


def idle_gpus(nproc: int, gpus: int) -> str | None:
    """Warn of GPUs that no rank of this node will use; None where there are none."""
    if nproc >= gpus:
        return None
    return f"{gpus} GPUs on this node, but {nproc} ranks: {gpus - nproc} of them stay idle; see --nproc-per-node"


# Seconds after which a network file system shows a new file to every node.
_SEEN_WITHIN = 5.0


@contextmanager
def shared_partial_folder(meeting: Meeting, out: Path, run_id: str) -> Iterator[Path]:
    """Let number 0 of a meeting make the hidden folder and remove it at the end; all others check that they see it.

    Raises:
        WriteError: the folder cannot be made, or is not the same for all.
    """
    if meeting.number == 0:
        with output.open_partial_folder(out, run_id) as partial:
            meeting.gather("folder made")
            meeting.gather("folder seen")
            yield partial
        return
    meeting.gather("folder made")
    partial, deadline = output.partial_folder(out, run_id), time.monotonic() + _SEEN_WITHIN
    while not partial.is_dir():
        if time.monotonic() > deadline:
            who = meeting.call(meeting.number)
            raise WriteError(out, f"on {who} is not the folder that number 0 writes to; give one that all nodes share")
        time.sleep(0.05)
    meeting.gather("folder seen")
    yield partial


# What may differ: a folder may be mounted elsewhere, and nodes have their own ranks and counts.
_OWN = ("out", "launch")


def agree(meeting: Meeting, options: CreateOptions, nproc: int) -> tuple[int, ...]:
    """Compare the options of all members of a meeting; returns the ranks that each starts, or is, by number.

    Raises:
        UsageError: options differ, or make another world size than was asked for.
    """
    mine = {"nproc": nproc, "options": _flat(dataclasses.asdict(options))}
    said = [json.loads(text) for text in meeting.gather("options", json.dumps(mine))]
    for number, other in enumerate(said):
        for name, value in said[0]["options"].items():
            found = other["options"].get(name)
            if value != found:
                flag, first, who = f"--{name.replace('_', '-')}", meeting.call(0), meeting.call(number)
                raise UsageError(None, f"{flag} is {value} on {first}, but {found} on {who}; give all the same")
    counts = tuple(each["nproc"] for each in said)
    if options.world_size not in (None, sum(counts)):
        listed = " + ".join(map(str, counts)) + (f" = {sum(counts)}" if len(counts) > 1 else "")
        text = f"--world-size is {options.world_size}, but the nodes start {listed} ranks; leave one of them out"
        raise UsageError(None, text)
    return counts


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if name not in _OWN:
            flat.update(value if isinstance(value, dict) else {name: value})
    return flat
