"""`ckptools create`: train a small model for real, and save a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptools.cli.printing import Ending, remark, show
from ckptools.cli.running import is_a_rank
from ckptools.cluster.environment import NEEDED, READ, ProcessInfo, Variables, derive
from ckptools.errors import UsageError
from ckptools.option import option
from ckptools.text import size
from ckptools.training.options import CreateOptions

if TYPE_CHECKING:
    from ckptools.training.output import Created

# Longest list of numbers with gaps between them.
FEW = 8

_NUMBER = re.compile(r"\d+")


Out = Annotated[
    Path | None, typer.Argument(readable=False, metavar="[OUT]", show_default=False, help="Folder for the checkpoint.")
]


def create(
    out: Out = None,
    *,
    backends: bool = option(False, "Only say which backends this machine has, and why not.", common=True),
    explain_env: bool = option(False, "Only say what launchers and schedulers have set here, and what follows."),
    options: CreateOptions,
) -> None:
    """Train a small transformer and save a real checkpoint.

    On GPUs where there are any, else on the CPU. Starts the ranks itself; inside `torchrun -m ckptools create ...`
    it is one of them.

    Layouts: composer (ep0-ba5-rank0.pt, one file per rank; with ddp one whole file), composer-dcp (ep0-ba5/, as
    Composer saves shards since 0.16; not ddp), snapshot (snapshot.pt, ddp only), verl (model_world_size_4_rank_0.pt
    and so on, not ddp), dcp (torch.distributed.checkpoint), accelerate (save_state), lightning (the Trainer's .ckpt:
    a file with ddp, else a folder), fabric (fabric.save), torchtitan (step-5/), olmo (step5/), huggingface (the
    model alone: model.safetensors, or several with an index).

    Examples:
        ckptools create OUT
        ckptools create OUT --strategy fsdp2 --world-size 2 --break missing:1
    """
    from ckptools import training

    if backends:
        _show_backends()
        return
    if explain_env:
        show(explain(os.environ, derive(os.environ)))
        return
    if out is None:
        raise UsageError(None, "OUT is missing, the folder for the checkpoint: ckptools create run")
    Ending.with_torch = is_a_rank()  # torch sometimes aborts if its threads outlive a rank's main thread
    created = training.create(options, verbose=True)
    if created.rank == 0:
        _tell(created)


def _show_backends() -> None:
    from ckptools.display.tables import Column, table
    from ckptools.training import backends

    machine = backends.of_this_machine()
    columns = (Column("backend"), Column("here"), Column("for what, or why not"))
    show("\n".join([*table(columns, backends.rows(machine)), backends.default_in_words(machine)]))


def _tell(created: Created) -> None:
    """Print the saved files and, on stderr, commands to use them."""
    kinds = fold([path.relative_to(created.out).as_posix() for path in created.files])
    if len(kinds) > 3:
        saved = f"{len(created.files)} files in {created.out}: {', '.join(kinds)}"
    else:
        saved = ", ".join(f"{created.out}/{kind}" for kind in kinds)
    nbytes = f"{created.nbytes / 2**20:.1f} MiB" if created.nbytes < 2**30 else size(created.nbytes)
    show(f"saved {saved} ({nbytes})")
    if created.damage:
        _tell_damage(created)
    else:
        remark(f"try: ckptools inspect {created.first}")


def _tell_damage(created: Created) -> None:
    """Print the deliberate damage and, on stderr, the command that shows it."""
    from ckptools.display.tables import Column, table

    columns = (Column("broken"), Column("file"), Column("what"), Column("verify shows"))
    show("\n".join(table(columns, [(str(b.asked), b.files, b.what, b.seen) for b in created.damage])))
    values = " --values" if any(b.asked.kind == "nan" for b in created.damage) else ""
    remark(f"try: ckptools verify {created.left} --deep{values}")


def fold(names: list[str]) -> list[str]:
    """Fold names that differ only in numbers into one: `ep0-ba5-rank{0..3}.pt`, `__{0..1}_{0..3}.distcp`."""
    kinds: dict[str, list[list[str]]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub("\0", name), []).append(_NUMBER.findall(name))
    return [_with_numbers(kind, numbers) for kind, numbers in kinds.items()]


def _with_numbers(kind: str, numbers: list[list[str]]) -> str:
    """Put the numbers of all names between the parts that the names share."""
    first, *others = kind.split("\0")
    places = [sorted(set(place), key=int) for place in zip(*numbers, strict=True)]
    return first + "".join(_from_to(place) + part for place, part in zip(places, others, strict=True))


def _from_to(numbers: list[str]) -> str:
    first, last, count = numbers[0], numbers[-1], len(numbers)
    if count == 1:
        return first
    if int(last) - int(first) < count:
        return f"{{{first}..{last}}}"
    return f"{{{','.join(numbers)}}}" if count < FEW else f"{{{first}..{last}: {count} of them}}"


# Variables of torch's launcher about its rendezvous; printed, but not interpreted.
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


def explain(variables: Variables, place: ProcessInfo) -> str:
    """Explain which variables launchers and schedulers have set, the rank that follows, and missing variables."""
    return "\n".join([*_found(variables), *_follows(place)])


def _found(variables: Variables) -> Iterator[str]:
    found = [name for name in (*READ, *_MORE) if name in variables]
    yield "found:" if found else "found: no variable of a launcher or scheduler"
    yield from _columns((name, variables[name]) for name in found)


def _follows(place: ProcessInfo) -> Iterator[str]:
    if place.starter is None:
        where = " in a SLURM job" if place.job else ""
        yield f"follows: nothing started this process as a rank{where}; ckptools create starts the ranks itself"
        return
    yield f"follows: this process is a rank that {place.starter} started"
    known = [name for name in _MEANING if name in place.facts]
    rows = [(name, place.facts[name].value, _MEANING[name], f"from {place.facts[name].source}") for name in known]
    yield from _columns(rows)
    yield "missing: " + (", ".join(place.missing) or f"nothing; torch needs {', '.join(NEEDED)}")


def _columns(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
