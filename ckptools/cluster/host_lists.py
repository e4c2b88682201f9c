"""Lists of hosts as schedulers write them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

# Hosts are separated by commas, and so are the numbers inside brackets.
_HOST = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_LIST = re.compile(rf"{_HOST.pattern}(?:,{_HOST.pattern})*")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand(text: str) -> list[str]:
    """Expand SLURM's short form: `node[01-03,07],login` names five hosts.

    The form is that of `scontrol show hostnames`; numbers keep their leading zeros, and a name may have several
    brackets.

    Raises:
        ValueError: the text is no such list.
    """
    if not _LIST.fullmatch(text):
        raise ValueError(f"{text!r} is no list of hosts")
    return [host for name in _HOST.findall(text) for host in _expand_name(name)]


def _expand_name(name: str) -> Iterator[str]:
    # Every second piece is what stood between brackets.
    pieces = re.split(r"\[([^\]]*)\]", name)
    choices = [list(_numbers(piece)) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1))


def expand_counts(text: str) -> list[int]:
    """Expand SLURM's tasks per node: `2(x3),1` is 2, 2, 2, 1.

    Raises:
        ValueError: the text is no such list.
    """
    found = [_COUNT.fullmatch(part) for part in text.split(",")]
    if None in found:
        raise ValueError(f"{text!r} is no list of tasks per node")
    return [int(part[1]) for part in found if part for _ in range(int(part[2] or 1))]


def read_node_file(name: str) -> list[str]:
    """Read the file that PBS_NODEFILE names: a host per line, once for each process that it is to have.

    Raises:
        ValueError: it cannot be read, or is empty.
    """
    try:
        hosts = Path(name).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name!r} cannot be read: {error}") from error
    if not hosts:
        raise ValueError(f"{name!r} is empty")
    return hosts
