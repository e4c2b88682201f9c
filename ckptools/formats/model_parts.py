"""Parts of one model that cannot be joined by their files alone: each rank's file of another framework, by name.

vLLM's and SGLang's `model-rank-0-part-0.safetensors`, DeepSeek's `model0-mp4.safetensors`, TensorRT-LLM's
`rank0.safetensors`, Fast-LLM's `rank_0.safetensors`, NeMo's `mp_rank_00/model_weights.ckpt`, in a folder or in a
`.nemo`. Slices look like whole tensors, so the contents are shown side by side, each under its file's name, and the
model is never called whole. A user who knows along which dimensions they were cut can join them with a rule file
(`--rules`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError
from ckptools.formats.options import Options
from ckptools.formats.rank_search.one_of_several import DIGITS, PartFiles, not_joined, parts_in, ranks_of
from ckptools.formats.rank_search.rank_groups import are_of_one
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, was_read
from ckptools.formats.shared.tensor_parallel import (
    ALL_RANKS,
    GivenRules,
    RankPiece,
    UnlikeError,
    given_rule,
    join,
    no_rule,
    read_rules,
    unjoined_tensor,
)
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import FILES_FOUND, Fact, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.pickles import reader
from ckptools.rules.files import missing
from ckptools.text import plural
from ckptools.training_state.optimizers import AS_SAVED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

NAME = "model_parts"
READS = "files of other frameworks that are parts of one model (vLLM, TensorRT-LLM, DeepSeek, NeMo): joined by --rules"
KNOWN_BY = (
    "a folder whose files are called model-rank-0-part-0, model0-mp4, rank0.safetensors, x-shard0, tp_00, mp_rank_00/; "
    "a .nemo of several ranks"
)
TRIED = ()
BY_HAND = ("vLLM", "SGLang", "TensorRT-LLM", "DeepSeek", "Fast-LLM", "NeMo")
JOINS = ()

WORLD = re.compile(r"model\d+-mp(\d{1,4})")
"""A name that states the number of ranks."""

MAX_READ = 64
"""At most this many files have their structure read."""


def detect(path: Path) -> bool:
    """Whether a folder's files of weights are all parts by their names, without a statement of how they join.

    A NeMo `.nemo` of several ranks is detected by `torch_file`.
    """
    found = parts_in(path) if path.is_dir() else None
    return found is not None and not (found.files[0].suffix != ".safetensors" and are_of_one(found.files))


def read(path: Path, options: Options) -> Checkpoint:
    """Open the parts in a folder or in a `.nemo`, side by side.

    Raises:
        ReadError: none of them can be read.
    """
    builder = CheckpointBuilder(NAME, path)
    parts = _read_nemo(builder) if path.is_file() else _read(builder, options)
    joined = _joined(builder, parts, options) if options.rules else None
    if joined is None:
        builder.problems.insert(0, Problem(Code.ONE_OF_SEVERAL, not_joined(parts.named)))
    tree = {name: one.tree for name, one in parts.found.items()} if joined is None else joined
    count = f"a .nemo of {plural(len(parts.found), 'rank')}" if path.is_file() else plural(len(builder.files), "file")
    return builder.checkpoint(
        name=path.absolute().name,
        saved_as=f"{count}, each a part of the model{'' if joined is None else ', joined by --rules'}",
        tree=tree,
        world_size=Fact(parts.world or len(parts.named.files), (parts.stated_by or FILES_FOUND,)),
        step=find_step(path, find_sections(next(iter(parts.found.values())).tree)),
        module_order=AS_SAVED,
        bytes_expected=None,
    )


class _Part(NamedTuple):
    """The structure of one part; for a part inside a `.nemo`, its path continues the tar's path."""

    path: Path
    tree: Any


class _ReadParts(NamedTuple):
    """The parts of a model.

    Attributes:
        named: all of them, by their names.
        found: the readable ones by name, or by folder if all have one name.
        world: number of ranks, if stated.
        stated_by: the source of that number; "" if it is not stated.
    """

    named: PartFiles
    found: dict[str, _Part]
    world: int | None
    stated_by: str


