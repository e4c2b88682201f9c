"""The net: does ckptools still find in every fixture what it found before? Run it before each push.

`python -m tools.net` compares what the commands answer with tools/net/golden and prints what differs, then measures
processor seconds beside a peer. Names of fixtures take these alone, and measure nothing. `--write` writes the golden
files anew: read their diff. `--of FOLDER --golden FOLDER` does the same with other checkpoints, one in each subfolder.

Golden files have one fact a line: codes, numbers, names, shapes, verdicts, exit codes and sha256 of what is written.
They have no sentence, which may be worded anew (tests/transcripts has these), no time and no count of bytes read.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import gc
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.testing
from typer.main import get_command
from typer.testing import CliRunner, Result

import ckptools
from ckptools.cli import app
from tests.damage.damages import Damage, damages
from tests.truth import ASKED, FIXTURES, LOCAL, OWN_BUFFERS, WHOLE, Known, one_of_each_form
from tools.benchmarks.measure import run
from tools.benchmarks.ranks import OPEN, PEER
from tools.benchmarks.scale import CKPTOOLS, hollow

GOLDEN = Path(__file__).parent / "golden"
EVERY = (*WHOLE, *LOCAL, *OWN_BUFFERS, *ASKED)

SAVED = 1_700_000_000
"""When all files were written, as far as the commands can see."""

PROCESSES = 2
SHOWN = 30
"""Lines of a difference that are printed for one fixture."""

LONGEST = 150
"""Rows of a list that are spelled out; of those behind them there is a hash."""

SENTENCES = frozenset(("detail", "error", "evidence", "first", "headline", "holds", "load", "message", "next", "note"))
SENTENCES |= {"notes", "problem", "question", "read_back", "remedy", "saved_as", "text", "what", "why"}
OF_THE_PROCESSOR = frozenset(("seconds", "bytes_read"))
OF_THE_MACHINE = frozenset(("tool", "no_room"))
LEFT_OUT = SENTENCES | OF_THE_PROCESSOR | OF_THE_MACHINE
"""Fields that are in no golden file."""

FORMS = ("pt", "safetensors", "dcp")
SOUND = """
inspect PATH
tree PATH
verify PATH --deep
ls .
doctor PATH
consolidate PATH -o ../out/all.pt --dry-run --only all WRITE
"""
DAMAGED = """
inspect PATH
verify PATH --deep
consolidate PATH -o ../out/all.pt --dry-run --only all WRITE
"""


@dataclass(frozen=True)
class Case:
    """A checkpoint that a golden file is about.

    Attributes:
        name: of the golden file.
        folder: what is copied.
        path: what is opened, below that folder.
        options: what a user says beside that.
        write_options: what a user says to `consolidate` besides.
        of_each_damage: how many cases of each kind of damage it suffers.
    """

    name: str
    folder: Path
    path: str
    options: tuple[str, ...] = ()
    write_options: tuple[str, ...] = ()
    of_each_damage: int = 2


def fixtures() -> list[Case]:
    """Every fixture that has a truth; one whose form (`Known.form`) another has suffers half as much."""
    first = set(one_of_each_form(EVERY))
    return [of_known(known, 2 if known in first else 1) for known in EVERY]


def of_known(known: Known, of_each_damage: int) -> Case:
    told = {"--shapes": known.shapes, "--names": known.names}
    options = tuple(word for pair in told.items() if pair[1] for word in pair if word)
    return Case(known.label, known.folder, known.path, options, known.write_options, of_each_damage)


def others(folder: Path) -> list[Case]:
    """Every checkpoint that `ls` finds in the subfolders of a folder."""
    found = []
    for one in sorted(path for path in folder.iterdir() if path.is_dir()):
        told = {f"--{name}": f"{name}.json" for name in ("shapes", "names") if (one / f"{name}.json").exists()}
        options = tuple(word for pair in told.items() for word in pair)
        rows = json.loads(call(["ls", str(one)]).stdout).get("rows", [])
        for path in sorted(row["path"] for row in rows):
            inner = os.path.relpath(path, one) if Path(path).is_absolute() else path
            if not inner.startswith("truth"):
                label = one.name if inner == "ckpt" else f"{one.name}-{inner.replace('/', '-')}"
                found.append(Case(label, one, inner, options))
    return found


def call(words: Sequence[str]) -> Result:
    return CliRunner().invoke(app, [*words, "--json"])


def answer(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a command says in JSON; and its exit code, with the codes of problems that it names as it refuses."""
    done = call(words)
    told = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    end: dict[str, Any] = {"exit": done.exit_code, "refused for": sorted(set(re.findall(r"\bCK\d+", done.stderr)))}
    if done.exception and not isinstance(done.exception, SystemExit):
        end["raised"] = type(done.exception).__name__
    return told, end


