"""Every command prints of each fixture, sound and damaged, what was last read and found right.

`CKPTOOLS_REWRITE_GOLDEN=1 pytest tests/transcripts` writes them anew; then read the diff.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckptools.cli import app, printing
from ckptools.display.screen import Screen
from tests.damage.damages import damages
from tests.truth import ASKED, KINDS, LOCAL, OWN_BUFFERS, WHOLE, Known, one_of_each_form

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent / "golden"
SAVED = 1_700_000_000
"""When all files of all fixtures were written, as far as the commands can see."""

SOUND = """
inspect PATH
tree PATH
show PATH KEY
stats PATH
verify PATH --deep --values
doctor PATH
consolidate PATH -o out.safetensors --dry-run WRITE
consolidate PATH -o out.pt WRITE
diff PATH out.pt --values
match PATH --to out.pt
ls .
"""
JSON = """
inspect PATH --json --all-ranks
show PATH KEY --json
stats PATH --json
verify PATH --deep --json
doctor PATH --json
diff PATH out.pt --json
match PATH --to out.pt --json
ls . --json
"""
"""Of one fixture for each way of storing a checkpoint."""

DAMAGED = """
inspect PATH --all-ranks
verify PATH --deep --values
verify PATH --json
doctor PATH
ls .
consolidate PATH -o out.pt WRITE
"""

MASKS: tuple[tuple[str, Any], ...] = (
    (r"\b\d+(\.\d+)? m?s\b", "TIME"),
    (r"\b\d+(\.\d+)? [KMGT]?i?B/s\b", "SPEED"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\dZ?( \.\. [\d:]+)?", "DATE"),
    (r'"(seconds|time)": [\d.e-]+', r'"\1": 0'),
    # The last digits of a sum are those of one processor.
    (r"-?\b\d+\.\d{5,}(e-?\d+)?\b", lambda number: f"{float(number[0]):.4g}"),
)


@dataclass(frozen=True)
class Case:
    """A fixture, and the kind of damage that its largest file has suffered, if any."""

    known: Known
    damage: str = ""

    def __str__(self) -> str:
        opened = self.known.path.partition("/")[0]
        part = f"-{opened}" if opened not in ("ckpt", "") and "." not in opened else ""
        return f"{self.known.name}{part}" + (f"-{self.damage.replace(' ', '-')}" if self.damage else "")

    def put(self, folder: Path) -> None:
        """Make a folder with the files of the fixture, all written at one time."""
        shutil.copytree(self.known.folder, folder, ignore=shutil.ignore_patterns("truth*", "HOW.md"))
        if self.damage:
            opened = folder / self.known.path
            below = (opened if opened.is_dir() else opened.parent).rglob("*")
            files = sorted((p for p in below if p.is_file() and p != opened), key=lambda p: (-p.stat().st_size, p))[:2]
            every = list(damages(folder, files))
            damage = next((found for found in every if found.kind == self.damage), every[0])
            for path, data in damage.make().items():
                path.unlink() if data is None else path.write_bytes(data)
        for path in folder.rglob("*"):
            os.utime(path, (SAVED, SAVED))

    def commands(self, asked_for: str = "") -> Iterator[tuple[str, list[str]]]:
        """Yield each command as it is written down, and its words."""
        asked = [(f"--{name}", getattr(self.known, name)) for name in ("shapes", "names") if getattr(self.known, name)]
        lines = DAMAGED if self.damage else SOUND + JSON if self.known in KINDS else SOUND
        for line in filter(None, (asked_for or lines).splitlines()):
            more = [word for pair in asked for word in pair] if "PATH" in line else []
            line = line.replace("WRITE", " ".join(self.known.write_options)).strip()
            words = line.replace("PATH", self.known.path).split()
            yield " ".join([*words, *more]), [self._key() if word == "KEY" else word for word in (*words, *more)]

    def _key(self) -> str:
        keys = [row.name for row in self.known.open().records().rows]
        return keys[len(keys) // 2]


def said(words: list[str]) -> str:
    """What a command prints, stdout before stderr, and its exit code, without what differs from run to run."""
    done = CliRunner().invoke(app, words)
    text = f"{done.stdout}{done.stderr}" + (f"exit code {done.exit_code}\n" if done.exit_code else "")
    for pattern, word in MASKS:
        text = re.sub(pattern, word, text)
    return text


KINDS_OF_DAMAGE = ("deleted", "halved", "one byte short", "flipped", "swapped", "copied")


def kind_of_damage(known: Known) -> str:
    """One kind for each fixture, the same one whatever other fixtures there are."""
    return KINDS_OF_DAMAGE[zlib.crc32(f"{known.name}/{known.path}".encode()) % len(KINDS_OF_DAMAGE)]


CASES = [
    *map(Case, (*WHOLE, *LOCAL, *OWN_BUFFERS, *ASKED)),
    *(Case(known, kind_of_damage(known)) for known in WHOLE if known.world_size > 1),
]


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """File times are shown in the local zone, tables as wide as the terminal."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("COLUMNS", "100")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_command_prints_what_was_found_right(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case.put(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    printed = "\n".join(f"$ ckptools {line}\n{said(words)}" for line, words in case.commands())
    expected = GOLDEN / f"{case}.txt"
    if os.environ.get("CKPTOOLS_REWRITE_GOLDEN"):
        expected.write_text(printed, encoding="utf-8")
    assert printed == expected.read_text(encoding="utf-8")


AT_80 = """
inspect PATH
inspect PATH --section all
tree PATH
tree PATH --expand --private --limit 0
show PATH KEY
show PATH rng
stats PATH --limit 0
stats PATH --hist
verify PATH --deep --values
doctor PATH
consolidate PATH -o out.safetensors --dry-run --copies WRITE
consolidate PATH -o out.pt WRITE
diff PATH out.pt --values
match PATH --to out.pt
ls .
"""
DAMAGED_AT_80 = """
inspect PATH --section all
tree PATH --expand --private --limit 0
show PATH KEY
stats PATH --limit 0
verify PATH --deep --values
doctor PATH
consolidate PATH -o out.safetensors --allow-missing WRITE
match PATH --to PATH
ls .
"""
"""Of each command the form that prints most; sound fixtures have been through the others."""


def too_wide(text: str, width: int) -> list[str]:
    """Lines that are wider than a screen, but for a command to type, and for a word that alone is wider."""
    wide = [line for line in text.splitlines() if len(line) > width]
    return [line for line in wide if "  ckptools " not in line and max(map(len, line.split())) <= width - 30]


AT_80_CASES = [
    *map(Case, KINDS),
    *(Case(known, kind_of_damage(known)) for known in one_of_each_form(WHOLE) if known.world_size > 1),
]


@pytest.mark.parametrize("case", AT_80_CASES, ids=str)
def test_no_line_is_wider_than_a_screen(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fixture of each way of storing a checkpoint, and on a damaged one of each form (`Known.form`)."""
    case.put(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.setattr(printing, "PIPE", Screen(80, 40))
    commands = case.commands(DAMAGED_AT_80 if case.damage else AT_80)
    lines = [(line, CliRunner().invoke(app, words).stdout) for line, words in commands]
    assert {line: too_wide(text, 80) for line, text in lines if too_wide(text, 80)} == {}
    assert not any("\x1b" in text for _, text in lines)


def test_no_line_of_the_formats_is_wider_than_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printing, "PIPE", Screen(80, 40))
    assert too_wide(CliRunner().invoke(app, ["formats"]).stdout, 80) == []
