"""`make repeat TIMES=10`: runs that meet, die and go on, so many times; do they end as one that nothing happened to?

What two processes do at the same time may go well nine times. Each run has to write the bits of the undisturbed one,
leave no process behind and its port free.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckptools.display.tables import Column, table
from ckptools.training import output
from tests.training.started import finish, free_port, is_free, start
from tests.training.test_command import leftovers
from tools.demo import same, tensors

SMALL = ("--vocab", 31, "--width", 20, "--layers", 1, "--context", 7, "--batch", 128)
STEPS = 6
RUN = (*SMALL, "--steps", STEPS, "--full", "--save-every", 2)
TWO = ("--world-size", 2)
NODES = ("--nproc-per-node", 1, "--nnodes", 2)
DISTURBED = ("--kill", "1:5", "--max-restarts", 1)


@dataclass(frozen=True)
class Case:
    """One thing that is repeated.

    Attributes:
        strategy: of the run, with its layout.
        begun: options of a run that is made once, and gone on from each time; none for a run from the start.
        commands: options of each of the commands that make the run together.
        exact: the layout holds all that a run depends on, so it ends as if it had never stopped. Otherwise all
            times have to end like the first.
    """

    name: str
    strategy: tuple[str, ...]
    commands: tuple[tuple[object, ...], ...] = (TWO,)
    begun: tuple[object, ...] = ()
    exact: bool = True


def going_on(strategy: str, layout: str, exact: bool = True) -> Case:
    name = f"resumed by hand, {strategy} in {layout}"
    return Case(name, ("--strategy", strategy, "--layout", layout), begun=("--steps", 4), exact=exact)


def two_nodes(backend: str, *numbered: tuple[object, ...]) -> Case:
    commands = tuple((*NODES, "--rdzv-backend", backend, *own) for own in numbered)
    return Case(f"two equal nodes, {backend}", ("--strategy", "fsdp1"), commands)


def killed(strategy: str, layout: str) -> Case:
    name = f"a rank killed and all started again, {strategy} in {layout}"
    return Case(name, ("--strategy", strategy, "--layout", layout), ((*TWO, *DISTURBED),))


CASES = (
    going_on("ddp", "composer"),
    going_on("ddp", "snapshot", exact=False),
    going_on("fsdp1", "composer"),
    going_on("fsdp2", "dcp"),
    two_nodes("static", ("--node-rank", 0), ("--node-rank", 1)),
    two_nodes("c10d", ("--rdzv-id", "a"), ("--rdzv-id", "a")),
    Case("started by spawn", ("--strategy", "fsdp1"), ((*TWO, "--launcher", "spawn"),)),
    killed("fsdp2", "composer"),
    killed("fsdp1", "dcp"),
    killed("ddp", "composer"),
)


@dataclass
class Place:
    """A folder for all runs; the undisturbed ones and the begun ones are made once.

    Attributes:
        references: the folder of what all times must end like, by strategy and layout.
    """

    folder: Path
    references: dict[tuple[str, ...], Path] = field(default_factory=dict)

    def once(self, name: str, *options: object) -> Path:
        """The folder of a run that nothing happens to."""
        out = self.folder / name.replace(" ", "-").replace(",", "")
        if not out.exists():
            [(code, _, said)] = finish([start(out, *RUN, *options)])
            if code:
                raise SystemExit(f"{name}: {said}")
        return out

    def reference(self, case: Case) -> Path | None:
        """What this case must end like; None where that is yet to be made, by its first time."""
        if case.exact:
            self.references[case.strategy] = self.once(f"undisturbed {case.strategy}", *case.strategy, *TWO)
        return self.references.get(case.strategy)


def wrong(case: Case, place: Place) -> Iterator[str]:
    """Do it once; what was not as it should be."""
    expected = place.reference(case)
    begun = place.once(f"begun {case.name}", *case.strategy, *TWO, *case.begun) if case.begun else None
    with tempfile.TemporaryDirectory(dir=place.folder) as scratch:
        out, port = Path(scratch, "run"), free_port()
        at = ("--rdzv-endpoint", f"localhost:{port}") if len(case.commands) > 1 else ()
        on = ("--resume", begun) if begun else ()
        ended = finish([start(out, *RUN, *case.strategy, *own, *at, *on) for own in case.commands])
        yield from (f"exit code {code}: {said.strip()}" for code, _, said in ended if code)
        if leftovers(scratch):
            yield f"processes left: {leftovers(scratch)}"
        if not is_free(port):
            yield f"port {port} is still taken"
        if any(code for code, _, _ in ended):
            return
        if expected is None:
            place.references[case.strategy] = expected = Path(shutil.copytree(out, place.folder / "first"))
        yield from different(out, expected)


def different(out: Path, expected: Path) -> Iterator[str]:
    """How a run ended otherwise than another: in the model, the optimizer or the losses."""
    one, other = (dict(tensors(torch.load(folder / "full.pt"))) for folder in (out, expected))
    if not other or one.keys() != other.keys():
        yield "other tensors"
    yield from (f"{name}: other bits" for name in one.keys() & other.keys() if not same(one[name], other[name]))
    if losses_of(out) != losses_of(expected):
        yield f"other losses: {losses_of(out)}, not {losses_of(expected)}"


def losses_of(out: Path) -> list[float]:
    """Losses of all steps; a run that goes on from one of several folders keeps them beside its newest checkpoint."""
    files = sorted(out.rglob(output.LOSSES), key=lambda path: len(path.read_text()))
    return output.read_losses(files[-1].parent, STEPS) if files else []


def repeat(case: Case, place: Place, times: int, say: Callable[[str], Any]) -> tuple[str, str, str]:
    """Do it so many times; a row of the table."""
    good, begin = 0, time.monotonic()
    for _ in range(times):
        faults = list(wrong(case, place))
        good += not faults
        for fault in faults:
            say(f"{case.name}: {fault}\n")
    row = (case.name, f"{good} of {times}", f"{(time.monotonic() - begin) / times:.0f} s")
    say(f"{'  '.join(row)}\n")
    return row


def main() -> None:
    """Repeat every case whose name has a word in it; the exit code says whether all went well."""
    parser = argparse.ArgumentParser(prog="python -m tools.repeated", description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("word", nargs="?", default="", help="only the cases whose names have it")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.word in case.name]
    with tempfile.TemporaryDirectory(prefix="repeated-") as folder:
        rows = [repeat(case, Place(Path(folder)), options.times, sys.stderr.write) for case in chosen]
    titles = ("what", "as the undisturbed run", "each")
    sys.stdout.write("\n".join(table([Column(title) for title in titles], rows)) + "\n")
    sys.exit(not chosen or any(row[1] != f"{options.times} of {options.times}" for row in rows))


if __name__ == "__main__":
    main()
