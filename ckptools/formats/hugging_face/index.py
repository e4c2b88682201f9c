"""The index beside a model in several files, which maps each tensor to its file, and the version in the config.

    {"metadata": {"total_size": 132960, "total_parameters": 66480},
     "weight_map": {"lm_head.weight": "model-00004-of-00004.safetensors", …}}

`total_size` counts the bytes of the tensors, tied ones once, and a bool as an eighth of a byte. Source:
transformers/modeling_utils.py, huggingface_hub/serialization, torch/distributed/checkpoint/hf_storage.py.

`config.json` states which version of transformers saved the model; for a model from another writer (vLLM, a converter),
which version the config came from. Nothing else of it is read. Source: transformers/configuration_utils.py,
`PretrainedConfig.to_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.json_file import read_json
from ckptools.files.location import is_plain_name, leads_out
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.values import describe_for_error
from ckptools.training_state.sections import storage_identity

MAX_NAMED = 3
MAX_SIZE = 1 << 62


@dataclass(frozen=True)
class Index:
    """An index: which file holds each tensor.

    Attributes:
        path: the file.
        weight_map: tensor to the name of its file.
        total_size: bytes of all tensors; None when not stated.
    """

    path: Path
    weight_map: Mapping[str, str]
    total_size: int | None

    @property
    def files(self) -> list[str]:
        """The names of its files, sorted."""
        return sorted(set(self.weight_map.values()))


def read_index(path: Path) -> Index:
    """Read an index; its names must be plain names of files beside it.

    Raises:
        ReadError: it is no index.
        UnsafePathError: it names a file elsewhere.
    """
    found = read_json(path)
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ReadError(path, "expected a `weight_map` of tensor names to file names; no index of a model")
    for name in sorted(set(weight_map.values())):
        if not is_plain_name(name):
            raise UnsafePathError(path, f"names the file {describe_for_error(name)}; only files beside it are read")
    return Index(path, weight_map, _total_size(found.get("metadata")))


def _total_size(metadata: Any) -> int | None:
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(total) if isinstance(total, (int, float)) and 0 <= total < MAX_SIZE else None


def check_index(index: Index, files: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """Problems where an index contradicts its files.

    Args:
        index: the index.
        files: the tensors by name of every file that was read.
    """
    where = {name: file for file, tensors in files.items() for name in tensors}
    lacking = [name for name in index.weight_map if name not in where]
    moved = [name for name, file in index.weight_map.items() if where.get(name, file) != file]
    unlisted = [name for name in where if name not in index.weight_map]
    source = index.path.name
    problems = [Problem(Code.MODEL_PART_MISSING, _why_lacking(index, name, files), None, name) for name in lacking]
    if moved:
        text = f"{source} says that {_some(moved)} is in {index.weight_map[moved[0]]}, found in {where[moved[0]]}"
        problems.append(Problem(Code.NAME_CONTRADICTS, text))
    if unlisted:
        text = f"{_some(unlisted)} in {where[unlisted[0]]}, and {source} does not name it; read all the same"
        problems.append(Problem(Code.NAME_CONTRADICTS, text))
    return problems


def _why_lacking(index: Index, name: str, files: Mapping[str, Any]) -> str:
    file = index.weight_map[name]
    why = "which holds no such tensor" if file in files else "which is not here or damaged"
    return f"{index.path.name} says that it is in {file}, {why}"


def _some(names: list[str]) -> str:
    listed = ", ".join(describe_for_error(name) for name in names[:MAX_NAMED])
    return f"{len(names)} tensor{'' if len(names) == 1 else 's'} ({listed}{', …' if len(names) > MAX_NAMED else ''})"


def check_total_size(index: Index, tensors: Iterable[Tensor]) -> list[Problem]:
    """A problem where an index's `total_size` is not the size of its tensors, with tied ones counted once or each."""
    every = list(tensors)
    most = sum(t.nbytes for t in every)
    once = {storage_identity(t) or id(t): t for t in every}.values()
    least = sum(-(-t.nbytes // 8) if t.dtype == "bool" else t.nbytes for t in once)
    if index.total_size is None or least <= index.total_size <= most:
        return []
    text = f"{index.path.name} says total_size {index.total_size}, and the tensors have {most} bytes"
    return [Problem(Code.NAME_CONTRADICTS, text)]


# -- config -----------------------------------------------------------------------------------------------------------


CONFIG = "config.json"
VERSION = "transformers_version"
MAX_VERSION = 60
"""Most characters of a version."""


def stated_versions(folder: Path, follow_symlinks: bool) -> tuple[dict[str, str], list[Problem]]:
    """The version in a folder's config, by its key; and a note where the config cannot be read.

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
