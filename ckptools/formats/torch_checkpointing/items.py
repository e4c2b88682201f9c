"""The files of items: a rank's tree of an item, with its tensors in their places.

A safetensors file has a rank's local tensors under the keys of their paths, joined by dots. Which path a name is, and
which box of which tensor, only the metadata says. Source: torch_checkpointing/checkpoint_layout.py
(`SafetensorsSerialization.prepare_tensors_for_save`, `default_torch_layout_info`).

Param groups: safetensors hold only tensors, so an optimizer's state in them has its groups in another item.
`param_names` show which optimizer that is (`optimizer_transform_pre` keys the state by them): they have every name of
the state. Source: torch_checkpointing/state_transformations.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError
from ckptools.files.opening import File, reading
from ckptools.files.safetensors_header import HeaderEntry, read_header, source_of
from ckptools.formats.shared.merge import Merge, put
from ckptools.formats.torch_checkpointing.metadata import METADATA, ItemMetadata, Metadata, Sharding
from ckptools.model.cover import cover_problem
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.shard import Shard, in_rank_order
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of, leaf_at
from ckptools.model.values import Absent, describe_for_error
from ckptools.text import first_few

FILE = re.compile(r"(?P<item>.+)_(?P<rank>\d{1,7})\.(?P<kind>pt|safetensors|json)", re.DOTALL)
MAX_GAPS = 100
"""At most this many tensors with gaps are named."""

UNPLACED = f"only {METADATA} says which part of which tensor a rank's piece is, and it does not say so here"


class ItemFile(NamedTuple):
    """A file of one item of one rank, which may be missing: `pt`, `safetensors`, `json`, or `raw` for other bytes."""

    path: Path
    item: str
    rank: int
    kind: str


def parse(path: Path) -> ItemFile | None:
    """Parse the usual name of an item's file; None when it is none."""
    found = FILE.fullmatch(path.name)
    return ItemFile(path, found["item"], int(found["rank"]), found["kind"]) if found else None


def named_files(folder: Path, metadata: Metadata | None) -> dict[str, dict[int, ItemFile]]:
    """The files by item and rank: those in the metadata, and those in the folder with the usual names."""
    found: dict[str, dict[int, ItemFile]] = {}
    for name, item in metadata.items.items() if metadata else ():
        for rank in sorted({*item.ranks(), *item.files}):
            file, kind = item.files.get(rank, (f"{name}_{rank}.pt", "pt"))
            found.setdefault(name, {})[rank] = ItemFile(folder / file, name, rank, kind)
    named = {file.path for files in found.values() for file in files.values()}
    with reading(folder):
        here = sorted(folder.iterdir())
    for parsed in map(parse, here):
        if parsed is not None and parsed.path not in named and (not metadata or parsed.item not in metadata.items):
            found.setdefault(parsed.item, {})[parsed.rank] = parsed
    return {name: dict(sorted(files.items())) for name, files in found.items()}


def read_safetensors(path: Path, rank: int, item: ItemMetadata | None, alone: bool) -> tuple[Any, list[str], int]:
    """A rank's tree of an item in safetensors, how it contradicts the metadata, and how many bytes were read.

    Without metadata the tensors of a rank that saved `alone` are whole.

    Raises:
        ReadError: it is damaged.
    """
    tree: dict[Any, Any] = {}
    unlike: list[str] = []
    with File(path) as file:
        header = read_header(file)
        shardings = {fqn_of(key): (key, one) for key, one in item.of_rank(rank)} if item else {}
        for name, entry in header.tensors.items():
            key, sharding = shardings.get(name, ((name,), None))
            source = source_of(file, name, entry)
            if sharding is not None:
                why = _misfit(entry, sharding, rank)
                unlike += [f"{name} is {why}"] if why else []
                made = _tensor(sharding, rank, None if why else source)
            elif alone:
                made = Tensor(source.shape, source.dtype, (Shard(Box.whole(source.shape), rank, source),))
            else:
                made = Tensor(source.shape, source.dtype, (), "unreadable", note=UNPLACED)
            if not _put(tree, key, made):
                raise ReadError(path, f"{describe_for_error(name)} lies inside of another tensor")
    return tree, unlike, header.size


def _misfit(entry: HeaderEntry, sharding: Sharding, rank: int) -> str:
    """How a rank's tensor differs from its metadata; empty where it does not."""
    expected = sharding.local_shape(rank)
    if expected is None:
        fits = all(piece.local.inside(entry.shape) for piece in sharding.pieces(rank))
    else:
        fits = expected == entry.shape or not (prod(expected) or prod(entry.shape))
    if fits and entry.dtype == sharding.dtype:
        return ""
    return f"{entry.dtype} {list(entry.shape)}, expected {sharding.dtype} {list(expected or sharding.shape)}"


def _tensor(sharding: Sharding, rank: int, source: Source | None) -> Tensor:
    """A tensor as one rank has it; without its bytes where these do not fit."""
    pieces = (p for p in sharding.pieces(rank) if p.box.numel or not p.box.sizes)
    shards = tuple(Shard(p.box, rank, source.part(p.local)) for p in pieces) if source else ()
    kind, placements, mesh = sharding.described()
    return Tensor(sharding.shape, sharding.dtype, shards, kind, placements, mesh)


