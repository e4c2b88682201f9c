"""Damage to a checkpoint in a bucket: every command answers what it answers of the same files on disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.damage.damages import Damage, damages
from tests.damage.test_matrix import FORMS, Sound, consolidated, place, run, sound, suffered
from tests.object_store import BUCKET, Bucketful
from tests.truth import KINDS, Known

pytestmark = pytest.mark.slow

__all__ = ["place"]

NOT_COMPARED = ("read", "read_bytes", "bytes_read", "seconds", "saved", "versions")
"""Fields that may differ: costs, file times, and what a config says that is not fetched unless its folder is named."""


@contextmanager
def suffered_there(damage: Damage, folder: Path, bucket: Bucketful) -> Iterator[bool]:
    """Do the damage on disk and in the bucket, and undo both."""
    files = list(damage.make())
    try:
        with suffered(damage) as changed:
            upload(files, folder, bucket)
            yield changed
    finally:
        upload(files, folder, bucket)


def upload(files: list[Path], folder: Path, bucket: Bucketful) -> None:
    """Let files be in the bucket as they are on disk, and on disk as new as they are there."""
    for file in files:
        key = str(file.relative_to(folder.parent.parent))
        if file.exists():
            file.touch()
            bucket.put_bytes(key, file.read_bytes())
        else:
            bucket.delete(key)


def answers(case: Sound, path: str, root: str, place: Path) -> dict[str, Any]:
    """What each command says of it and ends with, without the place, the times and what it cost."""
    told: dict[str, Any] = {}
    for command in ("inspect", "inspect --all-ranks", "verify --deep"):
        name, *options = command.split()
        done = run(name, path, *options, "--json", *case.options)
        told[command] = done.exit_code, _free(json.loads(done.stdout.replace(root, "")))
    for form in FORMS:
        done, found = consolidated(path, case.options, form, place)
        told[form] = done.exit_code, found, _free(done.stderr.replace(root, "").replace(str(place), ""))
    return told


def _free(answer: Any) -> Any:
    if isinstance(answer, str):
        return re.sub(", written within [^;]* s|; last written [^;]* s ago: it may not be finished", "", answer)
    if isinstance(answer, dict):
        return {key: _free(value) for key, value in answer.items() if key not in NOT_COMPARED}
    return [_free(value) for value in answer] if isinstance(answer, list) else answer


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Each place at which two answers differ, as one line."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from differences(one.get(key), other.get(key), f"{where}.{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differences(a, b, f"{where}[{number}]")
    elif one != other:
        yield f"{where}: {one!r} and {other!r}"


def wrong_header(there: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether the one thing was damaged that is read on disk at once and in a store when all of a record is read.

    That is the local header of a record of values; what is written without it is the truth.
    """
    damaged = "local header and directory disagree"
    if damaged not in str(here["inspect"]) or damaged in str(there["inspect"]):
        return False
    assert damaged in str(there["verify --deep"]) and there["verify --deep"][0] == 1
    return True


def one_of_each(all_damages: Iterator[Damage]) -> list[Damage]:
    """The first damage of each kind that changes anything."""
    kinds: dict[str, Damage] = {}
    for damage in all_damages:
        if damage.kind not in kinds and damage.make():
            kinds[damage.kind] = damage
    return list(kinds.values())


@pytest.mark.parametrize("known", KINDS, ids=lambda known: known.name)
def test_damage_in_a_bucket_is_told_as_on_disk(
    known: Known, place: Path, bucket: Bucketful, monkeypatch: pytest.MonkeyPatch
):
    case = sound(known, place)
    root = f"s3://{BUCKET}/{place.name}"
    upload([file for file in case.folder.rglob("*") if file.is_file()], case.folder, bucket)
    for damage in one_of_each(damages(case.folder, case.files)):
        with suffered_there(damage, case.folder, bucket):
            here = answers(case, str(case.path), str(place), place)
            there = answers(case, f"{root}/{case.path.relative_to(place)}", root, place)
        if wrong_header(there, here):
            continue
        assert [f"{damage}: {line}" for line in differences(there, here)] == []
