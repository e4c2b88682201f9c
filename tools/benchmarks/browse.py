"""The first screen of `browse` beside `inspect`, and how long a key waits while the other ranks are read."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.browse.terminal import Terminal
from tools.benchmarks.measure import run, table_as_measured
from tools.benchmarks.scale import CKPTOOLS, SHAPES, hollow

WORLD = 1024
TIMES = 5
"""How often each is started, in turn; the median counts."""

LOOK = """
import asyncio, gc, json, sys, time
from ckptools.cli.commands.browse import SWITCH_SECONDS
from ckptools.browse.app import Browser
sys.setswitchinterval(SWITCH_SECONDS)
gc.set_threshold(1_000_000)  # as the command does
async def look():
    app = Browser(sys.argv[1])
    waits, reading = [], 0
    async with app.run_test(size=(80, 24)) as pilot:
        while not app.first_screen:
            await asyncio.sleep(0.002)
        await pilot.press("6")
        while len(waits) < 60 or "reads every rank" in app.jobs.running:
            before, begun = app.left.cursor, time.perf_counter()
            app.simulate_key("down" if len(waits) % 30 < 29 else "home")
            while app.left.cursor == before and time.perf_counter() < begun + 5:
                await asyncio.sleep(0)
            app.screen._compositor.render_strips()
            waits.append(time.perf_counter() - begun)
            reading += "reads every rank" in app.jobs.running
            await asyncio.sleep(0.02)
    print(json.dumps({"waits": waits, "reading": reading}))
asyncio.run(look())
"""


def make(work: Path) -> None:
    """Write the world if it is not there yet."""
    shapes = work / "shapes.json"
    shapes.write_text(json.dumps(SHAPES))
    hollow(work / f"world-{WORLD}", WORLD, str(shapes))


def report(work: Path) -> Iterator[str]:
    """A table of the first screen, and a line about the keys."""
    folder = str(work / f"world-{WORLD}")
    ours, theirs, waits, reading = [], [], [], 0
    for _ in range(TIMES):
        theirs.append(run([*CKPTOOLS, "inspect", folder]))
        ours.append(first_screen(folder))
        found = look(folder)
        waits += found["waits"]
        reading += found["reading"]
    middle = TIMES // 2
    seconds, cpu = (sorted(one)[middle] for one in zip(*ours, strict=True))
    wall = sorted(one.seconds for one in theirs)[middle]
    used = sorted(one.cpu for one in theirs)[middle]
    titles = (f"{WORLD} ranks of 200 tensors", "seconds", "processor", "x inspect")
    rows = [
        ["inspect", f"{wall:.2f} s", f"{used:.2f} s", "1.00"],
        ["browse, first screen", f"{seconds:.2f} s", f"{cpu:.2f} s", f"{seconds / wall:.2f}, {cpu / used:.2f}"],
    ]
    yield from table_as_measured(titles, rows)
    waits.sort()
    half, most, last = (1000 * waits[int(len(waits) * part)] for part in (0.5, 0.95, 0.9999))
    while_reading = f"{len(waits)} keys, {reading} of them while it read"
    yield f"{while_reading}: median {half:.0f} ms, 95% {most:.0f} ms, at most {last:.0f} ms"


def first_screen(folder: str) -> tuple[float, float]:
    """Start browse in a terminal; seconds until the verdict is there, and those of the processor."""
    begun = time.perf_counter()
    with Terminal(["browse", folder], TERM="xterm-256color") as terminal:
        terminal.seen(b"rank files are here")
        return time.perf_counter() - begun, terminal.processor_seconds()


def look(folder: str) -> dict[str, Any]:
    """Start browse under textual's pilot; seconds that each key took, and how many came while it read."""
    done = subprocess.run([sys.executable, "-c", LOOK, folder], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
