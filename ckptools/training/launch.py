"""Start the ranks of this node, or be one of them where something else started them already."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.cluster import environment
from ckptools.cluster.environment import ProcessInfo, Setting, calm_torch, missing_variables
from ckptools.cluster.variables import STARTERS, restarts
from ckptools.cluster.waiting import say_nothing, say_on_stderr
from ckptools.errors import CkptoolsError, UsageError
from ckptools.training import backends, damage, nodes, option_checks, output, worker, world_sizes
from ckptools.training.launchers import NodeJob, launch
from ckptools.training.nodes import Node, agree, shared_partial_folder
from ckptools.training.options import CreateOptions
from ckptools.training.output import Created

if TYPE_CHECKING:
    from ckptools.cluster.rendezvous import Meeting


def create(options: CreateOptions, verbose: bool = False) -> Created:
    """Train for real and save a checkpoint; with `verbose` rank 0 writes a line per step to stdout.

    Raises:
        UsageError: the options do not fit together, or not with what started this process.
        RendezvousError: the other nodes or ranks were not found.
        OutputExistsError: the folder holds a checkpoint already, and `force` is off.
        WriteError: a rank died, or a file could not be written.
    """
    options = options.completed()
    option_checks.check_launch(options.launch)
    calm_torch()
    place = environment.derive(os.environ, _given(options))
    # With `--nproc-per-node` a process that a scheduler started starts the ranks of a node itself, as torchrun would.
    if place.starter is None or (place.starter is not STARTERS[0] and options.launch.nproc_per_node is not None):
        return _start_ranks(options, place, verbose)
    return _be_a_rank(options, place, verbose)


def _given(options: CreateOptions) -> dict[str, Setting]:
    """Collect what options say of a rank that an outer launcher started."""
    asked = options.launch
    given: dict[str, object] = {"LOCAL_RANK": asked.local_rank}
    if asked.rdzv_endpoint:
        given["MASTER_ADDR"], given["MASTER_PORT"] = nodes.parse_endpoint(asked.rdzv_endpoint)
    else:
        given |= {"MASTER_ADDR": asked.master_addr, "MASTER_PORT": asked.master_port}
    if asked.world_size_from == "argument" and "WORLD_SIZE" not in os.environ:
        given["WORLD_SIZE"] = options.world_size
    return {name: Setting(str(value), "an option") for name, value in given.items() if value is not None}


def _start_ranks(options: CreateOptions, place: ProcessInfo, verbose: bool) -> Created:
    option_checks.check(options)
    if options.launch.launcher == "spawn" and options.resuming.max_restarts:
        raise UsageError(None, "--max-restarts: --launcher spawn starts no rank again; --launcher elastic does")
    node = nodes.this_node(options.launch, options.world_size, place)
    from torch.distributed.distributed_c10d import PrefixStore

    from ckptools.cluster.rendezvous import Meeting
    from ckptools.cluster.rendezvous_store import open_store

    timeout, say = options.launch.timeout, say_on_stderr if verbose else say_nothing
    at = open_store(node.address, node.port, node.hosts, timeout, say)
    node, store = dataclasses.replace(node, port=at.store.port), PrefixStore(node.rdzv_id, at.store)
    number, count = node.node_rank, node.nnodes
    with Meeting(store, "node", number, count, timeout, hosts=at.hosted, at=node.endpoint, say=say) as meeting:
        node = dataclasses.replace(node, node_rank=meeting.number)
        counts = agree(meeting, options, node.nproc)
        launched = dataclasses.replace(options.launch, nproc_per_node=",".join(map(str, counts)))
        options = dataclasses.replace(options, world_size=sum(counts), launch=launched)
        _check(options, sum(counts), node.nproc)
        warning = nodes.idle_gpus(node.nproc, backends.this_machine().gpus)
        if warning and verbose:
            say_on_stderr(warning)

        def train(folder: Path, run_id: str) -> Created:
            return launch(NodeJob(options, node, counts, at.hosted, folder, run_id, verbose))

        return _done_together(meeting, options.out, train)


def _done_together(meeting: Meeting, out: Path, train: Callable[[Path, str], Created]) -> Created:
    """Train as all members of a meeting do, given the folder for files in the making and a name for the run."""
    run_id = meeting.gather("run", uuid.uuid4().hex)[0]
    with shared_partial_folder(meeting, out, run_id) as folder:
        try:
            created = train(folder, run_id)
        except RuntimeError as error:
            # Where another member failed first, it says why.
            raise meeting.cause(error) from None
        meeting.gather("done")
        return created


def lone_node(options: CreateOptions) -> Node | None:
    """The node that this process is, where it starts all ranks itself; None where something else starts some."""
    place = environment.derive(os.environ, _given(options))
    node = None if place.starter else nodes.this_node(options.launch, options.world_size, place)
    return node if node and node.nnodes == 1 else None


def _be_a_rank(options: CreateOptions, place: ProcessInfo, verbose: bool) -> Created:
    """Train as the rank that something else started.

    A mistake is found by all ranks, as all have the same options; the first to say so speaks for all.
    """
    _check_outer(options, place)
    place.export(os.environ)
    worker.prepare_process()
    from ckptools.cluster.rendezvous import meet_ranks

    say = say_on_stderr if verbose else say_nothing
    with meet_ranks(options.launch.timeout, place.counts, say=say) as meeting:
        try:
            agree(meeting, options, 1)
            if meeting.number == 0:
                _check(options, meeting.count, int(os.environ.get("LOCAL_WORLD_SIZE", meeting.count)))
            from ckptools.training.rank import train_and_save

            report = worker.say if verbose else say_nothing
            return _done_together(meeting, options.out, lambda folder, _: train_and_save(options, folder, report))
        except CkptoolsError as error:
            if meeting.reported:
                raise SystemExit(error.exit_code) from None
            raise


def _check_outer(options: CreateOptions, place: ProcessInfo) -> None:
    """Refuse what contradicts the launcher that started this rank, and what it has left open."""
    name = place.starter.name if place.starter else ""
    started = place.number("WORLD_SIZE")
    if started is not None and options.world_size not in (None, started):
        text = f"--world-size is {options.world_size}, but {name} started {started} ranks; leave it out"
        raise UsageError(None, text)
    if place.missing:
        raise UsageError(None, missing_variables(place.missing))
    for word in ("launcher", "nnodes", "node_rank", "nproc_per_node", "rdzv_backend", "rdzv_id"):
        if getattr(options.launch, word) is not None:
            flag = f"--{word.replace('_', '-')}"
            raise UsageError(None, f"{flag}: {name} has started the ranks already; leave it out")


def _check(options: CreateOptions, world_size: int, nproc: int) -> None:
    option_checks.check(options)
    if options.damage:
        damage.check(options, world_size, own_ranks=lone_node(options) is not None)
    world_sizes.check(options, world_size)
    option_checks.check_torch(options)
    backends.chosen_here(options.hardware, nproc)
    # What a run has saved before it was started again, or goes on from, is not in its way.
    if not (restarts() or (options.several and options.resuming.goes_on_in(options.out))):
        output.refuse_existing(options.out, options.force)


def create_damaged(options: CreateOptions, verbose: bool) -> Created:
    """Train for real, save a checkpoint, and damage it as `options.damage` says.

    A stale rank's files are those of a real run that stopped one step earlier, a mixed-in rank's those of a real run
    with the next seed. Both are trained first, into a folder that goes again, so that an interrupt leaves no
    half-broken checkpoint behind.

    Raises:
        UsageError: the damage does not apply, or as `create`.
    """
    with tempfile.TemporaryDirectory(prefix="ckptools-") as scratch:
        # Where something else starts ranks, all of them come here; `create` refuses then what takes another run.
        node = lone_node(options)
        runs = _other_runs(options, node.nproc, Path(scratch)) if node else {}
        created = create(options, verbose)
        if created.rank != 0:
            return created
        broken = damage.apply(created.first, options.damage, options.seed, runs)
        nbytes = sum(path.stat().st_size for path in created.files if path.exists())
        return dataclasses.replace(created, damage=broken, nbytes=nbytes)


def _other_runs(options: CreateOptions, world_size: int, scratch: Path) -> dict[str, Path]:
    """Train the runs that files are taken from; returns what to open of each."""
    damage.check(options, world_size)
    output.refuse_existing(options.out, options.force)
    alike = dataclasses.replace(options, damage="", full=False)
    others = {
        "older run": dataclasses.replace(alike, out=scratch / "older", steps=options.steps - 1),
        "another run": dataclasses.replace(alike, out=scratch / "another", seed=options.seed + 1),
    }
    return {name: create(others[name]).first for name in damage.other_runs(options.damage)}