def _put(tree: dict[Any, Any], path: KeyPath, value: Any) -> bool:
    """Put a value at a key path, with dicts on the way; return whether the place was free."""
    *above, last = path
    for key in above:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            return False
    return last not in tree and tree.setdefault(last, value) is value


def with_absent(tree: Any, item: ItemMetadata, absent: Collection[int]) -> Any:
    """Add the pieces of ranks without a file to the merged tree of an item; changed in place."""
    for path, shardings in item.tensors.items():
        tensor = leaf_at(tree, path)
        ranks = [(rank, one) for one in shardings for rank in one.ranks if rank in absent]
        if not ranks or not isinstance(tensor, Tensor) or tensor.note:
            continue
        lost = [Shard(piece.box, rank, None) for rank, one in ranks for piece in one.pieces(rank) if piece.box.numel]
        tree = put(tree, path, with_lost(tensor, lost))
    return tree


def with_lost(tensor: Tensor, lost: Sequence[Shard]) -> Tensor:
    """Add the shards in lost files that a tensor lacks."""
    known = {(shard.rank, shard.box) for shard in tensor.shards}
    more = (shard for shard in lost if (shard.rank, shard.box) not in known)
    return replace(tensor, shards=in_rank_order((*tensor.shards, *more)))


def check_cover(tensors: Iterable[tuple[KeyPath, Tensor]]) -> Iterator[Problem]:
    """Problems of incomplete tensors; of many, the first by name and the number of the others."""
    found = (cover_problem(t, fqn_of(path)) for path, t in tensors if not t.note and t.kind != "meta")
    gaps = [problem for problem in found if problem is not None]
    yield from gaps[:MAX_GAPS]
    if len(gaps) > MAX_GAPS:
        yield Problem(Code.TENSOR_GAP, f"{len(gaps) - MAX_GAPS} more tensors have gaps")


def check_against(tree: Any, item: ItemMetadata, rank: int) -> list[str]:
    """Tensors of the metadata that a rank's tree lacks, or has in another shape or dtype."""
    wrong: list[str] = []
    for path, sharding in item.of_rank(rank):
        found = leaf_at(tree, path)
        if found is None:
            wrong.append(f"{fqn_of(path)} is not in it")
        elif isinstance(found, Tensor) and not found.note:
            unlike = (found.shape, found.dtype) != (sharding.shape, sharding.dtype)
            says = f"{found.dtype} {list(found.shape)}, {METADATA} says {sharding.dtype} {list(sharding.shape)}"
            wrong += [f"{fqn_of(path)} is {says}"] if unlike else []
    return wrong


# -- param groups -----------------------------------------------------------------------------------------------------


STATE, GROUPS = "state", "param_groups"
VERSION = "_optimizer_state_format_version"


def with_param_groups(ranked: Sequence[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    """Each rank's items, with every list of param groups in the one optimizer whose state has its names."""
    found = [pairs for _, tree in ranked if (pairs := _pairs(tree))]
    if not found or any(pairs != found[0] for pairs in found):
        return list(ranked)
    return [(rank, _joined(tree, found[0])) for rank, tree in ranked]


def _joined(tree: dict[str, Any], pairs: Mapping[str, str]) -> dict[str, Any]:
    """The items with those of `pairs`, an optimizer and its groups, in one; a rank may have lost either."""
    made = {name: value for name, value in tree.items() if name not in pairs.values()}
    for name, groups in pairs.items():
        if groups in tree:
            made[name] = {**made.get(name, {STATE: {}}), GROUPS: tree[groups]}
    return made


def _pairs(tree: Mapping[str, Any]) -> dict[str, str]:
    """Optimizers with their groups, by one rank's items; none where a list fits two states, or the other way."""
    states = {name: set(value[STATE]) for name, value in tree.items() if is_state(value)}
    lists = {name: listed for name, value in tree.items() if (listed := _names(value)) is not None}
    fitting = {group: [s for s, keys in states.items() if keys <= names] for group, names in lists.items()}
    pairs = {found[0]: group for group, found in fitting.items() if len(found) == 1}
    return pairs if len(pairs) == len(fitting) else {}


def check_groups(merge: Merge) -> Iterator[Problem]:
    """Hyperparameters that not every rank has, though all ranks' param groups are the same."""
    for path in merge.partial:
        if len(path) > 3 and path[1] == GROUPS:
            ranks = [rank for rank, value in merge.values_or_absent(path).items() if isinstance(value, Absent)]
            text = f"rank {first_few(ranks)} lacks it, and others have it"
            yield Problem(Code.COPIES_DIFFER, text, ranks[0], fqn_of(path), ranks=tuple(ranks))


def is_state(value: Any) -> bool:
    """Whether an item is an optimizer's state without its param groups."""
    return isinstance(value, Mapping) and set(value) <= {STATE, VERSION} and isinstance(value.get(STATE), Mapping)


def _names(value: Any) -> set[str] | None:
    """The names that a list of param groups has; None for anything else."""
    if not isinstance(value, list) or not value or not all(isinstance(group, Mapping) for group in value):
        return None
    names = [group.get("param_names") for group in value]
    listed = [name for some in names if isinstance(some, list) for name in some]
    good = all(isinstance(some, list) for some in names) and all(isinstance(name, str) for name in listed)
    return set(listed) if good else None
