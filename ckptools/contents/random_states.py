"""The states of random number generators, rank by rank, as fingerprints by which ranks are told apart."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from ckptools.files.opening import OpenFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.rows import Rows
from ckptools.model.shown import StreamRow
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, nodes_in
from ckptools.model.values import NumpyArray
from ckptools.tensor_io.stream import shard_bytes
from ckptools.training_state.sections import Section, is_gathered, sections_of_kind, stream_of


def random_states(ck: Checkpoint, names: Iterable[str] | None = None) -> dict[str, dict[Any, int]]:
    """By generator and rank, the CRC-32 of its state. A rank is None where nothing tells whose state it is.

    Args:
        ck: the checkpoint, all its ranks read.
        names: of the sections that are looked into; None for all.

    Raises:
        ReadError: a file cannot be read.
    """
    states: dict[str, dict[Any, int]] = {}
    wanted = None if names is None else set(names)
    for section in sections_of_kind(ck, "rng"):
        for stream, rank, digest in _states_of(ck, section) if wanted is None or section.name in wanted else ():
            states.setdefault(stream, {})[rank] = zlib.crc32(b"%d" % digest, states.get(stream, {}).get(rank, 0))
    return states


def stream_rows(ck: Checkpoint, names: Iterable[str]) -> Rows[StreamRow]:
    """A row for each generator whose states some sections hold.

    Raises:
        ReadError: a file cannot be read.
    """
    return Rows(
        StreamRow(stream, len(of), len(set(of.values())), {_rank(r): f"{crc:08x}" for r, crc in of.items()})
        for stream, of in random_states(ck, names).items()
    )


def _rank(rank: Any) -> str:
    return "unknown" if rank is None else str(rank)


def _states_of(ck: Checkpoint, section: Section) -> Iterator[tuple[str, Any, int]]:
    """The states of a section: from what each rank has there where that was kept, else from the tree."""
    of_ranks = {} if is_gathered(section.value) else ck.per_rank.get(section.path, {})
    for rank, tree in of_ranks.items():
        yield from ((stream, rank, digest) for stream, _, digest in _states(tree, rank))
    if not of_ranks:
        yield from _states(section.value)


def _states(tree: Any, owner: int | None = None) -> Iterator[tuple[str, Any, int]]:
    """`(stream, rank, digest)` of every piece of state: by place in a list, by a key that is a rank, or by shard."""
    # A list of all ranks' states is the same in every file: one copy tells, and N files have N × N of them.
    copies = 1 if is_gathered(tree) else None
    for path, leaf in nodes_in(tree, (Tensor, NumpyArray)):
        for rank, digest in _digests(leaf, copies):
            yield _stream(path, "torch"), _listed(path, rank), digest
    for path, numbers in _runs(tree):
        rank = _listed(path, owner)
        if rank is not None:
            yield _stream(path, "python"), rank, zlib.crc32(repr(numbers).encode())


def _stream(path: KeyPath, otherwise: str) -> str:
    return stream_of(path) or next((str(key) for key in path if not _is_rank(key)), otherwise)


def _listed(path: KeyPath, otherwise: Any) -> Any:
    """The rank that the first keys of a path name."""
    return next((key for key in path[:2] if _is_rank(key)), otherwise)


def _is_rank(key: Any) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and key.isdigit())


def _digests(leaf: Tensor | NumpyArray, copies: int | None) -> Iterable[tuple[Any, int]]:
    if isinstance(leaf, NumpyArray):
        return [(None, zlib.crc32(leaf.data))]
    with OpenFiles() as files:
        return [(shard.rank, zlib.crc32(shard_bytes(shard, files))) for shard in leaf.found[:copies]]


def _runs(tree: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Python's own states: long sequences of ints."""
    for path, node in nodes_in(tree, (list, tuple)):
        if len(node) > 100 and all(type(v) is int for v in node[:100]):
            yield path, node
