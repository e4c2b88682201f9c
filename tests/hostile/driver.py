"""Runs cases of the corpus through the commands, in one process that is watched; prints one JSON object.

`python -m tests.hostile.driver FOLDER INDEX PARTS` runs every PARTS-th case, beginning with the case of that index.

An audit hook sees every file that Python opens and everything that it starts, for as long as the process lives, so the
watching cannot be switched off by what it watches.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from itertools import islice
from pathlib import Path
from typing import Any

import typer

import ckptools
from ckptools.cli import app
from ckptools.cli.running import BUG_EXIT
from tests.hostile.cases import CASES, TRAP
from tests.memory import forget_peak, peak
from tests.pickles.test_hostile import ACCEPTED

STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "socket.connect")
"""Audit events of starting something."""

OURS = (
    sys.prefix,
    sys.base_prefix,
    str(Path(ckptools.__file__).parent),
    "/dev/null",
    "/proc/self",
    "/usr/share/zoneinfo",
)
"""Where Python finds what it needs itself."""


ADDRESS_SPACE = 6 << 30
"""Bytes; torch alone maps two thirds of them without touching most."""


class Watch:
    """What happened since `begin`.

    Attributes:
        opened: files outside of the case's folder and of Python's own.
        started: what was started or imported.
    """

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self.folder, self.allowed = "", allowed
        self.opened: list[str] = []
        self.started: list[str] = []
        sys.addaudithook(self._see)

    def begin(self, folder: Path) -> None:
        self.folder, self.opened, self.started = str(folder), [], []

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.folder:
            return
        if event in STARTS or (event == "import" and arguments[0] == TRAP):
            self.started.append(f"{event} {arguments[0]}")
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith((self.folder, *self.allowed)):
                self.opened.append(path)


def own_temporary_folder(root: Path) -> None:
    """Compressed files are unpacked where TMPDIR says; let that be inside of what is watched."""
    (root / "tmp").mkdir()
    tempfile.tempdir = str(root / "tmp")


def commands(name: str, path: Path, folder: Path) -> dict[str, list[str]]:
    """What is tried on every case; a bomb, which takes a reader seconds, goes through one door.

    That is the one behind which most happens: what is accepted is written too, and tests of pickles describe it.
    """
    out = folder / "written"
    every = {
        "inspect": ["inspect", str(path), "--all-ranks"],
        "json": ["inspect", str(path), "--json"],
        "show": ["show", str(path), "*"],
        "tree": ["tree", str(path)],
        "verify": ["verify", str(path), "--deep", "--values"],
        "doctor": ["doctor", str(path)],
        "ls": ["ls", str(path if path.is_dir() else path.parent)],
        "stats": ["stats", str(path), "--hist"],
        "match": ["match", str(path), "--to", str(path)],
        "report": ["report", str(path), "-o", str(out / "report.html"), "--values"],
        "diff": ["diff", str(path), str(path), "--every-byte"],
        "consolidate": ["consolidate", str(path), "-o", str(out / "out.pt")],
        "safetensors": ["consolidate", str(path), "-o", str(out / "out.safetensors")],
    }
    if not name.startswith("bomb: "):
        return every
    door = "consolidate" if name.removeprefix("bomb: ") in ACCEPTED else "inspect"
    return {door: every[door]}


COMMAND = typer.main.get_command(app)
"""Made once: to make it anew for every one of some 1,900 calls took a third of all the time."""


def invoked(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command line; 70 for what nobody caught."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            COMMAND.main(arguments, prog_name="ckptools")
        except SystemExit as done:
            code = done.code or 0
        except BaseException:
            traceback.print_exc()
            code = BUG_EXIT
    assert isinstance(code, int)
    return code, *(stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]


def main(root: Path, index: int, parts: int) -> None:
    """Build and run this part's cases below `root`."""
    # A case that would take all of the machine's memory fails alone, and not the machine with it.
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    own_temporary_folder(root)
    watch, told = Watch((str(root / "tmp"), *OURS)), {}
    sys.path.insert(0, str(root))
    (root / f"{TRAP}.py").write_text(
        f"open({str(root / 'ran')!r}, 'w')\ndef run(*a): open({str(root / 'ran')!r}, 'w')\n"
    )
    for number, (name, build) in islice(enumerate(CASES.items()), index, None, parts):
        folder = root / f"case{number}"
        (folder / "written").mkdir(parents=True)
        path = build(folder)
        told[name] = {}
        print(name, file=sys.stderr)
        for command, arguments in commands(name, path, folder).items():
            forget_peak()
            before = peak()
            watch.begin(folder)
            started = time.process_time()  # a machine that has other work to do is no fault of the reader
            code, stdout, stderr = invoked(arguments)
            seconds, watch.folder = time.process_time() - started, ""
            told[name][command] = {
                "code": code,
                "stdout": stdout,
                "stderr": stderr,
                "seconds": seconds,
                "memory_kib": peak() - before,
                "opened": watch.opened,
                "started": watch.started,
                "written": sorted(p.name for p in (folder / "written").iterdir()),
            }
            for left in (folder / "written").iterdir():
                left.unlink()
    print(json.dumps({"cases": told, "ran": (root / "ran").exists() or TRAP in sys.modules}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
