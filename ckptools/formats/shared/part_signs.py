"""What tells that a file with plain tensors is a part of a model that is not joined here.

Its name (`part_names`), what it says of itself (fairseq's `shard_metadata`, FSDP's `flat_param_0`), or what lies beside
it: TensorRT-LLM's `config.json` with a mapping of several ranks, a `metadata.pkl` or `metadata.yaml` that speaks of
ranks. Values that are slices look like whole ones, so that nothing else would tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.json_file import read_json
from ckptools.files.location import is_remote
from ckptools.files.opening import File
from ckptools.formats.shared.part_names import is_slice, not_joined, parts_with
from ckptools.formats.shared.same_values import same_records
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import tensors_in
from ckptools.text import plural
from ckptools.training_state.sections import Section

FLAT = re.compile(r"_?flat_param(_\d+)?")
SHARDED = "shard_metadata"
"""What fairseq writes beside the shards of FSDP. Source: fairseq/checkpoint_utils.py."""

BESIDE = ("metadata.pkl", "metadata.yaml")
RANKS = re.compile(rb"world_?size|tensor_?parallel|tp_size|num_ranks|shard|device_?mesh", re.IGNORECASE)
MAX_READ = 1 << 20
MIN_TELLING = 16
"""Elements below which equal or other bytes tell nothing."""

MAPPING = ("world_size", "tp_size", "pp_size")


def signs_of_a_part(path: Path, tree: Any, beside: bool = True) -> Iterator[Problem]:
    """Yield the first thing that tells that a file is a part of more.

    Args:
        path: the file.
        tree: what is in it; no tensor of it says that it is a shard.
        beside: look at what lies beside it.
    """
    why = _by_name(path, tree) or _by_content(tree) or (_by_what_is_beside(path) if beside else "")
    if why:
        yield Problem(Code.ONE_OF_SEVERAL, why)


def parts_by_rank(path: Path, sections: Sequence[Section]) -> Iterator[Problem]:
    """Yield what tells that the plain tensors of rank files are slices, and no replicas.

    Args:
        path: a rank file.
        sections: what all ranks' files hold, merged; no tensor of it says that it is a shard.
    """
    parts = parts_with(path) if is_slice(path) else None
    if parts is not None:
        yield Problem(Code.ONE_OF_SEVERAL, not_joined(parts))
        return
    tensors = [t for s in sections if s.kind == "model" for _, t in tensors_in(s.value)]
    other = [t for t in tensors if not same_records(t.shards)]
    if 2 * len(other) > len(tensors) and sum(t.numel for t in other) >= MIN_TELLING:
        ranks = len({s.rank for t in other for s in t.shards})
        text = (
            f"{len(other)} of {plural(len(tensors), 'tensor')} of the model have other bytes on each of {ranks} ranks"
        )
        yield Problem(Code.ONE_OF_SEVERAL, f"{text}: slices, or copies that are not of one save", severity="warning")


def _by_name(path: Path, tree: Any) -> str:
    parts = parts_with(path)
    if parts is None or any("lora" in str(key).lower() for key in tree if isinstance(tree, Mapping)):
        return ""
    return not_joined(parts)


def _by_content(tree: Any) -> str:
    """Why a file is one rank's by its own account; "" where it says nothing."""
    if isinstance(tree, Mapping) and SHARDED in tree:
        return f"holds one rank's shards by its {SHARDED}; the others' files are needed, and how they join is not known"
    for key, _ in tensors_in(tree):
        last = str(key[-1]).rpartition(".")[2] if key else ""
        if FLAT.fullmatch(last):
            return f"holds one rank's part of flattened parameters ({last}); whose shapes and names it does not tell"
    return ""


def _by_what_is_beside(path: Path) -> str:
    if is_remote(path):  # of a store nothing is fetched that was not named
        return ""
    for name in BESIDE:
        if _speaks_of_ranks(path.with_name(name)):
            return f"{name} beside it speaks of several ranks, and what this file holds of them is not known"
    ranks = _mapped_ranks(path.with_name("config.json"))
    if ranks > 1:
        return f"part of {ranks} by the mapping in config.json beside it; how they join is not known"
    return ""


def _speaks_of_ranks(path: Path) -> bool:
    with suppress(ReadError, OSError):
        if path.is_file() and not path.is_symlink():
            with File(path) as file:
                return RANKS.search(file.read(0, min(file.size, MAX_READ))) is not None
    return False


def _mapped_ranks(config: Path) -> int:
    """How many ranks TensorRT-LLM's configuration maps a model to; 1 where it does not."""
    with suppress(ReadError, OSError):
        if config.is_file() and not config.is_symlink():
            mapping = read_json(config).get("mapping")
            if isinstance(mapping, Mapping):
                return max([n for name in MAPPING if type(n := mapping.get(name)) is int], default=1)
    return 1
