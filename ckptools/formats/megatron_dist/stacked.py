"""Weights that Megatron stores stacked or in parts: layers and experts as one tensor, a fused weight as several.

    decoder.layers.mlp.linear_fc1.weight                   [layers, …]: the layers of a block that are all alike
    decoder.layers.1.mlp.experts.experts.linear_fc1.weight [experts, …]: one layer's experts, by their global number
    decoder.layers.0.mlp.linear_fc1.weight_w, …weight_v    the gates and the ups of a gated layer
    decoder.layers.0.self_attention.in_proj.weight.query   a fused projection of a gated delta net

With `singleton_local_shards` layers and experts have keys of their own (`experts.experts.3.linear_fc1.weight`), which
are the names that stacked ones get here. Parts are joined along dimension 0, in the order of the module. Source:
megatron/core/transformer/transformer_block.py, moe/experts.py, mlp.py (`apply_swiglu_sharded_factory`),
fsdp_dtensor_checkpoint.py, ssm/gated_delta_net.py (core 0.16.1 and 0.20).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckptools.formats.shared.merge import MIN_COLUMNS
from ckptools.model.item_shards import Holding, in_columns
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.shard import Shard, in_rank_order
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor

LAYERS = re.compile(r"(?P<block>(?:.*?\.)?layers)\.(?P<rest>(?!\d+\.).+)", re.DOTALL)
EXPERTS = re.compile(r"(?P<block>(?P<mlp>.+\.mlp)\.experts\.experts)\.(?P<rest>linear_fc[12]\..+)", re.DOTALL)

PART = re.compile(
    r"(?P<whole>.+\.linear_fc1\.(?:weight|bias)\d*)_(?P<of_mlp>[wv])"
    r"|(?P<projection>.+\.in_proj\.weight|.+\.conv1d\.(?:weight|bias))\.(?P<of_projection>\w+)",
    re.DOTALL,
)
GATED = ("w", "v")
DELTA_NET = {"in_proj": ("query", "key", "value", "z", "beta", "alpha"), "conv1d": ("query", "key", "value")}

MAX_STACKED = 1 << 16
MAX_MADE = 1_000_000
"""Most tensors that stacked ones are split into; a forged first dimension asks for more."""

Stacks = Mapping[str, int]
"""Number of layers or experts of each block that is stored stacked."""


def count_stacks(
    pattern: re.Pattern[str], tensors: Mapping[str, Tensor], stated: Mapping[str, int]
) -> tuple[dict[str, int], list[str]]:
    """The number of layers or experts of each stacked block; and the blocks whose first dimensions do not show one.

    `stated` has numbers that are known otherwise.
    """
    found: dict[str, set[int]] = {}
    for name, tensor in tensors.items():
        stacked = pattern.fullmatch(name)
        if stacked:
            found.setdefault(stacked["block"], set()).add(tensor.shape[0] if tensor.shape else 0)
    sure = {block: n for block, (n, *more) in found.items() if not more and stated.get(block, n) == n}
    counts = {block: n for block, n in sure.items() if 0 < n < MAX_STACKED}
    blocks = (stacked["block"] for name in tensors if (stacked := pattern.fullmatch(name)))
    if sum(counts.get(block, 0) for block in blocks) > MAX_MADE:
        counts = {}
    return counts, [block for block in found if block not in counts]


def split_stacks(pattern: re.Pattern[str], tensors: Mapping[str, Tensor], counts: Stacks) -> dict[str, Tensor]:
    """Split stacked tensors, with names one by one from where a block begins."""
    named: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        stacked = pattern.fullmatch(name)
        if stacked and stacked["block"] in counts:
            named.setdefault(stacked["block"], {})[stacked["rest"]] = tensor
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stacked = pattern.fullmatch(name)
        if not stacked or stacked["block"] not in counts:
            whole[name] = tensor
        elif stacked["block"] in named:
            whole |= dict(_block(stacked["block"], counts[stacked["block"]], named.pop(stacked["block"])))
    return whole


def _block(block: str, number: int, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    # State that does not count the same layers stays as stored.
    rows = {rest: _rows_of(t) for rest, t in named.items() if t.shape[:1] == (number,)}
    yield from ((f"{block}.{rest}", t) for rest, t in named.items() if rest not in rows)
    for n in range(number):
        yield from ((f"{block}.{n}.{rest}", every[n]) for rest, every in rows.items())


def _rows_of(tensor: Tensor) -> list[Tensor]:
    """The rows of a tensor whose first dimension counts layers or experts."""
    shards: list[list[Shard]] = [[] for _ in range(tensor.shape[0])]
    for shard in tensor.shards:
        first, box = shard.box.offsets[0], Box(shard.box.offsets[1:], shard.box.sizes[1:])
        for n in range(first, min(first + shard.box.sizes[0], len(shards))):
            shards[n].append(Shard(box, shard.rank, _row(shard.source, n - first) if shard.source else None))
    rows, whole, files = [], Box.whole(tensor.shape[1:]), Holding()
    for mine in shards:
        plain = tensor.kind == "chunks" and all(s.box == whole for s in mine)
        kind = "plain" if plain else tensor.kind
        kept = in_columns(mine, tensor.dtype, files) if len(mine) >= MIN_COLUMNS else tuple(mine)
        rows.append(replace(tensor, shape=whole.sizes, shards=kept, kind=kind))
    return rows


def _row(source: Source, at: int) -> Source:
    first = source.part(Box((at, *(0,) * (len(source.shape) - 1)), (1, *source.shape[1:])))
    return first._replace(shape=source.shape[1:], strides=source.strides[1:])


# -- parts of a fused weight ------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A part's key, taken apart: the fused weight's name, this part's word, and all of them in order."""

    whole: str
    word: str
    words: tuple[str, ...]


