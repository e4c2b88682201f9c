"""The commands of the guides print what the guides show."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptools.cli.start import COMMANDS
from ckptools.formats.registry import FORMATS
from tests.object_store import Bucketful, s3_server, settings
from tests.truth import FIXTURES
from tools.documents import DOCS, TRAINING, Step, agrees, files, printed_otherwise, rewritten, run, steps

README = DOCS.parent / "README.md"
PROJECT = (README, *(README.with_name(f"{name}.md") for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG")))
PAGES = sorted(DOCS.rglob("*.md"))
GUIDES = [page for page in [README, *PAGES] if "```console" in page.read_text()]
REMOTE = DOCS / "remote.md"
ELSEWHERE = (TRAINING, REMOTE)
"""Guides with a test of their own."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("guide", [g for g in GUIDES if g not in ELSEWHERE], ids=lambda path: path.stem)
def test_every_command_of_a_guide_prints_what_the_guide_shows(guide: Path, tmp_path: Path) -> None:
    assert printed_otherwise(guide, tmp_path) == []


@pytest.fixture
def run7(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of four rank files, which is in a bucket too."""
    folder = tmp_path / "run7"
    folder.mkdir()
    for file in (FIXTURES / "torch2.13.0-fsdp1-sharded-w4").glob("rank*.pt"):
        shutil.copy(file, folder)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    with s3_server() as address:
        Bucketful(address).put(folder)
        for name, value in settings(address).items():
            monkeypatch.setenv(name, value)
        yield folder


@pytest.mark.slow
def test_every_command_on_a_bucket_prints_what_the_guide_shows(run7: Path, tmp_path: Path) -> None:
    assert printed_otherwise(REMOTE, tmp_path) == []


@pytest.mark.slow
def test_the_first_commands_on_a_bucket_or_a_cluster_run(run7: Path, tmp_path: Path) -> None:
    run7.rename(tmp_path / "run")
    page = (DOCS / "getting-started.md").read_text()
    section = page.partition("## In a bucket, on a cluster")[2].partition("\n## ")[0].replace("\\\n", "")
    lines = re.findall(r"^(?:ckptools|torchrun) .*$", section, re.MULTILINE)
    # One node of two ranks stands for four of eight.
    here = [re.sub(r"--nnodes.*node0", "--standalone --nproc-per-node 2", line) for line in lines]
    done = [subprocess.run(line.split(), cwd=tmp_path, check=False, timeout=200).returncode for line in here]
    assert len(lines) == 4 and done == [0, 0, 0, 0]
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("guide", [README, *PAGES], ids=lambda path: path.stem)
def test_no_page_shows_a_command_that_fails_in_python(guide: Path) -> None:
    assert "Traceback (most recent call last)" not in guide.read_text()


@pytest.mark.parametrize("guide", [*PROJECT, *PAGES], ids=lambda path: path.stem)
def test_every_link_of_a_page_leads_somewhere(guide: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)|(?:src|srcset)=\"([^\"]+)\"", guide.read_text())
    targets = [link or source for link, source in targets]
    assert [t for t in targets if not t.startswith("https://") and not (guide.parent / t).exists()] == []


def test_every_test_that_the_promises_name_is_there() -> None:
    text = (DOCS / "security.md").read_text()
    named = {Path(name) for name in re.findall(r"`((?:tests/|test_)[\w/.]+)`", text)}
    tests = {path.relative_to(DOCS.parent) for path in (DOCS.parent / "tests").rglob("*")}
    assert len(named) > 15
    known = {*tests, *(Path(path.name) for path in tests)}
    assert named - known == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_page_that_the_readme_leads_to(command: str) -> None:
    assert f"[{command}](docs/{command}.md)" in README.read_text()
    assert (DOCS / f"{command}.md").read_text().startswith(f"# `ckptools {command}`: ")


def test_the_readme_fits_two_screens_and_no_line_of_code_is_clipped() -> None:
    lines = README.read_text().splitlines()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    code = [*"".join(blocks).splitlines(), *(line for line in lines if line.startswith("    "))]
    assert len(lines) <= 120 and len(code) > 15 and [line for line in code if len(line) > 88] == []


def test_memory_that_the_readme_states_is_what_the_page_of_figures_has() -> None:
    measured = (DOCS / "scale.md").read_text()
    stated = re.findall(r"\b\d\d+ MiB", README.read_text())
    assert stated and [figure for figure in stated if figure not in measured] == []


def test_every_format_has_a_section_in_the_page_of_its_family() -> None:
    sections = [
        name
        for page in (DOCS / "families").glob("*.md")
        for name in re.findall(r"^## `(\w+)`$", page.read_text(), re.M)
    ]
    listed = re.findall(r"`(\w+)`", (DOCS / "families" / "index.md").read_text().partition("\nIf no format")[0])
    assert sorted(sections) == sorted(known.NAME for known in FORMATS) == sorted({*listed} & {*sections})


def test_output_that_differs_is_noticed() -> None:
    assert agrees("a  1.2 s\n…\nc\n", "a 7 s\nb\nb\n\nc\n")
    assert not agrees("a\n", "a\nb\n")
    assert not agrees("world size 3\n", "world size 4\n")


def test_numbers_of_another_processor_agree_and_other_numbers_do_not() -> None:
    row = "0  a.pt  data/15  191360  33.3 KiB  {}\nCRC-32 is {}, expected {}\n{}\n"
    shown = row.format("5daaa6c6", "da9cebe6", "120ee219", "-0.0311990026  1.8e-03")
    assert agrees(shown, row.format("2e82e898", "ed8c59d3", "251e502c", "-0.0311990008  1.8e-03"))
    assert not agrees(shown, row.format("2e82e898", "ed8c59d3", "251e502c", "-0.0312990026  1.8e-03"))
    assert not agrees(shown, row.format("-", "ed8c59d3", "251e502c", "-0.0311990026  1.8e-03"))


def test_a_command_may_go_over_several_lines(tmp_path: Path) -> None:
    text = "```console\n$ echo a \\\n  b\na b\n$ pwd\nx\n```\n"
    first, second = steps(text)
    assert (first.line, first.command, run(first, tmp_path)) == (2, "echo a \\\n  b", "a b\n")
    assert (second.line, second.shown, os.path.realpath(run(second, tmp_path).strip())) == (
        5, "x\n", os.path.realpath(tmp_path),
    )  # fmt: skip


def test_a_command_finds_the_files_that_its_guide_shows(tmp_path: Path) -> None:
    guide = tmp_path / "guide.md"
    guide.write_text('```python title="a.py"\nprint(1)\n```\n```python\nx\n```\n```console\n$ python a.py\n2\n```\n')
    assert files(guide.read_text()) == {"a.py": "print(1)\n"}
    assert printed_otherwise(guide, tmp_path) == ["guide.md:8: $ python a.py\n1\n"]


def test_a_guide_that_is_rewritten_keeps_what_it_leaves_out() -> None:
    text = "# A\n```console\n$ one\na 1 s\n…\nx  2\nend\n$ two\nb\n```\nafter\n"
    (one, two), out = steps(text), "a 3 s\nb\nc\nx  3\nend\n\n"
    assert rewritten(text, [(two, "c\nd\n"), (one, out)]) == (
        "# A\n```console\n$ one\na 3 s\n…\nx  3\nend\n$ two\nc\nd\n```\nafter\n"
    )
    assert agrees(next(steps(rewritten(text, [(one, out)]))).shown, out)


def test_a_guide_that_is_rewritten_keeps_the_part_that_it_shows() -> None:
    text = "```console\n$ one\n…\n  rank 2  CK002  cut short: 50 bytes, and\n          no directory\n…\n```\n"
    [one] = steps(text)
    printed = "head\n\n  rank 2   CK002 is cut short: 50 bytes\n           has no directory\n  rank 3   none\ntail\n"
    assert rewritten(text, [(one, printed)]) == (
        "```console\n$ one\n…\n  rank 2   CK002 is cut short: 50 bytes\n           has no directory\n…\n```\n"
    )


@pytest.mark.slow
def test_a_training_that_two_pages_begin_with_is_run_once(tmp_path: Path) -> None:
    step = Step(1, "ckptools create run --strategy ddp --world-size 1 --steps 1", "")
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    first, second = (run(step, folder) for folder in folders)
    times = [path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*.pt")]
    assert first == second and len(times) == 2 and len(set(times)) == 1
