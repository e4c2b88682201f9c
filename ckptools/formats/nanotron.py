"""Nanotron: recognised, so that no file of it is taken for a model, and not read.

    checkpoint_metadata.json                         version, tp, dp, steps
    model/model/decoder/0/pp_block/attn/qkv_proj/    a file for each parameter, and for each slice of one:
        model_weight_pp-rank-0-of-2_tp-rank-1-of-2.safetensors
    optimizer/  lr_scheduler/  random/

Source: nanotron/serialize/main.py and weights.py of 0.4; checked on a checkpoint of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from ckptools.errors import UnknownFormatError
from ckptools.formats.options import Options

NAME = "nanotron"
READS = "Nanotron: recognised, and refused by its name; its own tools convert it"
KNOWN_BY = "checkpoint_metadata.json beside model/; any file below it"

METADATA = "checkpoint_metadata.json"
LEVELS = 12
"""Most folders above a file that are looked at: a module's file lies as deep as its name has parts."""


def detect(path: Path) -> bool:
    """A folder with Nanotron's metadata beside `model`, or what lies below one."""
    return _root(path) is not None


def read(path: Path, options: Options) -> NoReturn:
    """Refuse it.

    Raises:
        UnknownFormatError: always.
    """
    root = _root(path) or path
    where = "is" if root == path else f"is part of {root.name},"
    raise UnknownFormatError(
        path, f"{where} a Nanotron checkpoint, which ckptools does not read; its converters write Hugging Face's format"
    )


def _root(path: Path) -> Path | None:
    """The checkpoint's folder, for a path in it."""
    folders = [path, *path.absolute().parents[:LEVELS]]
    return next((f for f in folders if (f / METADATA).is_file() and (f / "model").is_dir()), None)
