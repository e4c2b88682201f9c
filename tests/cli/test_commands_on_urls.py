"""Commands that are given a URL say what they say of the same files on disk."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptools.cli import app
from tests.object_store import BUCKET, Bucketful
from tests.truth import FIXTURES

NAME = "torch2.13.0-fsdp1-sharded-w4"
COMMANDS = (
    "inspect {}/rank0.pt",
    "inspect {} --all-ranks",
    "inspect {}/nothing.pt",
    "verify {} --deep --values",
    "ls {}",
    "tree {}/rank0.pt",
    "show {}/rank0.pt emb.weight --values 3",
    "stats {}/rank0.pt",
    "doctor {}",
    "diff {}/rank0.pt {}/rank1.pt --values",
    "diff {} --hash digests.json --force",
    "match {}/rank0.pt --to {}/rank1.pt",
    "report {}/rank0.pt -o r.html --force",
    "consolidate {}/rank0.pt -o all.pt --force",
    "consolidate {}/rank0.pt -o all.safetensors --force",
    "consolidate {}/rank0.pt -o all.dcp --force",
)
TIMES = re.compile(r"[\d.]+ m?s\b|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")


def said(command: str, folder: Path | str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, command.replace("{}", f"{folder}/{NAME}").split())
    told = (TIMES.sub("", text.replace(str(folder), "")) for text in (done.stdout, done.stderr))
    return done.exit_code, *told


@pytest.fixture(scope="module")
def here(s3: Bucketful, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on disk of files as old as those in the bucket: what is said of times depends on whether they differ."""
    folder = tmp_path_factory.mktemp("here")
    shutil.copytree(FIXTURES / NAME, folder / NAME)
    s3.put_aged(folder / NAME)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_of_a_url_what_it_says_of_a_folder(command, here, bucket: Bucketful, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there, written = said(command, f"s3://{BUCKET}"), contents(tmp_path, f"s3://{BUCKET}")
    assert there == said(command, here) and (there[0] < 2 or "nothing" in command)
    assert (written == contents(tmp_path, str(here))) or "report" in command


def contents(folder: Path, place: str) -> dict[str, bytes]:
    """The bytes of all files below a folder, without the place that they may name."""
    return {
        str(path.relative_to(folder)): path.read_bytes().replace(place.encode(), b"")
        for path in folder.rglob("*")
        if path.is_file()
    }
