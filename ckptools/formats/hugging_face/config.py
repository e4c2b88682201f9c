"""Which version of transformers wrote a model: `config.json` beside it says so, as its `save_pretrained` leaves it.

Source: transformers/configuration_utils.py, `PretrainedConfig.to_dict`. Of a model that something else wrote (vLLM, a
converter) it is the version that the config was made with. Nothing else of the config is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptools.errors import ReadError
from ckptools.files.json_file import read_json
from ckptools.files.location import leads_out
from ckptools.model.problems import Code, Problem

CONFIG = "config.json"
VERSION = "transformers_version"
MAX_VERSION = 60
"""Characters; more are no version."""


def stated_versions(folder: Path, follow_symlinks: bool) -> tuple[dict[str, str], list[Problem]]:
    """The version that the config in a folder states, by where it stands; and a note where the config cannot be read.

    Args:
        folder: where the weights are.
        follow_symlinks: whether a config behind a link out of the folder is read.
    """
    path = folder / CONFIG
    if not path.is_file() or (leads_out(path, folder) and not follow_symlinks):
        return {}, []
    try:
        config = read_json(path)
    except ReadError as error:
        return {}, [Problem(Code.NOT_READ, f"{CONFIG}: {error.reason}", severity="note", files=(CONFIG,))]
    version = config.get(VERSION) if isinstance(config, Mapping) else None
    if not isinstance(version, str) or not 0 < len(version) < MAX_VERSION:
        return {}, []
    return {f"{CONFIG}.{VERSION}": version}, []