def facts(case: Case) -> str:
    """The content of its golden file, from a copy of the checkpoint."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="ckptools-net-", dir=memory if memory.is_dir() else None) as made:
        place = Path(made).resolve()
        copy = place / "sound" / "run"
        shutil.copytree(case.folder, copy, ignore=shutil.ignore_patterns("truth*", "HOW.md"))
        for path in copy.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
            os.utime(path, (SAVED, SAVED))
        os.utime(copy, (SAVED, SAVED))
        lines = [*of_commands(case, copy), *of_outputs(case, copy), *of_damages(case, copy)]
        return "\n".join(lines).replace(str(place), "PLACE") + "\n"


def commands(case: Case, lines: str) -> Iterator[list[str]]:
    for line in lines.split("\n")[1:-1]:
        words = line.replace("WRITE", " ".join(case.write_options)).split()
        given = case.options if "PATH" in words else ()
        yield [case.path if word == "PATH" else word for word in words] + list(given)


def of_commands(case: Case, copy: Path) -> Iterator[str]:
    with chdir(copy):
        for words in commands(case, SOUND):
            told, end = answer(words)
            for line in flat({**reduced(told), **end}):
                yield f"{words[0]} {line}"


def of_outputs(case: Case, copy: Path) -> Iterator[str]:
    """The hash of every file that `consolidate` writes."""
    with chdir(copy):
        for form in FORMS:
            out = copy.parent / "out"
            out.mkdir()
            words = ["consolidate", case.path, "-o", f"../out/all.{form}", *case.write_options, *case.options]
            told, end = answer(words)
            found = {field: told.get(field) for field in ("nbytes", "proof", "tensors", "data_files", "checksums")}
            yield f"to {form} {compact({**end, **found})}"
            for path in sorted(path for path in out.rglob("*") if path.is_file()):
                hashed = hashlib.sha256(path.read_bytes()).hexdigest()
                yield f"to {form} sha256 {path.relative_to(out)} {path.stat().st_size} {hashed}"
            shutil.rmtree(out)


def of_damages(case: Case, copy: Path) -> Iterator[str]:
    """What is said of damaged copies, a line for each command."""
    for damage in chosen(case, copy):
        with damaged(copy, damage) as folder, chdir(folder):
            for words in commands(case, DAMAGED):
                told, end = answer(words)
                yield f"{damage} | {words[0]} {compact({**summary(told), **end})}"


def chosen(case: Case, copy: Path) -> list[Damage]:
    """A few damages of each kind, the same ones each time; those that change nothing are not among them."""
    told = {name[2:]: copy / file for name, file in zip(case.options[::2], case.options[1::2], strict=True)}
    try:
        opened = ckptools.open(copy / case.path, all_ranks=True, **told)
    except ckptools.CheckpointError:
        return []
    kinds: dict[str, list[Damage]] = {}
    for damage in damages(copy, sorted({file.path.resolve() for file in opened.files})):
        kinds.setdefault(damage.kind, []).append(damage)
    found = []
    for every in kinds.values():
        shuffled = sorted(every, key=lambda damage: (zlib.crc32(str(damage).encode()), str(damage)))
        changing = (damage for damage in shuffled if any(p.read_bytes() != new for p, new in damage.make().items()))
        found += [damage for damage, _ in zip(changing, range(case.of_each_damage), strict=False)]
    return found


@contextmanager
def damaged(copy: Path, damage: Damage) -> Iterator[Path]:
    """A folder of hard links to the copy's files, with those of the damage in their place."""
    place = copy.parent.parent / "damaged"
    folder = place / "run"
    shutil.copytree(copy, folder, copy_function=os.link)
    for path, data in damage.make().items():
        new = folder / path.relative_to(copy)
        new.unlink()
        if data is not None:
            new.write_bytes(data)
            os.utime(new, (SAVED, SAVED))
    try:
        yield folder
    finally:
        shutil.rmtree(place)


