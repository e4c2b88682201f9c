"""Signs that a file with plain tensors is a part of a model that is not joined here.

They are its name (`part_names`), its content (fairseq's `shard_metadata`, FSDP's `flat_param_0`), and files beside it:
TensorRT-LLM's `config.json` with a mapping of several ranks, or a `metadata.pkl` or `metadata.yaml` with words for
ranks. Slices look like whole tensors, so there are no other signs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.file_type import content_of, head_of
from ckptools.files.json_file import read_json
from ckptools.files.location import is_remote
from ckptools.files.opening import File
from ckptools.files.zip_archive import Container
from ckptools.formats.rank_search.part_names import NUMBER, PartFiles, is_slice, not_joined, parts_with, weights_in
from ckptools.formats.shared.several import several
from ckptools.model.problems import Code, Problem
from ckptools.model.rank_vote import same_records
from ckptools.model.tree import tensors_in
from ckptools.pickles import reader
from ckptools.text import plural
from ckptools.training_state.sections import Section

FLAT = re.compile(r"_?flat_param(_\d+)?")
SHARDED = "shard_metadata"
"""Key that fairseq writes beside the shards of FSDP. Source: fairseq/checkpoint_utils.py."""

BESIDE = ("metadata.pkl", "metadata.yaml")
RANKS = re.compile(rb"world_?size|tensor_?parallel|tp_size|num_ranks|shard|device_?mesh", re.IGNORECASE)
MAX_READ = 1 << 20
MIN_TELLING = 16
"""Fewer elements than this prove nothing, whether their bytes are equal or not."""

MAPPING = ("world_size", "tp_size", "pp_size")


def signs_of_a_part(path: Path, tree: Any, beside: bool = True) -> Iterator[Problem]:
    """Yield the first sign that a file is a part.

    Args:
        path: the file.
        tree: its content; no tensor of it is marked as a shard.
        beside: look at other files in the folder.
    """
    why = _by_name(path, tree) or _by_content(tree) or (_by_what_is_beside(path) if beside else "")
    if why:
        yield Problem(Code.ONE_OF_SEVERAL, why)


def parts_by_rank(path: Path, sections: Sequence[Section]) -> Iterator[Problem]:
    """Yield signs that the plain tensors of rank files are slices, not replicas.

    Args:
        path: a rank file.
        sections: of all ranks' files, merged; no tensor of it is marked as a shard.
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


def parts_by_content(folder: Path) -> PartFiles | None:
    """The files in a folder that are parts by their own content, numbered from 0; None where it holds others too.

    Raises:
        SeveralError: it holds parts of several models.
    """
    families: dict[str, list[Path]] = {}
    for path in weights_in(folder):
        numbers = list(NUMBER.finditer(path.stem))
        if not numbers or path.suffix == ".safetensors":
            return None
        last = numbers[-1]
        families.setdefault(f"{path.name[: last.start()]}*{path.name[last.end() :]}", []).append(path)
    found = [PartFiles(tuple(sorted(files, key=_last_number)), pattern) for pattern, files in families.items()]
    if not found or not all(map(_say_that_they_are, found)):
        return None
    if len(found) > 1:
        raise several(folder, [parts.files[0] for parts in found])
    return found[0]


def _last_number(path: Path) -> int:
    return int(NUMBER.findall(path.stem)[-1])


def _say_that_they_are(parts: PartFiles) -> bool:
    """Whether files are numbered from 0, and the first and the last hold one rank's part by their own content."""
    ends = (parts.files[0], parts.files[-1])
    if len(parts.files) < 2 or list(map(_last_number, parts.files)) != list(range(len(parts.files))):
        return False
    try:
        if not all(path.is_file() and not path.is_symlink() and _has_words_of_parts(path) for path in ends):
            return False
        trees = [reader.read(path).tree for path in ends]
    except ReadError:
        return False
    whole = [t for tree in trees for _, t in tensors_in(tree) if not t.sharded]
    return bool(whole) and all(map(_by_content, trees))


def _has_words_of_parts(path: Path) -> bool:
    """Whether the pickle of a file has a name that `_by_content` looks for; of what is no zip archive it may have."""
    with File(path) as file:
        if content_of(head_of(file)) != "zip":
            return True
        pickle = Container(file).read("data.pkl")
    return any(word.encode() in pickle for word in (SHARDED, "flat_param"))


def _by_name(path: Path, tree: Any) -> str:
    parts = parts_with(path)
    if parts is None or any("lora" in str(key).lower() for key in tree if isinstance(tree, Mapping)):
        return ""
    return not_joined(parts)


def _by_content(tree: Any) -> str:
    """Why a file is one rank's by its own content; "" where that says nothing."""
    if isinstance(tree, Mapping) and SHARDED in tree:
        return f"holds one rank's shards by its {SHARDED}; the others' files are needed, and how they join is not known"
    for key, _ in tensors_in(tree):
        last = str(key[-1]).rpartition(".")[2] if key else ""
        if FLAT.fullmatch(last):
            return f"holds one rank's part of flattened parameters ({last}), without their shapes and names"
    return ""


def _by_what_is_beside(path: Path) -> str:
    if is_remote(path):  # in a store only files that were named are fetched
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
    """The number of ranks in TensorRT-LLM's configuration; 1 where it has none."""
    with suppress(ReadError, OSError):
        if config.is_file() and not config.is_symlink():
            mapping = read_json(config).get("mapping")
            if isinstance(mapping, Mapping):
                return max([n for name in MAPPING if type(n := mapping.get(name)) is int], default=1)
    return 1
