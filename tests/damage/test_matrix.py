"""Every kind of damage on every fixture: commands end with a verdict, and what is written is the truth or refused."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import ckptools
from ckptools.cli import app
from ckptools.model.tensor import Tensor
from ckptools.model.tree import walk
from tests.damage.damages import Damage, damages
from tests.damage.exceptions import EXCEPTIONS, Unknowable
from tests.truth import ASKED, FIXTURES, LOCAL, WHOLE, Known, one_of_each_form

pytestmark = pytest.mark.slow

ALIKE = 2
"""Files that are damaged of those whose names differ in several numbers only."""

AT_MOST = 8
"""Files that are damaged of one checkpoint."""

EVERY = (*WHOLE, *LOCAL, *ASKED)
OF_ANOTHER = 8
"""Of the damages of a fixture whose form another fixture has, every so-manieth is done."""

FORMS = ("pt", "safetensors")
"""What is written into each when nobody says: everything, or the model."""
MEMORY = Path("/dev/shm")

Content = dict[str, Any]


@dataclass(frozen=True)
class Sound:
    """A copy of a fixture that nothing has happened to yet.

    Attributes:
        folder: where it is.
        path: what a user opens.
        options: what a user says to that.
        write_options: what a user says to `consolidate` beside that.
        files: those that are going to be damaged.
        written: what consolidation writes of it, by form, as it is opened again; None where nothing can be written.
    """

    folder: Path
    path: Path
    options: tuple[str, ...]
    write_options: tuple[str, ...]
    files: tuple[Path, ...]
    written: dict[str, Content | None]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder that is no disk, where there is one: thousands of small files are written and synced."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def content(path: Path) -> Content:
    """Everything that a checkpoint holds by its key path: tensors as dtype and bytes, anything else as text."""
    tree = ckptools.open(path, all_ranks=True).tree
    return {
        repr(p): (v.dtype, v.shape, v.numpy().tobytes()) if isinstance(v, Tensor) else repr(v) for p, v in walk(tree)
    }


def sound(known: Known, place: Path) -> Sound:
    folder = place / "run"
    shutil.copytree(FIXTURES / known.name, folder, ignore=shutil.ignore_patterns("truth*", "HOW.md"))
    path = folder / known.path
    options = ("--shapes", str(FIXTURES / known.name / known.shapes)) if known.shapes else ()
    opened = ckptools.open(path, all_ranks=True, shapes=options[1] if options else None)
    files = _some(known.name, folder, sorted({f.path.resolve() for f in opened.files}))
    written = {form: consolidated(path, (*options, *known.write_options), form, place)[1] for form in FORMS}
    return Sound(folder, path, options, known.write_options, files, written)


def _some(name: str, folder: Path, files: list[Path]) -> tuple[Path, ...]:
    """A few files of each kind, the same ones each time."""
    kinds: dict[str, list[Path]] = {}
    for file in files:
        kinds.setdefault(re.sub(r"\d+", "#", str(file.relative_to(folder))), []).append(file)
    chosen = random.Random(name)
    few = [_alike(kind, chosen) for kind in kinds.values()]
    firsts, others = [first for first, *_ in few], [file for _, *rest in few for file in rest]
    every = [*chosen.sample(firsts, len(firsts)), *chosen.sample(others, len(others))]
    return tuple(sorted(every[:AT_MOST]))


def _alike(kind: list[Path], chosen: random.Random) -> list[Path]:
    """One file of a kind, and for each number in its name one that differs in that number alone, if there is one."""
    first = chosen.choice(kind)
    own = re.split(r"(\d+)", str(first))
    found = [first]
    for place in range(1, len(own), 2):
        split = {file: re.split(r"(\d+)", str(file)) for file in kind}
        others = [f for f, name in split.items() if [n for n, part in enumerate(name) if part != own[n]] == [place]]
        found += [chosen.choice(others)] if others else []
    return found if len(found) > 1 else chosen.sample(kind, min(ALIKE, len(kind)))


def consolidated(path: Path | str, options: tuple[str, ...], form: str, place: Path) -> tuple[Result, Content | None]:
    """What the command said, and what it wrote."""
    out = place / "out"
    out.mkdir()
    done = run("consolidate", path, "-o", out / f"all.{form}", *options)
    try:
        refused_rank = done.exit_code == 2 and "there is no file of that rank here" in done.stderr
        assert done.exit_code in (0, 3, 4) or refused_rank, done.output
        if done.exit_code:
            assert not list(out.iterdir()), "something is left"
            assert done.stderr.startswith("error: ")
        return done, content(out / f"all.{form}") if done.exit_code == 0 else None
    finally:
        shutil.rmtree(out)


@contextmanager
def suffered(damage: Damage) -> Iterator[bool]:
    """Do the damage and undo it; false where it changes nothing."""
    change = damage.make()
    before = {path: path.read_bytes() for path in change}
    for path, data in change.items():
        path.unlink() if data is None else path.write_bytes(data)
    try:
        yield any(before[path] != data for path, data in change.items())
    finally:
        for path, data in before.items():
            path.write_bytes(data)


def told(command: str, case: Sound, *more: str) -> tuple[Result, dict[str, Any]]:
    """What a command says in JSON, with its exit code; a verdict that is none where it cannot open anything."""
    done = run(command, case.path, *more, "--json", *case.options)
    assert done.exit_code in (0, 1, 3), (command, done.exit_code, done.output[-500:])
    return done, json.loads(done.stdout)


def verdict_in(done: Result, answer: dict[str, Any]) -> dict[str, Any]:
    """The verdict in an answer; what cannot be opened is not whole, not recoverable, and a file is why."""
    return answer.get("verdict") or {"whole": False, "recoverable": False, "joinable": None, "level": "bad"}


def disagreement(case: Sound, everywhere: bool) -> tuple[str, dict[str, Any]]:
    """Where two commands that look equally far give other verdicts, and the verdict of the one that looks farthest."""
    seen = verdict_in(*told("inspect", case))
    deep, answer = told("verify", case, "--deep")
    proven = verdict_in(deep, answer)
    assert (deep.exit_code == 0) == (answer["ok"] is True), answer
    if seen["level"] == "bad" and proven["level"] != "bad":
        return f"inspect says {seen['headline']}, verify {proven['headline']}", proven
    if not everywhere or deep.exit_code == 3:
        return "", proven
    all_ranks, doctor = verdict_in(*told("inspect", case, "--all-ranks")), verdict_in(*told("doctor", case))
    shallow = verdict_in(*told("verify", case))
    fields = ("whole", "recoverable", "joinable", "headline")
    for name, one, other in (("--all-ranks", seen, all_ranks), ("doctor", shallow, doctor)):
        if [one.get(f) for f in fields] != [other.get(f) for f in fields]:
            return f"{name}: {[one.get(f) for f in fields]} and {[other.get(f) for f in fields]}", proven
    rows = [] if case.options else told("ls", replace(case, path=case.folder))[1].get("rows", [])
    if len(rows) == 1 and rows[0]["format"] and rows[0]["verdict"] not in (seen["headline"], shallow["headline"]):
        return f"ls: {rows[0]['verdict']}, inspect: {seen['headline']}", proven
    return "", proven


def broken_promise(case: Sound, verdict: dict[str, Any], form: str, place: Path) -> str:
    """What `consolidate --only all` does that the verdict excludes: write what is no truth, refuse, or write at all."""
    truth = case.written[form]
    done, found = consolidated(case.path, (*case.options, *case.write_options), form, place)
    promised = bool((verdict["whole"] or verdict["recoverable"]) and verdict["joinable"])
    if found is not None and found != truth:
        keys = [k for k in sorted({*found, *(truth or {})}) if found.get(k) != (truth or {}).get(k)]
        keys = [k for k in keys if not verdict["recoverable"] or verdict["whole"] or not of_one_rank(k)]
        if keys:
            return f"{form}: {len(keys)} values are not the truth, {keys[0]}"
    if promised and found is None and truth is not None:
        return f"{verdict['headline']}, and {form} is refused: {done.stderr}"
    if found is not None and not promised and form == "pt" and not case.write_options:
        return f"{verdict['headline']}, and {form} is written"
    if found is None and not promised and not any(word in done.stderr for word in causes(verdict)):
        return f"{verdict.get('headline')}; refused for {done.stderr}"
    return ""


def causes(verdict: dict[str, Any]) -> list[str]:
    """Words of which a refusal has one: the verdict's causes, a checksum that is wrong, or a rank that is not here."""
    known = [word for cause in verdict.get("causes", ()) for word in (cause["code"], cause["text"])]
    return [*known, "CRC-32", "there is no file of that rank", *([] if known else ["error: "])]


