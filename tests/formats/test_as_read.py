"""What readers make of every fixture, sound and damaged, is what was looked at: `golden/` has it in full.

`CKPTOOLS_REWRITE_GOLDEN=1 pytest tests/formats/test_as_read.py` rewrites the files; then read the diff.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ckptools.errors import CkptoolsError
from ckptools.formats.open import open_checkpoint
from ckptools.formats.shards_of_other_ranks import with_other_ranks
from ckptools.model.checkpoint import Checkpoint
from tests.formats.described import described, digest, facts, leaves
from tests.truth import ASKED, GOLDEN, LOCAL, OWN_BUFFERS, WHOLE, Known

EVERY = (*WHOLE, *LOCAL, *ASKED, *OWN_BUFFERS)
DAMAGED = (
    "torch2.13.0-fsdp1-sharded-w4", "torch2.13.0-fsdp2-tp2x2-w4", "torch2.6.0-fsdp1-hsdp2x2-w4", "verl-fsdp1",
    "torch2.15.0-checkpointable-tensor-w4", "torch2.13.0-fsdp2-dcp-w3",
    "dcp-zstd", "composer-0.16.4-torch2.0.1-elastic-w4", "lightning-fabric-fsdp2", "torchtitan-fsdp-tp",
    "deepspeed-z1-fp32", "deepspeed-z3-bf16", "deepspeed-pipe-fp32", "megatron-tp2pp2-fp32", "megatron-tp2dp2-distopt",
    "hf-llama-safetensors-bf16", "hf-gpt2-bin-tied-fp32", "dcp-hf", "accelerate-fsdp2", "torchsnapshot-fsdp1",
    "torch-checkpointing-pt-fsdp2", "torch-checkpointing-st-fsdp2", "nemo-automodel-fsdp2", "torch2.6.0-fsdp1-local-w4",
    "dcp-experimental-checkpointer-tp2x2",
)  # fmt: skip
"""One or two fixtures of each reader."""


def opened(known: Known) -> Checkpoint:
    """As `Known.open` with all ranks does, in the words of the command line."""
    return with_other_ranks(open_checkpoint(known.file, **known.options, all_ranks=True))


def compared(name: str, known: Known, lines: Iterable[str]) -> None:
    """Compare lines with the file of that name."""
    file = GOLDEN / name / f"{known.label}.txt"
    text = "\n".join(lines).replace(f"{known.folder}/", "").replace(str(known.folder), ".")
    text = re.sub("as zstd: .*", "as zstd", text) + "\n"  # as the library words it
    if os.environ.get("CKPTOOLS_REWRITE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text.splitlines() == file.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("known", EVERY, ids=lambda known: known.label)
def test_a_checkpoint_is_read_as_it_was(known):
    compared("sound", known, described(opened(known)))


def brief(known: Known) -> list[str]:
    """The facts of a checkpoint, and a digest of its tree; the error where it cannot be opened."""
    try:
        ck = opened(known)
    except CkptoolsError as error:
        return [f"{type(error).__name__}: {error}"]
    found = list(leaves(ck))
    return [*facts(ck), f"tree of {len(found)} lines {digest(found)}"]


def gone(file: Path) -> None:
    file.unlink()


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def doubled(file: Path) -> None:
    """Copied to a name with another number, or beside it."""
    name = re.sub(r"(\d+)(?=\D*$)", lambda m: str(int(m[1]) + 4), file.name)
    shutil.copyfile(file, file.with_name(name if name != file.name else f"copy-{file.name}"))


def swapped(file: Path) -> None:
    """Exchanged with the first of its kind."""
    other = next(f for f in sorted(file.parent.iterdir()) if _kind(f) == _kind(file))
    mine, its = file.read_bytes(), other.read_bytes()
    file.write_bytes(its)
    other.write_bytes(mine)


HARMS: tuple[Callable[[Path], None], ...] = (gone, halved, doubled, swapped)


@pytest.mark.parametrize("known", [k for k in EVERY if k.name in DAMAGED], ids=lambda known: known.label)
def test_a_damaged_checkpoint_is_read_as_it_was(known, tmp_path):
    """Lines of the facts that damage adds are kept, and those that go."""
    copy = replace(known, place=tmp_path)
    shutil.copytree(known.folder, copy.folder, ignore=shutil.ignore_patterns("truth*", "HOW.md"))
    sound, lines = brief(copy), []
    for file in _one_of_each_kind(copy):
        for harm in HARMS:
            with undone(file.parent):
                harm(file)
                lines += [f"== {harm.__name__} {file.relative_to(copy.folder)}", *_changes(sound, brief(copy))]
    compared("damaged", copy, lines)


def _changes(before: list[str], after: list[str]) -> list[str]:
    """Lines that go, with a minus, and lines that come; where nothing could be opened why."""
    if len(after) == 1:
        return after
    return [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:3] not in MARKS]


MARKS = ("---", "+++", "@@ ")


def _one_of_each_kind(known: Known) -> list[Path]:
    """The last of the files whose names differ in numbers only, but for the one that is opened; two at most."""
    files = sorted(f.path for f in opened(known).files if f.path != known.file)
    return list({_kind(file.relative_to(known.folder)): file for file in files}.values())[:2]


def _kind(path: Path) -> str:
    return re.sub(r"\d+", "#", str(path))


@contextmanager
def undone(folder: Path) -> Iterator[None]:
    """Restore the files of a folder in the end."""
    before = {f: f.read_bytes() for f in folder.iterdir() if f.is_file()}
    yield
    for path in [f for f in folder.iterdir() if f.is_file() and f not in before]:
        path.unlink()
    for path, data in before.items():
        path.write_bytes(data)
