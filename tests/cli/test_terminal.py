"""What a real terminal gets: the palette's own escapes and no others, and none of them as text."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptools.display.screen import SGR

HOSTILE = "evil\x1b[35m\x1b]0;owned\x07\u202e"
"""Magenta, which the palette does not have, the title of a window, and text from right to left."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which a file is lost, whose names would act on a terminal."""
    folder = tmp_path_factory.mktemp("broken")
    save_file({f"{HOSTILE}.weight": torch.ones(3)}, folder / "model-00001-of-00002.safetensors")
    lost = {f"{HOSTILE}.bias": f"model-00002-of-00002{HOSTILE}.safetensors"}
    here = {f"{HOSTILE}.weight": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": here | lost}))
    return folder


def on_a_terminal(folder: Path, line: str) -> str:
    """What a command prints on a terminal that is no pipe."""
    ours, its = os.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "ckptools", *line.split()]
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=its, stderr=its)
    os.close(its)
    shown = bytearray()
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # Linux's way to say that nobody writes there any more
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    process.wait()
    return shown.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "consolidate . -o out.safetensors", "inspect .", "verify .", "doctor .", "ls .", "tree .", "stats .",
        "diff . . --values", "match . --to .", "show . missing", "report . -o page.html",
    ],
    ids=lambda line: line.split()[0],
)  # fmt: skip
def test_a_terminal_gets_colours_as_colours_and_the_names_of_a_file_as_text(line, broken):
    shown = on_a_terminal(broken, line)
    assert "Traceback" not in shown and "\u202e" not in shown and "\x07" not in shown
    escapes = set(re.findall(r"\x1b(?:\[([\d;]*)m)?", re.sub(r"\r\x1b\[K", "", shown)))
    assert escapes <= {"0", *SGR.values()}
    assert [code for code in ("0", *SGR.values()) if f"\\x1b[{code}m" in shown] == []


@pytest.mark.slow
def test_the_codes_of_a_refusal_are_painted(broken):
    shown = on_a_terminal(broken, "consolidate . -o out.safetensors")
    assert f"\x1b[{SGR['bad']}merror\x1b[0m: " in shown
    assert re.search(rf"\x1b\[{SGR['bad']}mCK\d\d\d\x1b\[0m", shown)


@pytest.mark.slow
def test_an_error_wraps_between_words_and_its_command_can_be_copied(tmp_path):
    for name in ("first", "second"):
        torch.save({"model": {"w": torch.ones(2)}}, tmp_path / f"{name}_{'of_a_long_name' * 2}.pt")
    shown = on_a_terminal(tmp_path, f"tree {tmp_path}").split("\r\x1b[K")[-1]
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()
    assert len(lines) > 2 and all(len(line) <= 100 or "ckptools ls" in line for line in lines)
    assert any(f"ckptools ls {tmp_path}" in line for line in lines)
    assert lines[0].startswith("error: ") and all(line.startswith(" " * len("error: ")) for line in lines[1:])
