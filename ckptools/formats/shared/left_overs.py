"""Names of what is written before it gets its own name: left over where the write was interrupted.

    step-8.tmp, .metadata.tmp, __0_0.distcp.tmp     DCP's FileSystemWriter, and everybody who renames when done
    .ckptools-RUN, .model.pt.1a2b3c4d.partial       ckptools create; ckptools consolidate
    tmp-checkpoint-500                              transformers' Trainer, 4.37 and 4.38
    model.safetensors.incomplete                    huggingface_hub, while it downloads

Source: torch/distributed/checkpoint/filesystem.py, transformers/trainer.py, huggingface_hub/file_download.py.
"""

from __future__ import annotations

import re

TEMPORARY = re.compile(
    r".*\.(?:tmp|partial|incomplete)|.*\.tmp[._-][\w.-]*|\.ckptools-.*|tmp-checkpoint-\d+|\.tmp[._-].*", re.DOTALL
)


def is_temporary(name: str) -> bool:
    """Whether a file or folder of this name is not finished."""
    return TEMPORARY.fullmatch(name) is not None
