"""`python -m tools.front_picture`: the picture of the README, `doctor` on a broken run beside its report.

Trains a run, damages it, asks `doctor` on a terminal and writes the report; Chromium takes the picture, light and dark.
"""

from __future__ import annotations

import fcntl
import html
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from tools.browser import picture_of

IMAGES = Path(__file__).parent.parent / "docs" / "images"
RUN = "create run7 --strategy fsdp1 --world-size 4 --steps 6 --save-every 3 --break truncate:2,missing:3"
BROKEN = "run7/ep0-ba6-rank0.pt"
WIDTH, HEIGHT, COLUMNS = 1120, 590, 66

PAGE = """<!doctype html><meta charset="utf-8"><style>
body{{margin:0;display:flex;gap:16px;padding:16px;background:{back};width:1088px;height:558px;overflow:hidden}}
pre{{margin:0;padding:14px 16px;width:530px;border-radius:8px;background:{panel};color:{ink};overflow:hidden;
font:12.5px/1.5 ui-monospace,"DejaVu Sans Mono",monospace;border:1px solid {rule};box-sizing:border-box}}
b{{color:{prompt}}} .c31{{color:{bad}}} .c32{{color:{good}}} .c33{{color:{warn}}}
.c2{{opacity:.7}} .c1{{font-weight:bold}}
iframe{{flex:1;border:1px solid {rule};border-radius:8px;zoom:.8;height:670px}}
</style><pre><b>$</b> ckptools doctor {path}
{text}</pre><iframe src="report.html"></iframe>
"""
LIGHT = {"back": "#ffffff", "panel": "#f6f8fa", "ink": "#1f2328", "rule": "#d1d9e0", "prompt": "#6639ba",
         "bad": "#b3261e", "good": "#1b6e33", "warn": "#8a5100"}  # fmt: skip
DARK = {"back": "#0d1117", "panel": "#151b23", "ink": "#e6edf3", "rule": "#3d444d", "prompt": "#bc8cff",
        "bad": "#ff8a80", "good": "#81c995", "warn": "#ffcc66"}  # fmt: skip


def main(images: Path = IMAGES) -> None:
    """Write `doctor-light.png` and `doctor-dark.png`."""
    images.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _ckptools(folder, RUN, 0)
        for path in folder.glob("run7/*"):
            os.utime(path, (1_795_000_000, 1_795_000_000))
        _ckptools(folder, f"report {BROKEN} -o report.html --deep --values", 1)
        text = as_html(on_terminal(folder, ["doctor", BROKEN]))
        for scheme, colours in (("light", LIGHT), ("dark", DARK)):
            page = folder / f"{scheme}.html"
            page.write_text(PAGE.format(text=text, path=BROKEN, **colours))
            picture_of(page, images / f"doctor-{scheme}.png", width=WIDTH, height=HEIGHT, dark=scheme == "dark")


def _ckptools(folder: Path, words: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckptools", *words.split()], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr


def on_terminal(folder: Path, words: list[str]) -> str:
    """What a command shows on a terminal of `COLUMNS` columns, with its colours."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
        os.execv(sys.executable, [sys.executable, "-m", "ckptools", *words])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    shown = bytearray()
    while data := _read(terminal):
        shown += data
    os.waitpid(child, 0)
    return shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux's way to say that the other side has ended
        return b""


def as_html(shown: str) -> str:
    """Text with terminal colours as HTML; what a line was before it was overwritten is gone."""
    lines = (re.split(r"\r(?:\x1b\[K)?", line.rstrip("\r"))[-1] for line in shown.split("\n"))
    text = html.escape("\n".join(lines), quote=False)
    text = re.sub(r"\x1b\[(?:0;)?([\d;]+)m", lambda code: _tag(code[1]), re.sub(r"\x1b\[0?m", "</span>", text))
    return re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", text)


def _tag(codes: str) -> str:
    return "</span>" if codes == "0" else f'<span class="{" ".join(f"c{code}" for code in codes.split(";"))}">'


if __name__ == "__main__":
    main()
