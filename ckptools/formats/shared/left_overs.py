"""Names of what is written before it gets its own name: left over where the write was interrupted.

    step-8.tmp, .metadata.tmp, __0_0.distcp.tmp     DCP's FileSystemWriter, and everybody who renames when done
    .ckptools-RUN, .model.pt.1a2b3c4d.partial       ckptools create; ckptools consolidate
    tmp-checkpoint-500                              transformers' Trainer, 4.37 and 4.38
    model.safetensors.incomplete                    huggingface_hub, while it downloads

Source: torch/distributed/checkpoint/filesystem.py, transformers/trainer.py, huggingface_hub/file_download.py.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ckptools.files.location import is_remote

MAX_ENTRIES = 1 << 16

TEMPORARY = re.compile(
    r".*\.(?:tmp|partial|incomplete)|.*\.tmp[._-][\w.-]*|\.ckptools-.*|tmp-checkpoint-\d+|\.tmp[._-].*", re.DOTALL
)


def is_temporary(name: str) -> bool:
    """Whether a file or folder of this name is not finished."""
    return TEMPORARY.fullmatch(name) is not None


def unfinished(path: Path) -> list[str]:
    """Temporary names beside a file that is missing which its own is part of: what its writer may have left."""
    if is_remote(path):  # of a store nothing is listed for it
        return []
    with suppress(OSError):
        beside = islice(path.parent.iterdir(), MAX_ENTRIES)
        return sorted(one.name for one in beside if path.name in one.name and is_temporary(one.name))
    return []
