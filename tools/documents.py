"""Run the commands of a document and hold their output against what it shows.

A block that starts with three backticks and `python title="go_on.py"` is a file of that name, which is written into the
folder first. A block that starts with three backticks and `console` has lines `$ command`, each followed by what it
prints, stdout and stderr as a terminal shows them. Blocks are run in order in one folder. What differs from run to run
(times, dates, process numbers) is masked on both sides; a line `…` stands for any lines.

`CKPTOOLS_REWRITE_GOLDEN=1 pytest tests/test_documents.py -k diff` writes what the commands of `docs/diff.md` print now
below those that disagree; then read the diff.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from multiprocessing.process import BaseProcess
from pathlib import Path

from ckptools.__main__ import main
from tests.training.forked import forkserver, run_ranks

DOCS = Path(__file__).parent.parent / "docs"
TRAINING = DOCS / "create.md"

Mask = tuple[str, str | Callable[[re.Match[str]], str]]

MASKS: tuple[Mask, ...] = (
    # A cell that is wider than the screen goes on below; where it is cut depends on the times in it.
    (r"\n {30,}(?=\S)", " "),
    # Of files that were written in one second one time is told, of others two.
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d( \.\. (\d\d\d\d-\d\d-\d\d )?\d\d:\d\d:\d\d)?", "DATE"),
    (r"\d{4}-\d\d-\d\d\b", "DAY"),
    (r"\b\d\d:\d\d:\d\d\b", "CLOCK"),
    (r"\b\d+(\.\d+)? m?s\b", "TIME"),
    (r", written within TIME", ""),  # said of files that were not written in one second
    (r"\b\d+(\.\d+)? [KMG]iB/s\b", "SPEED"),
    (r"(?<=loss )\d+\.\d+", "LOSS"),
    (r"(?<=norm )\d+\.\d+", "NORM"),
    (r"\b\d+\.\d+\.\d+\+\w+", "TORCH"),
    # Where a record lies depends on how long the numbers of a training's times are.
    (r"(\bdata/\d+ +)\d+", r"\1OFFSET"),
    (r'"offset": \d+', "OFFSET"),
    # The last digits of trained weights, and so their checksums, are those of one processor.
    (r"-?\b\d+\.\d{5,}(e-?\d+)?\b", lambda number: f"{float(number[0]):.4g}"),
    (r"(\bdata/\d+ +OFFSET +[\d.]+ [KMG]?i?B +)[0-9a-f]{8}\b", r"\1CRC"),
    (r"(CRC-32 is |, expected |\"crc\": \")[0-9a-f]{8}\b", r"\1CRC"),
    (r"\bbyte \d+|\b\d+ of \d+ bytes", "BYTES"),
    (r" +", " "),
    (r"--+", "--"),
)


@dataclass(frozen=True)
class Step:
    """A command of a document, and what the document says that it prints, which begins at the character `at`."""

    line: int
    command: str
    shown: str
    at: int = 0


def steps(text: str) -> Iterator[Step]:
    """Yield the commands of a document's console blocks in order."""
    for block in re.finditer(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        before = text.count("\n", 0, block.start(1)) + 1
        for command in re.finditer(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block[1], re.MULTILINE):
            line = before + block[1].count("\n", 0, command.start())
            yield Step(line, command[1], command[2], block.start(1) + command.start(2))


def files(text: str) -> dict[str, str]:
    """The files that a document shows, by their names."""
    return dict(re.findall(r'^```python title="(.+?)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL))


def printed_otherwise(guide: Path, folder: Path) -> list[str]:
    """The commands of a guide that print something else than it shows, each with its place and what it printed.

    Raises:
        ValueError: the guide has no commands.
    """
    text = guide.read_text()
    found = list(steps(text))
    if not found:
        raise ValueError(f"{guide.name} has no commands")
    for name, content in files(text).items():
        (folder / name).write_text(content)
    printed = [(step, run(step, folder)) for step in found]
    wrong = [(step, out) for step, out in printed if not agrees(step.shown, out)]
    if os.environ.get("CKPTOOLS_REWRITE_GOLDEN"):
        guide.write_text(rewritten(text, wrong))
        return []
    return [f"{guide.name}:{step.line}: $ {step.command}\n{out}" for step, out in wrong]


def rewritten(text: str, printed: Sequence[tuple[Step, str]]) -> str:
    """A guide with what some of its commands print now; a line `…` goes on standing for lines between its neighbours.

    Empty lines at the end of an output are left out.
    """
    for step, out in sorted(printed, key=lambda pair: -pair[0].at):
        lines = _abridged(step.shown.splitlines(), [line.rstrip() for line in out.rstrip().splitlines()])
        text = text[: step.at] + "".join(f"{line}\n" for line in lines) + text[step.at + len(step.shown) :]
    return text


def _abridged(shown: Sequence[str], printed: Sequence[str]) -> Iterator[str]:
    """The lines printed, with `…` in place of those for which it stands among the lines shown."""
    alike = [[" ".join(masked(line)) for line in lines] for lines in (shown, printed)]
    for _, start, end, first, last in SequenceMatcher(None, *alike, autojunk=False).get_opcodes():
        old, new = list(shown[start:end]), printed[first:last]
        if "…" not in old:
            yield from new
            continue
        before, after = old.index("…"), old[::-1].index("…")
        kept = min(before, len(new))
        last = max(len(new) - after, kept)
        yield from (*new[:kept], "…")
        yield from _between(old[before + 1 : len(old) - after], new[kept:last])
        yield from new[last:] if after else ()


def _between(shown: Sequence[str], printed: Sequence[str]) -> Iterator[str]:
    """The lines printed that are most like each group of lines shown, a group being followed by `…`."""
    while "…" in shown:
        group, shown = shown[: shown.index("…")], shown[shown.index("…") + 1 :]
        if group and printed:
            first = _most_like(group[0], printed)
            last = max(first, first + _most_like(group[-1], printed[first:]))
            yield from (*printed[first : last + 1], "…")
            printed = printed[last + 1 :]


def _most_like(line: str, lines: Sequence[str]) -> int:
    likeness = [SequenceMatcher(None, *(" ".join(masked(one)) for one in (line, other))).ratio() for other in lines]
    return max(range(len(lines)), key=likeness.__getitem__)


def run(step: Step, folder: Path) -> str:
    """Run a command as a reader would, and return all that a terminal would show."""
    command = step.command.replace("\\\n", " ").removesuffix(_ASKS)
    if not command.startswith("ckptools ") or _SHELL.search(_QUOTED.sub("", command)) or _LAUNCHED.search(command):
        return _run(step.command, folder)
    if command != step.command.replace("\\\n", " "):
        shown, code = _forked(command, folder)
        return f"{shown}exit code {code}\n"
    if command.startswith("ckptools create "):
        make = _trained if "--resume" in command else _created
        return make(command, folder)
    return _forked(command, folder)[0]


_ASKS = '; echo "exit code $?"'
_QUOTED = re.compile(r"'[^']*'")
_SHELL = re.compile(r"""[|&;<>$`"*?~{\[]""")
"""What only a shell understands, outside of quotes."""

_FORKED = re.compile(r"ckptools create \S+ .*--world-size (\d+)")
_LAUNCHED = re.compile(r"--max-restarts|--kill|--nnodes|--break .*(stale|mixed-run)|^ckptools shell")
"""What needs a process of its own: to start ranks again, to end them, to train another run, to be `__main__`."""

WIDTH = 80
"""Columns of the terminal that guides show."""
SECONDS = 250
"""At most so long takes a command."""

_PROGRESS = re.compile(r"(?:\r\x1b\[K[^\r\n]*)*\r\x1b\[K")
"""A line of progress that was drawn again and again, up to where it was erased."""

_RUNS: dict[str, tuple[Path, str]] = {}
"""By command: the folder that a training filled, and what it printed. Pages that begin with the same one share it."""


def _created(command: str, folder: Path) -> str:
    """What a training prints; the second time, its folder is copied with all its times."""
    name = command.split()[2]
    if command in _RUNS and not (folder / name).exists():
        kept, printed = _RUNS[command]
        _copy(kept, folder / name)
        return printed
    printed = _trained(command, folder)
    if (folder / name).is_dir() and command not in _RUNS:
        kept = Path(tempfile.mkdtemp(dir=folder.parent)) / name
        _copy(folder / name, kept)
        _RUNS[command] = kept, printed
    return printed


def _trained(command: str, folder: Path) -> str:
    """What a training prints, by ranks that are forks where they can be: starting them takes longer than all else."""
    asked = _FORKED.match(command)
    if not asked:
        return _forked(command, folder)[0]
    file = Path(tempfile.mkdtemp(dir=folder.parent)) / "printed"
    run_ranks(int(asked[1]), _be_a_rank, command, folder, file)
    return file.read_text()


def _be_a_rank(command: str, folder: Path, printed: Path) -> None:
    """Be one rank of a command, as inside of torchrun, where rank 0 speaks for all."""
    os.chdir(folder)
    os.environ |= _environment(folder)
    with printed.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = shlex.split(command)
    main()


def _copy(folder: Path, to: Path) -> None:
    """Copy a folder with all its times, and with the holes in its files: some of them are larger than the disk."""
    subprocess.run(["cp", "-a", "--sparse=auto", folder, to], check=True)


def _environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "COLUMNS": str(WIDTH), "TMPDIR": str(folder), "NO_COLOR": "1"}


def _forked(command: str, folder: Path) -> tuple[str, int | None]:
    """Run a command of ckptools in a fork of the server that ranks are forks of; what it shows, and its exit code."""
    ours, its = os.openpty()
    environment = os.environ | _environment(folder)
    words = shlex.split(command), folder, dict(environment), os.ttyname(its)
    process = forkserver().Process(target=_be_a_command, args=words, daemon=True)
    process.start()
    threading.Thread(target=_close_after, args=(process, its)).start()
    return _shown(ours, process.kill), process.exitcode


def _close_after(process: BaseProcess, terminal: int) -> None:
    process.join()
    os.close(terminal)


def _be_a_command(words: list[str], folder: Path, environment: dict[str, str], terminal: str) -> None:
    """Be a command on a terminal, as if a shell had started it."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = words
    main()


def _run(command: str, folder: Path) -> str:
    """Run a command line on a terminal of `WIDTH` columns, and return what stays on it."""
    ours, its = os.openpty()
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | _environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=its,
        stderr=its,
    )
    os.close(its)
    try:
        return _shown(ours, process.kill)
    finally:
        process.wait()


def _shown(terminal: int, kill: Callable[[], None]) -> str:
    """What stays on a terminal when the last process on it has ended; it is killed after `SECONDS`."""
    watch = threading.Timer(SECONDS, kill)
    watch.start()
    try:
        shown = b"".join(iter(lambda: _read(terminal), b"")).decode()
    finally:
        os.close(terminal)
        watch.cancel()
    return _PROGRESS.sub("", shown.replace("\r\n", "\n")).expandtabs()


def _read(terminal: int) -> bytes:
    """Some of what was written to a terminal; nothing once its last process has ended, which Linux calls an error."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def masked(text: str) -> list[str]:
    """Lines without what differs from run to run, and without empty ones."""
    for pattern, word in MASKS:
        text = re.sub(pattern, word, text)
    return [line.strip() for line in text.splitlines() if line.strip()]


def agrees(shown: str, printed: str) -> bool:
    """Whether a command printed what the document shows; `…` in it stands for any lines."""
    pattern = "".join(r"(.*\n)*?" if line == "…" else re.escape(line) + r"\n" for line in masked(shown))
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in masked(printed))) is not None
