"""`python -m tools.browse_recording docs`: the pictures and the recording of the page of `browse`.

Pictures are what textual draws of its own screen. The recording is what a real terminal gets, as an asciicast, with the
seconds of the script instead of those of the machine. Source: docs.asciinema.org/manual/asciicast/v2.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from tests.browse.driven import Driven, drive
from tests.browse.terminal import Terminal
from tests.truth import FIXTURES

RANKS = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"

PICTURES = {
    "browse-overview": (),
    "browse-ranks": ("enter",),
    "browse-keys": ("slash", *"up.w", "enter", "f"),
}
"""Names of the pictures, and the keys that lead to each."""

RECORDED = ("\r", "\x1b[C", "2", "/", "up.w", "\r", "f", "y", "q")

SECONDS = 0.8
"""Between two keys of the recording."""


def broken(folder: Path) -> Path:
    """Four ranks, of which one was cut and one is missing."""
    folder.mkdir()
    for rank in range(3):
        shutil.copy(RANKS / f"rank{rank}.pt", folder)
    cut = folder / "rank2.pt"
    cut.write_bytes(cut.read_bytes()[:40_000])
    return folder


def picture(path: str, out: Path, keys: tuple[str, ...]) -> None:
    """Save the screen after some keys, with the fonts of its reader: it needs no network."""

    async def script(driven: Driven) -> None:
        await driven.press(*keys)
        svg = driven.app.export_screenshot(title="ckptools browse", simplify=True)
        out.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))

    drive(path, script)


def recording(path: str, out: Path) -> None:
    """Record a real process in a terminal of 80 columns and 24 rows."""
    with Terminal(["browse", path], TERM="xterm-256color") as terminal:
        terminal.until(b"rank 3 missing")
        events, seen = [[0.0, "o", terminal.text()]], len(terminal.output)
        for number, key in enumerate(RECORDED):
            terminal.press(key)
            if key == "f":
                terminal.until(b"rms ")
            events.append([round(SECONDS * (number + 1), 1), "o", terminal.text(seen)])
            seen = len(terminal.output)
        assert terminal.ended() == 0
    head = {"version": 2, "width": 80, "height": 24, "title": "ckptools browse"}
    out.write_text("\n".join(json.dumps(line) for line in (head, *events)) + "\n")


def main(folder: Path) -> None:
    """Write all of them."""
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        broken(Path("run7"))
        for name, keys in PICTURES.items():
            picture("run7", folder / f"{name}.svg", keys)
        recording("run7", folder / "browse.cast")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
