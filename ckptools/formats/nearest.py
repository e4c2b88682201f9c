"""The nearest guess at a folder that no format recognises: whose it looks like, and the file that is missing.

Names alone decide. A guess that names a missing file is made only where the folder itself holds what lies beside that
file, so a run with several checkpoints in it is none.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ckptools.errors import UnknownFormatError
from ckptools.files.last_write import UNFINISHED
from ckptools.files.location import is_remote
from ckptools.model.values import describe_for_error

MAX_ENTRIES = 1 << 12
MAX_DEPTH = 5
ASK = "to ask for a format: the issue form 'New format'"


class Sign(NamedTuple):
    """Names in a folder that only one writer gives.

    Attributes:
        writer: whose they are.
        pattern: of paths below the folder.
        missing: a file that is beside them in a whole checkpoint; empty where the writer's files are not read at all.
    """

    writer: str
    pattern: re.Pattern[str]
    missing: str = ""


LACKING = (
    Sign("Nanotron", re.compile(r"model/(.+/)?model_(weight|bias)[^/]*\.safetensors"), "checkpoint_metadata.json"),
    Sign("Nanotron", re.compile(r"optimizer/optimizer_pp-\d+-of-\d+_.*\.pt"), "checkpoint_metadata.json"),
    Sign(
        "torchsnapshot", re.compile(r"batched/[0-9a-f]{8}-[0-9a-f-]{27}|(sharded|replicated)/.+"), ".snapshot_metadata"
    ),
)
"""Folders of formats that are read, without the file that the format is recognised by, which both write last.

Source: nanotron/serialize/main.py (`save`), torchsnapshot/snapshot.py (`take`: "commit snapshot metadata only after all
ranks complete writing").
"""

FOREIGN = (
    Sign("Orbax (JAX)", re.compile(r"(.+/)?(manifest\.ocdbt|_CHECKPOINT_METADATA|_METADATA)")),
    Sign("TensorFlow", re.compile(r"(.+/)?(.+\.data-\d{5}-of-\d{5}|saved_model\.pb)")),
    Sign("Keras", re.compile(r"(.+/)?.+\.(keras|weights\.h5|h5)")),
    Sign("PaddlePaddle", re.compile(r"(.+/)?.+\.(pdparams|pdopt)")),
    Sign("llama.cpp", re.compile(r"(.+/)?.+\.(gguf|ggml)")),
    Sign("ONNX", re.compile(r"(.+/)?.+\.onnx")),
    Sign("Flax", re.compile(r"(.+/)?flax_model[^/]*\.msgpack")),
    Sign("MXNet", re.compile(r"(.+/)?.+-\d{4}\.params")),
)
"""Files of frameworks other than PyTorch."""


def described(folder: Path, links: str = "") -> str:
    """Say in one line what a folder is that no format recognises, given the links in it that were not followed."""
    if links:
        return f"no checkpoint that ckptools knows in this folder, and {links}"
    names = list(_names(folder))
    unknown = "no checkpoint that ckptools knows in this folder; `ckptools formats` lists what it reads"
    for sign in FOREIGN:
        name = next(filter(sign.pattern.fullmatch, names), None)
        if name is not None:
            shown = describe_for_error(name.rpartition("/")[2])
            return f"looks like {sign.writer} by {shown}, which is no PyTorch checkpoint and is not read; {unknown}"
    return f"{unknown}; {ASK}" if names else unknown


def check_nothing_lacks(folder: Path) -> None:
    """Refuse a folder that lacks the file by which a format recognises it.

    Raises:
        UnknownFormatError: it does; the message says whose it is and which file.
    """
    names = list(_names(folder))
    for sign in LACKING:
        if any(map(sign.pattern.fullmatch, names)) and not (folder / sign.missing).exists():
            text = f"looks like {sign.writer}: {sign.missing} is missing, which it writes last: {UNFINISHED}"
            raise UnknownFormatError(folder, text, "unfinished")


def _names(folder: Path) -> Iterator[str]:
    """Paths of files below a folder, the nearest first; no link is followed, and no store is listed."""
    if is_remote(folder):
        return
    ahead, seen = deque([(folder, "", 0)]), 0
    while ahead and seen < MAX_ENTRIES:
        at, above, depth = ahead.popleft()
        with suppress(OSError):
            for entry in islice(sorted(at.iterdir()), MAX_ENTRIES):
                seen += 1
                if entry.is_dir() and not entry.is_symlink() and depth < MAX_DEPTH:
                    ahead.append((entry, f"{above}{entry.name}/", depth + 1))
                elif entry.is_file():
                    yield f"{above}{entry.name}"
