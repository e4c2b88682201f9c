"""Kills consolidate at random moments, again and again, and says what each kill left; run as a script of its own.

    python -m tests.consolidate.crashes SOURCE OUT TIMES

Each run is a fork of this process, which has no threads and has imported everything, so that a kill meets the work and
not the start of Python.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import ckptools
from ckptools.consolidate.publishing import publish, read_back  # noqa: F401 - imported here, and not in every fork


def main(source: Path, out: Path, times: int) -> None:
    random.seed(str(out.suffix))
    ckptools.consolidate(source, out.with_name(f"whole{out.suffix}"))  # imports what is imported late
    started = time.perf_counter()
    os.waitpid(start(source, out), 0)
    early, late = 0.0, time.perf_counter() - started
    expected = content(out)
    told = {"midway": 0, "before": 0, "done": 0, "wrong": 0}
    for _ in range(times):
        remove(out)
        child = start(source, out)
        time.sleep(random.uniform(early, late))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if out.exists():
            left = "done" if content(out) == expected else "wrong"
        else:
            left = "midway" if leftovers(out) else "before"
        told[left] += 1
        # How long a run takes changes with what else the machine does: the span follows the work, and grows within it.
        span = late - early
        early = early + span / 10 if left == "before" else early * 0.95
        late = late - span / 10 if left == "done" else late * 1.05
    print(json.dumps(told))


def start(source: Path, out: Path) -> int:
    child = os.fork()
    if child:
        return child
    ckptools.consolidate(source, out)
    os._exit(0)


def content(out: Path) -> dict[str, bytes]:
    files = sorted(out.iterdir()) if out.is_dir() else [out]
    return {f.name: f.read_bytes() for f in files}


def leftovers(out: Path) -> list[Path]:
    return [p for p in out.parent.iterdir() if p.name.startswith(f".{out.name}")]


def remove(out: Path) -> None:
    for path in (*leftovers(out), out):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
