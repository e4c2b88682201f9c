"""`recoverable` promises every value of model and optimizer: of files lost together, something must state them all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ckptools
from ckptools.errors import CkptoolsError
from ckptools.model.cover import cover
from ckptools.model.tensor import Tensor
from ckptools.text import KeyPath
from ckptools.training_state.sections import sections_of, tensors_of
from tests.truth import ASKED, FIXTURES, LOCAL, WHOLE, Known, one_of_each_form

AT_MOST = 12
"""Sets of files that are lost of one checkpoint."""


def state(ck: ckptools.Checkpoint) -> dict[KeyPath, Tensor]:
    return dict(tensors_of(s for s in sections_of(ck) if s.kind in ("model", "optimizer")))


def lost_together(folder: Path, files: list[Path]) -> Iterator[list[Path]]:
    """Files of one kind, of one folder, and those whose names differ in one number; each set once, large ones first."""
    sets: dict[str, list[Path]] = {}
    for file in files:
        name = str(file.relative_to(folder))
        own = re.split(r"(\d+)", name)
        keys = [re.sub(r"\d+", "#", name), f"{Path(name).parent}/*"]
        keys += ["".join([*own[:n], "#", *own[n + 1 :]]) for n in range(1, len(own), 2)]
        for key in dict.fromkeys(keys):
            sets.setdefault(key, []).append(file)
    distinct = {frozenset(found): found for found in sets.values()}
    yield from sorted(distinct.values(), key=len, reverse=True)[:AT_MOST]


def not_here(sound: dict[KeyPath, Tensor], ck: ckptools.Checkpoint) -> list[KeyPath]:
    """Tensors of a sound checkpoint of which a damaged one has no value, not all, or another shape."""
    here = state(ck)
    held = {p: t for p, t in sound.items() if t.kind != "meta" and not t.note}
    return [
        path
        for path, tensor in held.items()
        if path not in here
        or here[path].shape != tensor.shape
        or not cover(tensor.shape, here[path].extents.boxes_read).exact
    ]


@pytest.mark.slow
@pytest.mark.parametrize("known", one_of_each_form((*WHOLE, *LOCAL, *ASKED)), ids=lambda known: known.label)
def test_files_that_cannot_be_read_are_recoverable_only_where_all_that_they_held_is_here(known: Known, tmp_path):
    shutil.copytree(known.folder, tmp_path / known.name, ignore=shutil.ignore_patterns("truth*", "HOW.md"))
    copied = replace(known, place=tmp_path)
    opened = copied.open(all_ranks=True)
    sound, files = state(opened), sorted({f.path.resolve() for f in opened.files})
    wrong = []
    for some in lost_together((tmp_path / known.name).resolve(), files):
        before = {file: file.read_bytes() for file in some}
        for file in some:
            file.write_bytes(b"no longer a file of this")
        try:
            ck = copied.open(all_ranks=True)
            lost = not_here(sound, ck) if ck.verdict.recoverable or ck.whole else []
            wrong += [(some[0].name, len(some), lost[0], ck.verdict.headline)] if lost else []
        except CkptoolsError:
            pass
        for file, content in before.items():
            file.write_bytes(content)
    assert wrong == []


NANOTRON = FIXTURES / "nanotron-tp2pp2" / "ckpt"


@pytest.mark.parametrize(
    "lost", ["optimizer/optimizer_pp-*", "optimizer/optimizer_pp-0*", "model/model/decoder/0/**/*.s*"]
)
@pytest.mark.parametrize("content", [b"", b"no longer a file of this"], ids=["empty", "garbage"])
def test_what_nothing_else_states_is_not_recoverable(tmp_path, lost, content):
    folder = Path(shutil.copytree(NANOTRON, tmp_path / "run"))
    for file in (*folder.glob(lost), *folder.glob("optimizer/optimizer_pp-0*")):
        file.write_bytes(content)
    ck = ckptools.open(folder)
    assert (ck.whole, ck.verdict.recoverable) == (False, False)
    with pytest.raises(CkptoolsError):
        ck.consolidate(tmp_path / "out.pt", only="all")
