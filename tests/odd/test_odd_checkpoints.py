"""Each command on two odd checkpoints and on a run of such, word for word as it was looked at: `golden/` has it.

`CKPTOOLS_REWRITE_GOLDEN=1 pytest tests/odd` rewrites the files; then read the diff.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptools.cli import app

HERE = Path(__file__).parent
TIME = 1763602927
"""2025-11-20 01:42:07 UTC."""

COMMANDS = {
    "inspect": "inspect A|inspect B|inspect A --json|inspect B --section optimizer|inspect B --section model"
    "|inspect A --section other --private|inspect B --section other|inspect A --section rng --json"
    "|inspect B --section optimizer --json|inspect A --section nothing|inspect cut.pt|inspect text.pt|inspect empty.pt",
    "tree": "tree A|tree B --expand --private|tree A --depth 1|tree B --section optimizer --json|tree A --limit 3"
    "|tree A --filter *bias --exclude *h.1*|tree A --sort size|tree A --sort shape --limit 5|tree B --jsonl",
    "show": "show A emb.weight model.phase|show A h.0.up.bias --values 1:3|show B norm.weight loose scalar array"
    "|show A long nested when args --json|show B rng|show A model.small mask seen none --json|show A nothing"
    "|show A emb.weigt|show A emb.weight --values 0:9|show A emb.weight --values x|show B one other --private"
    "|show A optimizer.param_groups|show B emb.weight --values 1,: --json|show A step --limit 0",
    "stats": "stats A|stats B|stats B --json|stats A --hist --json|stats B --moments|stats B --moments --json"
    "|stats B --dead-rows|stats A --dead-rows --json|stats A --section optimizer --limit 4 --sort rms"
    "|stats A --filter zz|stats A --section rng|stats A --per-rank --limit 2",
    "diff": "diff A B|diff B A|diff A B --values|diff A B --values --json|diff B A --json"
    "|diff A A --values --every-byte|diff A B --values --rtol 0.5 --atol 0.1|diff A B --section optimizer"
    "|diff A B --filter *bias --values|diff A B --sort change --values --limit 2|diff A gone.pt|diff cut.pt A"
    "|diff A B --values --every-byte --json",
    "match": "match A --to B|match B --to A|match A --to B --json|match A --to A|match A --to shapes.json"
    "|match A --to shapes.json --json|match A --to B --filter h.* --write-map map.json|match A --to bad.json",
    "verify": "verify A|verify B|verify B --deep --values|verify B --deep --values --json|verify cut.pt|verify text.pt"
    "|verify flipped.pt --deep|verify flipped.pt --deep --json|verify B --values --ignore CK110 --ignore CK201"
    "|verify A --ignore CK999|verify A --json",
    "ls": "ls run|ls run --json|ls run --sort step|ls run --limit 1|ls run --deep|ls empty|ls A|ls run --jsonl",
    "doctor": "doctor run|doctor A|doctor B --json|doctor cut.pt|doctor text.pt|doctor empty.pt|doctor empty"
    "|doctor A --to B|doctor run --to shapes.json --json|doctor run/step30.pt|doctor link.pt",
    "consolidate": "consolidate A -o o1.pt|consolidate B -o o3.safetensors"
    "|consolidate A -o o5.dcp --dry-run --copies --no-provenance"
    "|consolidate A -o o6.safetensors --rename h.=layers. --strip-prefix emb. --manifest --dry-run --no-provenance"
    "|consolidate A -o o7.pt --only h.* --copies --dry-run --no-provenance"
    "|consolidate A -o o8.pt --keep-types --dry-run --no-provenance"
    "|consolidate A -o o9.safetensors --max-shard-size 200 --copies --dry-run --no-provenance"
    "|consolidate cut.pt -o o10.pt|consolidate A -o o11.pt --rename h.0.up.bias=h.1.up.bias"
    "|consolidate A -o o12.xyz|consolidate flipped.pt -o o13.pt|consolidate A -o o14.pt --only nothing.*"
    "|consolidate A -o o15.pt --fill nan|tree o3.safetensors"
    "|consolidate A -o o16.pt --rename emb.weight=e.weight --only all|diff A o16.pt"
    "|consolidate A -o o1.pt|consolidate A -o A"
    "|consolidate A -o o4.pt --only model --dtype bfloat16 --dry-run --copies --no-provenance"
    "|verify o1.pt --json"
    "|consolidate A -o o17.dcp --only optimizer --dtype float16 --dry-run --no-provenance"
    "|consolidate A -o gone/o.pt",
}
"""Command lines by the file that has what they print."""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with both steps, damaged copies, and a run; file times are those of one second each."""
    folder = tmp_path / "x"
    (folder / "run").mkdir(parents=True)
    (folder / "empty").mkdir()
    a, b = (HERE / f"step{step}.pt" for step in (10, 20))
    for name, source in (("A", a), ("B", b), ("run/step10.pt", a), ("run/step20.pt", b)):
        shutil.copyfile(source, folder / (name if "/" in name else f"{name}.pt"))
    data = a.read_bytes()
    (folder / "cut.pt").write_bytes(data[: len(data) // 2])
    (folder / "run/step30.pt").write_bytes(data[:-9])
    (folder / "text.pt").write_text("no checkpoint at all\n" * 9)
    (folder / "run/notes.txt").write_text("notes")
    (folder / "empty.pt").write_bytes(b"")
    (folder / "link.pt").symlink_to("nowhere.pt")
    (folder / "shapes.json").write_text('{"emb.weight": [6, 4], "layers.0.up.weight": [4, 4], "seen": [2], "zz": [1]}')
    (folder / "bad.json").write_text('{"emb.weight": "six"}')
    at = data.index(b"data/0") + 70
    (folder / "flipped.pt").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    for n, file in enumerate(sorted(folder.rglob("*.pt"))):
        os.utime(file, (TIME + 60 * n, TIME + 60 * n), follow_symlinks=False)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("COLUMNS", "120")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def answer(line: str, folder: Path) -> str:
    """A command line, its exit code, and what it prints, without times, versions and places."""
    words = [{"A": "A.pt", "B": "B.pt"}.get(word, word) for word in line.split()]
    done = CliRunner().invoke(app, words)
    text = "\n".join([f"$ ckptools {' '.join(words)}", f"[{done.exit_code}]", done.stdout, "-- stderr", done.stderr])
    text = text.replace(f"{folder}/", "").replace(str(folder), ".")
    text = re.sub(r'("seconds": |ckptools )[\d.]+[\w.+]*', r"\1N", text)
    text = re.sub(r"(?m)^\[\d+:\d+\].*\n", "", text)  # how far it is, which only a slow machine says
    text = re.sub(r"\b\d+(\.\d+)? (s|ms|min|MB/s|GB/s|kB/s|B/s)\b", r"N \2", text)
    return re.sub(r"-?\d+\.\d{7,}(e[-+]\d+)?", lambda m: f"{float(m[0]):.6g}", text)


@pytest.mark.slow
@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_answers_as_it_did(name):
    file = HERE / "golden" / f"{name}.txt"
    text = "\n".join(answer(line, Path.cwd()) for line in COMMANDS[name].split("|"))
    if os.environ.get("CKPTOOLS_REWRITE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text.splitlines() == file.read_text(encoding="utf-8").splitlines()