def part_of(name: str) -> Part | None:
    """What a key is a part of; None for a whole weight."""
    found = PART.fullmatch(name)
    if found is None:
        return None
    if found["whole"]:
        return Part(found["whole"], found["of_mlp"], GATED)
    words = DELTA_NET["in_proj" if ".in_proj." in found["projection"] else "conv1d"]
    return Part(found["projection"], found["of_projection"], words) if found["of_projection"] in words else None


def join_parts(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Join the parts of fused weights where the first one stands; and the parts that are absent, by weight.

    A number that each part has (`step`) is one with copies; a value that is no tensor must be equal in all.
    """
    parts = {name: part for name in values if isinstance(name, str) and (part := part_of(name)) is not None}
    named = {(part.whole, part.word): name for name, part in parts.items()}
    joined: dict[str, Any] = {}
    lacking: dict[str, list[str]] = {}
    for name, value in values.items():
        part = parts.get(name)
        if part is None:
            joined[name] = value
            continue
        keys = [named.get((part.whole, word)) for word in part.words]
        whole = None if None in keys else _joined([values[key] for key in keys if key is not None])
        if whole is None or part.whole in values:
            absent = [word for word, key in zip(part.words, keys, strict=True) if key is None]
            lacking |= {part.whole: absent} if absent else {}
            joined[name] = value
        else:
            joined.setdefault(part.whole, whole)
    return joined, lacking


def _joined(parts: list[Any]) -> Any:
    """One value of the parts' values; None where they do not fit."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) != len(parts):
        return parts[0] if all(type(p) is type(parts[0]) and p == parts[0] for p in parts) else None
    if len({(t.dtype, len(t.shape), t.shape[1:], t.note) for t in tensors}) != 1 or any(t.placements for t in tensors):
        return None
    if not tensors[0].shape:  # copies of one number, which are compared like those on several ranks
        return replace(tensors[0], shards=in_rank_order(s for t in tensors for s in t.shards))
    shards: list[Shard] = []
    at = 0
    for tensor in tensors:
        for shard in tensor.shards:
            box = Box((shard.box.offsets[0] + at, *shard.box.offsets[1:]), shard.box.sizes)
            shards.append(shard._replace(box=box))
        at += tensor.shape[0]
    return replace(tensors[0], shape=(at, *tensors[0].shape[1:]), shards=in_rank_order(shards), kind="chunks")


def notes_on_stacks(blocks: list[str], what: str) -> Iterator[Problem]:
    """Notes on blocks whose weights stay as stored."""
    for block in blocks:
        text = f"{block}: their first dimension does not show the number of {what}; names are as stored"
        yield Problem(Code.KEPT_AS_SAVED, text)


def missing_parts(lacking: Mapping[str, list[str]]) -> Iterator[Problem]:
    """Problems with fused weights that lack a part."""
    for name, absent in lacking.items():
        text = f"stored in parts, of which {', '.join(absent)} has no key in the metadata"
        yield Problem(Code.MODEL_PART_MISSING, text, None, f"model.{name}")


def join_in_tree(tree: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[Problem]]:
    """Join fused weights in nested state, as `--ckpt-format fsdp_dtensor` saves it: in the models and the optimizer.

    Names are not stacked there, and experts have their number in the whole model already (`weight3_w`).
    """
    found = dict(tree)
    problems: list[Problem] = []
    for key, value in tree.items():
        if re.fullmatch(r"model\d*", str(key)) and isinstance(value, Mapping):
            found[key], lacking = join_parts(value)
            problems += missing_parts(lacking)
    optimizer = tree.get("optimizer")
    if isinstance(optimizer, Mapping):
        state = optimizer.get("state")
        if isinstance(state, Mapping) and any(part_of(str(name)) for name in state):
            found["optimizer"] = {**optimizer, "state": _by_name(state)}
    return found, problems


def _by_name(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state of each weight, slot by slot."""
    slots = dict.fromkeys(slot for entry in state.values() if isinstance(entry, Mapping) for slot in entry)
    found = {name: entry for name, entry in state.items() if not isinstance(entry, Mapping)}
    for slot in slots:
        entries = {name: entry[slot] for name, entry in state.items() if isinstance(entry, Mapping) and slot in entry}
        for name, value in join_parts(entries)[0].items():
            found.setdefault(name, {})[slot] = value
    return found