def of_one_rank(key: str) -> bool:
    """Whether a key path lies where each rank has its own: what of it a lost file held is named, and not written."""
    return any(word in key for word in ("rng", "random", "dataloader", "dataset", "sampler", "extra_state"))


def wrong(case: Sound, damage: Damage, place: Path) -> str:
    """What is said or written that is not so; empty where all is as it should be."""
    number = zlib.crc32(str(damage).encode())
    what, verdict = disagreement(case, everywhere=number % 8 == 0)
    for form in FORMS if damage.kind == "flipped" else (FORMS[number % 2],):
        what = what or broken_promise(case, verdict, form, place)
    return what


def few(known: Known, every: list[Damage]) -> list[Damage]:
    """All damages of the first fixture of a form, and of each other one a few, which begin where its name says."""
    if known in one_of_each_form(EVERY):
        return every
    return every[zlib.crc32(known.label.encode()) % min(OF_ANOTHER, len(every)) :: OF_ANOTHER]


@pytest.mark.parametrize("known", EVERY, ids=lambda k: f"{k.name}-{k.path.partition('/')[0]}")
def test_no_damage_is_written_and_every_command_ends_with_a_verdict(known: Known, place: Path):
    """Every fixture is damaged: one of each form (`Known.form`) in every way, the others in a few ways."""
    case = sound(known, place)
    assert None in case.written.values() or all(case.written.values())
    every = list(damages(case.folder, case.files))
    done = few(known, every)
    found: list[tuple[Damage, str]] = []
    for damage in done:
        with suffered(damage) as changed:
            what = wrong(case, damage, place) if changed else ""
        found += [(damage, what)] if what else []
    mine = [e for e in EXCEPTIONS if e.holds_for(f"{known.name}/{known.path}")]
    assert [f"{damage}: {what}" for damage, what in found if not _excepted(damage, mine)] == []
    unseen = [e for e in mine if any(map(e.covers, done)) or done == every]
    assert [e for e in unseen if not any(e.covers(damage) for damage, _ in found)] == []


def _excepted(damage: Damage, exceptions: list[Unknowable]) -> bool:
    return any(e.covers(damage) for e in exceptions)
