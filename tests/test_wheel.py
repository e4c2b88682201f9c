"""The wheel as a stranger installs it: without torch, with its manual page, completions and licence."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

from ckptools._version import __version__
from ckptools.cli.start import COMMANDS
from tests.truth import FIXTURES

ROOT = Path(__file__).parent.parent
RUN = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
LIBRARIES = ("typer", "tabulate", "numpy")
"""What `docs/install.md` installs beside the package to do without torch."""

BUILD = ("hatchling", "typer", "tabulate")
"""What `pyproject.toml` requires to build the wheel."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def pip(*words: str | Path) -> None:
    """Call pip without an index: what is installed comes from this environment or from the checkout."""
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as pip builds it: what that requires is on the path of the building process alone."""
    folder, required = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("required")
    python = empty_environment(tmp_path_factory.mktemp("builder")) / "python"
    for name in with_requirements(BUILD):
        link(distribution(name), required)
    command = [python, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(required)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    (made,) = folder.glob("*.whl")
    return made


def empty_environment(folder: Path) -> Path:
    """Make an environment with nothing in it; return the folder of its programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return Path(sysconfig.get_path("scripts", "venv", {"base": str(folder)}))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment that has the wheel and three libraries, and no torch."""
    folder = tmp_path_factory.mktemp("bare")
    scripts = empty_environment(folder)
    pip("--python", scripts / "python", "install", "--no-deps", "--no-index", wheel)
    (packages,) = folder.glob("lib/*/site-packages")
    for name in with_requirements(LIBRARIES):
        link(distribution(name), packages)
    return scripts


def with_requirements(names: Iterable[str]) -> set[str]:
    """Packages and all that they require here, without extras."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        with contextlib.suppress(PackageNotFoundError):
            needed = [r for r in distribution(name).requires or () if "extra ==" not in r]
            waiting += {re.split(r"[^\w.-]", r)[0] for r in needed} - found - {name}
            found.add(name)
    return found


def link(package: Distribution, folder: Path) -> None:
    """Put links to a package's files into the site-packages of another environment."""
    for name in {file.parts[0] for file in package.files or () if file.parts[0] != ".."} - {"__pycache__"}:
        (folder / name).symlink_to(Path(str(package.locate_file(name))))


def run(bare: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COVERAGE_PROCESS_START")}
    return subprocess.run([bare / "ckptools", *words], capture_output=True, text=True, env=env, cwd=bare)


@pytest.mark.parametrize("words", ["inspect", "inspect --all-ranks", "verify", "verify --deep --values", "tree", "ls"])
def test_a_command_needs_no_torch(bare, words):
    name, *options = words.split()
    done = run(bare, name, RUN, *options)
    assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr
    assert "whole" in done.stdout or name == "tree"


def test_consolidate_to_safetensors_needs_no_torch_and_writes_what_torch_reads(bare, tmp_path):
    from safetensors.numpy import load_file

    import ckptools

    out = tmp_path / "model.safetensors"
    done = run(bare, "consolidate", RUN, "-o", out)
    assert done.returncode == 0, done.stderr
    found, model = load_file(out), ckptools.open(RUN).model
    assert len(found) == len(model) and all((found[name] == model[name].numpy()).all() for name in model)


def test_what_needs_torch_says_so_in_one_line(bare, tmp_path):
    assert subprocess.run([bare / "python", "-c", "import torch"], capture_output=True).returncode == 1
    done = run(bare, "inspect", RUN / "rank0.pt", "--engine", "torch")
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert done.stderr == "error: this needs torch, which is not installed: pip install torch\n"


def test_the_wheel_brings_its_licence_a_manual_page_and_completions(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
        share = {n.partition(".data/data/")[2]: archive.read(n).decode() for n in names if ".data/data/" in n}
    assert "License-Expression: Apache-2.0" in metadata and any(n.endswith("licenses/LICENSE") for n in names)
    page = share.pop("share/man/man1/ckptools.1")
    assert page.startswith(f'.TH CKPTOOLS 1 "" "ckptools {__version__}"')
    assert [name for name in COMMANDS if f".SS ckptools {name}\n.nf\nUsage: ckptools {name} " not in page] == []
    assert len(share) == 3 and all("_CKPTOOLS_COMPLETE=complete_" in text for text in share.values())
    assert share["share/zsh/site-functions/_ckptools"].startswith("#compdef ckptools\n")


def test_the_wheel_is_small_and_has_no_test_in_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert {name.split("/")[0] for name in archive.namelist()} == {
            "ckptools", f"ckptools-{__version__}.dist-info", f"ckptools-{__version__}.data",
        }  # fmt: skip
    assert wheel.stat().st_size < 2_000_000
