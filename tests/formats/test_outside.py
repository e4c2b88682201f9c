"""Formats that other packages bring: real packages on the path, good ones and broken ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckptools.formats.registry import FORMATS
from tests.truth import FIXTURES

RANK = FIXTURES / "torch2.4.1-fsdp2-w3" / "rank0.pt"

GOOD = """
from ckptools.formats import torch_file
NAME, READS, KNOWN_BY = "mine", "files of my own framework, as an example", "the suffix .mine"
def detect(path): return path.suffix == ".mine"
def read(path, options):
    from dataclasses import replace
    return replace(torch_file.read(path, options), format=NAME)
"""


def install(folder: Path, module: str, code: str, point: str = "") -> Path:
    """Put a package with an entry point into a folder, as pip would."""
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[ckptools.formats]\n{module} = {point or module}\n")
    (folder / f"{module}.py").write_text(code)
    return folder


def ckptools(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, with a folder of packages on Python's path."""
    code = f"import sys; sys.path.append({str(site)!r}); sys.argv[0] = 'ckptools'; import ckptools.cli as c; c.run()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_a_format_from_outside_is_listed_and_reads(tmp_path):
    site = install(tmp_path / "site", "mine", GOOD)
    (tmp_path / "x.mine").write_bytes((FIXTURES / "torch2.13.0-ddp-w4" / "snapshot.pt").read_bytes())
    assert "mine: files of my own framework" in ckptools(site, "formats").stdout
    assert '"format": "mine"' in ckptools(site, "inspect", str(tmp_path / "x.mine"), "--json").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError"),
        ("NAME = 'half'", "has no READS, KNOWN_BY, detect, read"),
        ("raise SystemError('no')", "SystemError: no"),
        (GOOD.replace("return path.suffix == '.mine'", "1 / 0").replace('path.suffix == ".mine"', "1 / 0"), "division"),
    ],
)
def test_a_broken_one_is_a_warning_and_the_rest_goes_on(code, said, tmp_path):
    site = install(tmp_path / "site", "broken", code)
    done = ckptools(site, "inspect", str(RANK), "--json")
    assert (done.returncode, '"format": "rank_files"' in done.stdout) == (0, True)
    assert said in done.stderr and done.stderr.count("warning: format") == 1


def test_one_that_fails_while_it_reads_is_one_line_and_code_3(tmp_path):
    site = install(tmp_path / "site", "mine", GOOD.replace("from dataclasses", "1 / 0; from dataclasses"))
    (tmp_path / "x.mine").write_bytes(b"anything")
    done = ckptools(site, "inspect", str(tmp_path / "x.mine"))
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "mine, which another package brings, failed: ZeroDivisionError" in done.stderr


@pytest.mark.slow
def test_a_package_that_lies_beside_the_checkpoint_is_not_loaded(tmp_path):
    install(tmp_path, "beside", "import pathlib; pathlib.Path('ran').touch()" + GOOD)
    command = [sys.executable, "-m", "ckptools", "formats"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "mine" not in done.stdout and not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_formats_lists_every_format_and_writer_with_how_it_is_recognised(tmp_path):
    stdout = ckptools(tmp_path, "formats").stdout
    assert [f.NAME for f in FORMATS if f"  {f.NAME}: {f.READS}\n      known by {f.KNOWN_BY}\n" not in stdout] == []
    assert "safetensors: one .safetensors" in stdout