def reduced(value: Any, field: str = "") -> Any:
    """An answer without the fields that no golden file has, and with numbers that are alike on every processor."""
    if isinstance(value, dict):
        kept = {key: v for key, v in value.items() if key not in LEFT_OUT and not is_sentence(key, v)}
        if field == "read":
            kept.pop("bytes", None)
        return sorted(kept) if field == "left_out" else {key: reduced(v, key) for key, v in kept.items()}
    if isinstance(value, list):
        return len(value) if field == "lost" else [reduced(v) for v in value]
    if isinstance(value, str) and field == "left_out":
        return bool(value)
    return f"{value:.6g}" if isinstance(value, float) else value


def is_sentence(field: str, value: Any) -> bool:
    """Whether a field that is a name or a record elsewhere is a sentence here."""
    return isinstance(value, str) and field in ("verdict", "answer")


def flat(value: dict[str, Any], before: str = "") -> Iterator[str]:
    """A line for each fact, and one for each row of a list; fields sorted."""
    for key, inner in sorted(value.items()):
        name = f"{before}{key}"
        if isinstance(inner, dict) and inner:
            yield from flat(inner, f"{name}.")
        elif isinstance(inner, list) and any(isinstance(row, dict) for row in inner):
            rows = [compact(row) for row in inner]
            yield from (f"{name} {row}" for row in rows[:LONGEST])
            if rest := rows[LONGEST:]:
                yield f"{name} and {len(rest)} more, sha256 {hashlib.sha256(compact(rest).encode()).hexdigest()}"
        else:
            yield f"{name} {compact(inner)}"


def compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def summary(told: dict[str, Any]) -> dict[str, Any]:
    """Of an answer about something damaged: verdict, and how many problems, ranks and checks there are of a kind."""
    found = dict(reduced(told.get("verdict") or {}))
    for field in ("causes", "consequences"):
        rows = found.pop(field, [])
        found[field] = [" ".join(map(str, (row["code"], row["problems"], row.get("where", "")))) for row in rows]
    checks = told.get("checks", [])
    problems = [*told.get("problems", []), *(problem for check in checks for problem in check["problems"])]
    found["problems"] = counted(f"{p['code']} {p['severity']} {p.get('rank', '')}".strip() for p in problems)
    found["ranks"] = counted(f"{row['rank']} {row['status']}" for row in told.get("ranks", []))
    found["checks"] = {check["name"]: check["result"] for check in checks if check["result"] != "ok"}
    found["looked_at"] = [f"{check['looked_at']}/{check['of']}" for check in checks]
    for field in ("proof", "left_out", "missing", "from_replicas", "step", "world_size", "tensors", "ok"):
        found[field] = reduced(told.get(field), field)
    return {field: value for field, value in found.items() if value not in (None, [], {}, 0)}


def counted(words: Iterable[str]) -> dict[str, int]:
    return dict(Counter(words))


def compare(cases: Sequence[Case], golden: Path, write: bool) -> bool:
    """Print what differs, or write it down; true where nothing differs."""
    equal = True
    # The largest first, so that no process is left with one of them at the end.
    largest = sorted(cases, key=lambda case: -sum(p.stat().st_size for p in case.folder.rglob("*") if p.is_file()))
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        for case, now in zip(largest, pool.imap(facts, largest, chunksize=1), strict=True):
            path = golden / f"{case.name}.txt"
            if write:
                path.write_text(now, encoding="utf-8")
            elif lines := difference(path, now):
                equal = False
                print("\n".join(lines[:SHOWN]))
                if len(lines) > SHOWN:
                    print(f"... and {len(lines) - SHOWN} lines more")
    return equal


def difference(path: Path, now: str) -> list[str]:
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if before == now:
        return []
    names = (str(path), "now")
    return list(difflib.unified_diff(before.splitlines(), now.splitlines(), *names, n=0, lineterm=""))


@dataclass(frozen=True)
class Figure:
    """Processor seconds of ckptools beside those of a peer.

    Attributes:
        what: is measured.
        peer: what does the same.
        limit: how many times faster than the peer it is at the least.
        commands: ours and the peer's, for a folder of inputs.
        rounds: how often both are run in turn; the median of the ratios counts.
    """

    what: str
    peer: str
    limit: float
    commands: Callable[[Path], tuple[Sequence[str], Sequence[str]]]
    rounds: int = 5


