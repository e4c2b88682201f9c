"""FSDP of fairscale and torch_xla under their own names: one torch.save file per rank, with `shard_metadata`.

    checkpoint_5-shard0.pt                         metaseq, fairseq
    checkpoint_5-model_part-0-shard0.pt            the same under model parallelism: each part by itself
    final_ckpt_rank-00000000-of-00000004.pth       torch_xla's examples

Files with other rank names, such as `model-rank0.pt`, are found likewise; files that the user declares as rank files
(`--ranks`) need no such name. `wrapped_shards` describes the layout. Parts of a model-parallel run are slices that the
files cannot join; each is opened as a part. Source: metaseq/checkpoint_utils.py and trainer.py (`checkpoint_suffix`),
torch_xla's test/test_train_mp_mnist_fsdp_with_ckpt.py.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ckptools.errors import ReadError
from ckptools.files.opening import File, content_of, head_of, reading, tells_others
from ckptools.files.zip_archive import Container
from ckptools.formats import rank_files
from ckptools.formats.options import Options
from ckptools.formats.rank_search.rank_groups import file_matching, files_matching
from ckptools.formats.rank_search.rank_names import RankName, is_temporary
from ckptools.formats.shared.several_checkpoints import several
from ckptools.formats.wrapped_shards import SHARD_METADATA
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem, worst_first

NAME = "fsdp_shards"
READS = "FSDP of fairscale (metaseq, fairseq, VISSL) and torch_xla: a file per rank with shard_metadata"
KNOWN_BY = "checkpoint_5-shard0.pt or x_rank-00000000-of-00000004.pth with shard_metadata in it, or a folder of such"
TRIED = ("fairscale 0.4.13",)
BY_HAND = ("torch_xla",)
JOINS = ("model", "optimizer", "rest")

NAMED = re.compile(
    r"(?P<head>.*?(?<![A-Za-z])(?:shard|rank)[-_]?)(?P<rank>\d{1,9})(?:-of-(?P<world>\d{1,9}))?(?P<tail>\.(?:pt|pth|bin|ckpt))",
    re.DOTALL,
)
MODEL_PART = re.compile(r"model_part-\d+")
WORDS = (b"param_metadata", b"shard_info")
MAX_ENTRIES = 1 << 16


MAX_TRIED = 4
"""At most this many readable files of one pattern are searched; every file of such a checkpoint has the metadata."""


def detect(path: Path) -> bool:
    """Whether a path is a file of one rank, or a folder of such files, with the metadata's words in their pickles."""
    return bool(_families(path)) if path.is_dir() else bool(_is_shard(path))


def _is_shard(path: Path) -> bool | None:
    """Whether a file has the metadata; None if it cannot be read."""
    if not NAMED.fullmatch(path.name) or not path.is_file():
        return False
    try:
        with File(path) as file:
            if content_of(head_of(file)) != "zip":
                return False
            pickle = Container(file).read("data.pkl")
    except ReadError:
        return None
    return SHARD_METADATA.encode() in pickle and any(word in pickle for word in WORDS)


def _families(folder: Path) -> dict[str, Path]:
    """One readable file of each checkpoint in a folder, by the pattern of its names."""
    with reading(folder):
        entries = sorted(islice(folder.iterdir(), MAX_ENTRIES))
    families: dict[str, Path] = {}
    others = Counter[str]()
    for path in entries:
        pattern = _pattern(path)
        if not pattern or pattern in families or others[pattern] >= MAX_TRIED:
            continue
        if is_temporary(path.name) or path.is_symlink():
            continue
        found = _is_shard(path)
        if found:
            families[pattern] = path
        others[pattern] += found is False
    return families


def _pattern(path: Path) -> str:
    """A name with `{rank}` for the rank, and `{world}` for the world size; "" for a name without a rank."""
    found = NAMED.fullmatch(path.name)
    if not found or "{" in path.name:
        return ""
    return f"{found['head']}{{rank}}{'-of-{world}' if found['world'] else ''}{found['tail']}"


def read(path: Path, options: Options) -> Checkpoint:
    """Open the checkpoint of one rank's file, or of a folder of them.

    Raises:
        ReadError: the file that the caller named, or every file of a folder, cannot be read.
        SeveralError: the folder contains several checkpoints.
        UnsafePathError: a file is a link out of the folder.
    """
    families = _families(path) if path.is_dir() else {}
    if len(families) > 1:
        raise several(path, list(families.values()))
    first = next(iter(families.values()), path)
    made = rank_files.read_group(path, first, _group(path, first, options), options)
    part = MODEL_PART.search(first.name)
    problems = made.problems
    if part:
        text = f"{part[0]} of a model-parallel run by its name; nothing in the files says how the parts join"
        problems = worst_first([Problem(Code.ONE_OF_SEVERAL, text), *problems])
    return replace(made, format=NAME, problems=problems)


def _group(path: Path, first: Path, options: Options) -> list[RankName]:
    """The files of all ranks, in rank order."""
    alone = options.only_this_file and not path.is_dir()
    if alone or not tells_others(first):
        return [file_matching(first, _pattern(first))]
    group = files_matching(first.parent, _pattern(first), follow_symlinks=True)
    for name in group:
        if name.path != path:
            options.check_link(name.path, name.path.parent)
    return group