def _read(builder: CheckpointBuilder, options: Options) -> _ReadParts:
    from ckptools.formats.hugging_face.model import read_weights

    parts = parts_in(builder.path)
    if parts is None:
        raise ReadError(builder.path, "holds no parts of a model")
    found: dict[str, _Part] = {}
    error: ReadError | None = None
    for path in parts.files[:MAX_READ]:
        try:
            one = read_weights(path, options)
            builder.files.append(RankFile(path, None, "", "read", one.nbytes, one.modified))
            found[_name(path, parts)] = _Part(path, one.tree)
            builder.add_read(1, one.bytes_read, one.names)
        except ReadError as failed:
            error = failed
            builder.add_fault(path, failed)
    if not found:
        raise error or ReadError(builder.path, "holds nothing that can be read")
    stated = WORLD.search(parts.files[0].name)
    return _ReadParts(parts, found, int(stated[1]) if stated else None, "file names" if stated else "")


def _read_nemo(builder: CheckpointBuilder) -> _ReadParts:
    """Read the parts in a `.nemo`, which is one file."""
    from ckptools.pickles.tar_checkpoint import NEMO_CONFIG

    saved, world = reader.read_ranks(builder.path)
    first = next(iter(saved.values()))
    builder.add_read(1, first.bytes_read, (name for one in saved.values() for name in one.names))
    parts = PartFiles(tuple(builder.path / name for name in saved), DIGITS.sub("*", next(iter(saved))))
    found = {_name(path, parts): _Part(path, one.tree) for path, one in zip(parts.files, saved.values(), strict=True)}
    builder.files.append(was_read(first))
    return _ReadParts(parts, found, world, "" if world is None else NEMO_CONFIG)


def _name(path: Path, parts: PartFiles) -> str:
    return path.parent.name if "/" in parts.pattern else path.stem


# -- parts joined by the user's rules ----------------------------------------------------------------------------------


def _joined(builder: CheckpointBuilder, parts: _ReadParts, options: Options) -> dict[str, Any] | None:
    """The model, joined by the user's rules; None if the files are not the flat state dicts of ranks."""
    ranks, of_rank = ranks_of(parts.named), dict[int, dict[str, Any]]()
    if ranks is None:
        return None
    for one in parts.found.values():
        names = _state_dict(one.tree)
        if names is None or not of_rank.setdefault(ranks[one.path], {}).keys().isdisjoint(names):
            return None
        of_rank[ranks[one.path]] |= names
    least = 1 + max(ranks.values())
    world = max(parts.world or least, least)
    lost = [rank for rank in range(min(world, MAX_READ)) if rank not in ranks.values()]
    builder.problems += (missing("file of this rank", rank, kind="") for rank in lost)
    if parts.world is None:
        builder.problems.append(Problem(Code.ONE_OF_SEVERAL, ALL_RANKS, severity="warning"))
    elif parts.world < least:
        text = f"says that there are {parts.world} ranks, and rank {least - 1} is here"
        builder.problems.append(Problem(Code.WORLD_SIZES_DISAGREE, text))
    rules = read_rules(options.rules)
    names = dict.fromkeys(name for own in of_rank.values() for name in own)
    return {name: _weight(builder, name, of_rank, rules, world) for name in names}


def _state_dict(tree: Any) -> dict[str, Any] | None:
    """A flat state dict, or the only one in a file."""
    while isinstance(tree, dict) and not any(isinstance(value, Tensor) for value in tree.values()):
        inner = [value for value in tree.values() if isinstance(value, dict)]
        tree = inner[0] if len(inner) == 1 else None
    return tree if isinstance(tree, dict) and all(isinstance(name, str) for name in tree) else None


def _weight(
    builder: CheckpointBuilder, name: str, of_rank: Mapping[int, Mapping[str, Any]], rules: GivenRules, world: int
) -> Any:
    """The value of a name, joined from the ranks if there is a rule and the shapes agree."""
    values = {rank: own[name] for rank, own in sorted(of_rank.items()) if name in own}
    tensors = {rank: value for rank, value in values.items() if isinstance(value, Tensor)}
    rule = given_rule(rules, name)
    if not tensors:
        return next(iter(values.values()))
    if rule is None:
        return unjoined_tensor(tensors.items(), no_rule())
    ranks = range(world) if rule.dim is not None else tensors
    try:
        return join([RankPiece(rank, rank, tensors.get(rank)) for rank in ranks], rule, world)
    except UnlikeError as error:
        builder.problems.append(Problem(Code.LAYOUT_DISAGREES, str(error), None, name))
        return unjoined_tensor(tensors.items(), str(error))
