"""Print `--version`, and with `-v` further facts for a bug report."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

from ckptools._version import __version__

MAIN = ("torch", "numpy", "safetensors")
OTHERS = (
    "typer", "click", "tabulate", "isal", "zstandard", "lz4", "pyyaml", "fsspec", "aiohttp", "huggingface_hub",
    "obstore",
)  # fmt: skip


def version_line() -> str:
    """List the versions of ckptools, Python and the most important libraries in one line."""
    return ", ".join([f"ckptools {__version__}", f"Python {platform.python_version()}", *_installed(MAIN)])


def version_report() -> str:
    """List versions, machine, terminal and settings, a line each; nothing in it identifies the user or the machine."""
    machine = " ".join((platform.system(), platform.release(), platform.machine(), *platform.libc_ver())).rstrip()
    stream = f"{sys.stdout.encoding}, {'a terminal' if sys.stdout.isatty() else 'no terminal'}"
    settings = sorted(
        name for name in os.environ if name.startswith("CKPTOOLS_") or name in ("NO_COLOR", "FORCE_COLOR")
    )
    lines = [
        f"ckptools {__version__}",
        f"{platform.python_implementation()} {platform.python_version()}",
        machine,
        f"{os.cpu_count()} processors",
        f"output: {stream}; TERM {os.environ.get('TERM', 'not set')}",
        f"set: {', '.join(settings) or 'nothing'}",
        *_installed((*MAIN, *OTHERS)),
    ]
    return "\n".join(lines)


def _installed(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"no {name}"