RANK = str(FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4" / "ep0-ba5-rank0.pt")
SHAPES = {f"layers.{n}.weight": (2048, 8) for n in range(100)}
"""With AdamW's two moments and step counts 400 tensors."""

FIGURES = (
    Figure(
        "inspect of 4 ranks", "the seed script", 5.3, lambda _: ([*CKPTOOLS, "inspect", RANK], [*PEER, "look", RANK])
    ),
    Figure(
        *("inspect of a DCP of 128 ranks", "torch's read_metadata", 5.8),
        lambda work: ([*CKPTOOLS, "inspect", str(work / "dcp")], [*PEER, "metadata", str(work / "dcp")]),
        rounds=3,
    ),
    Figure(
        *("open of 64 rank files", "torch.load(mmap=True) of each", 4.5),
        lambda work: (
            [sys.executable, "-c", OPEN, str(work / "ranks"), "1"],
            [*PEER, "load_mapped", str(work / "ranks"), "64"],
        ),
        rounds=3,
    ),
)
"""Each limit is 15 % below the least that was measured on a machine with other work."""


def bench() -> bool:
    """Print a line for each figure; true where none is below its limit."""
    memory = Path("/dev/shm")
    good = True
    with tempfile.TemporaryDirectory(prefix="ckptools-net-", dir=memory if memory.is_dir() else None) as made:
        work = Path(made)
        (work / "shapes.json").write_text(json.dumps(SHAPES))
        hollow(work / "dcp", 128, str(work / "shapes.json"), "--layout", "dcp")
        hollow(work / "ranks", 64, str(work / "shapes.json"))
        for figure in FIGURES:
            ours, theirs = figure.commands(work)
            pairs = [(run(ours).cpu, run(theirs).cpu) for _ in range(figure.rounds)]
            ratio = statistics.median(their / our for our, their in pairs)
            seconds = " and ".join(f"{statistics.median(column):.2f} s" for column in zip(*pairs, strict=True))
            fast = ratio >= figure.limit
            good = good and fast
            told = f"{ratio:.1f} x faster than {figure.peer} (limit {figure.limit:.1f}; {seconds})"
            print(f"{figure.what}  {told}{'' if fast else '  TOO SLOW'}", flush=True)
    return good


def prepare() -> None:
    """Make answers alike on every machine, and quick: commands are made once, and cycles searched for seldom."""
    os.environ.update(TZ="UTC", COLUMNS="100")
    time.tzset()
    os.umask(0o022)
    typer.testing._get_command = functools.cache(get_command)
    gc.freeze()
    gc.set_threshold(100_000)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.net", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="fixtures; all of them where there is none")
    parser.add_argument("--write", action="store_true", help="write the golden files anew")
    parser.add_argument("--of", type=Path, help="folder of other checkpoints, one in each subfolder")
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="folder of the golden files")
    parser.add_argument("--bench", action="store_true", help="only measure processor seconds")
    asked = parser.parse_args()
    if asked.bench:
        return 0 if bench() else 1
    if asked.of and asked.golden == GOLDEN:
        parser.error("--of needs --golden: those of the fixtures are not for other checkpoints")
    begun = time.perf_counter()
    prepare()
    every = others(asked.of) if asked.of else fixtures()
    cases = [case for case in every if not asked.names or case.name in asked.names]
    if unknown := set(asked.names) - {case.name for case in cases}:
        parser.error(f"no such fixture: {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in every)}")
    asked.golden.mkdir(parents=True, exist_ok=True)
    equal = compare(cases, asked.golden, asked.write)
    if not asked.names:
        for left in sorted(asked.golden.glob("*.txt")):
            if left.stem not in {case.name for case in cases}:
                equal = asked.write and equal
                print(f"{left}: there is no such fixture")
                if asked.write:
                    left.unlink()
    cpu = sum(os.times()[:4])
    done = "written" if asked.write else "equal" if equal else "NOT EQUAL"
    print(
        f"{len(cases)} checkpoints: {done}; {time.perf_counter() - begun:.0f} s, {cpu:.0f} s of processor", flush=True
    )
    measured = bool(asked.names or asked.of or asked.write) or bench()
    return 0 if equal and measured else 1


if __name__ == "__main__":
    sys.exit(main())
