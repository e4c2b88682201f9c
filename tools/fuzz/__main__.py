"""`make fuzz`: coverage-guided fuzzing of everything that reads a stranger's bytes, for a given time.

    python -m tools.fuzz --seconds 3600

Each target runs in a process of its own. Inputs that found new code are kept in `.fuzz/<target>` and used again next
time; an input that fails is written there as `crash-…`, `timeout-…` or `oom-…`, and its command is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(".fuzz")
SLOWEST = 10
"""Seconds that one input may take."""
MOST_MEMORY = 1024
"""MiB that the process may take."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz")
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together")
    parser.add_argument("--jobs", type=int, default=2, help="targets that run at once")
    parser.add_argument("--target", action="append", help="one of them; default: all")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        return run(options.run)
    from tools.fuzz.targets import TARGETS

    names = options.target or list(TARGETS)
    each = max(options.seconds * min(options.jobs, len(names)) // len(names), 1)
    waiting, running, failed = list(names), [], []
    started = time.monotonic()
    while waiting or running:
        while waiting and len(running) < options.jobs:
            running.append((waiting[0], start(waiting.pop(0), each)))
        for name, process in list(running):
            if process.poll() is not None:
                running.remove((name, process))
                failed += [name] if process.returncode else []
                print(f"{name}: {told(name)}{', FAILED' if process.returncode else ''}")
        time.sleep(0.5)
    print(f"{len(names)} targets, {time.monotonic() - started:.0f} s, {len(failed)} with findings")
    return 1 if failed else 0


def start(name: str, seconds: int) -> subprocess.Popen[bytes]:
    """Start one target over its seeds and what earlier runs found."""
    from tools.fuzz.targets import seeds

    corpus = HERE / name / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for data in seeds(name):
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    limits = [f"-timeout={SLOWEST}", f"-rss_limit_mb={MOST_MEMORY}", f"-max_total_time={seconds}", "-max_len=65536"]
    command = [
        sys.executable,
        "-m",
        "tools.fuzz",
        "--run",
        name,
        str(corpus),
        f"-artifact_prefix={HERE / name}/",
        *limits,
    ]
    return subprocess.Popen(command, stderr=(HERE / name / "log").open("wb"))


def told(name: str) -> str:
    """The last line of a target's log that says how far it came."""
    lines = (HERE / name / "log").read_text(errors="replace").splitlines()
    found = [line for line in lines if line.startswith(("#", "stat::")) and "cov:" in line]
    done = [line for line in lines if line.startswith("Done")]
    return "; ".join([*(found[-1:] or ["no progress"]), *done[-1:]])


def run(arguments: list[str]) -> int:
    """Fuzz one target in this process, until its time is up."""
    import atheris

    with atheris.instrument_imports(include=["ckptools"]):
        from tools.fuzz.targets import TARGETS
    target, _ = TARGETS[arguments[0]]
    atheris.Setup([arguments[0], *arguments[1:]], target)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
