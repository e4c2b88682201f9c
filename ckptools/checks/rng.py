"""The check of random number generators: every rank has states of its own."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptools.checks.results import judged, skipped
from ckptools.files.opening import OpenFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, nodes_in, tensors_in
from ckptools.model.values import NumpyArray
from ckptools.model.verification import Check
from ckptools.tensor_io.stream import shard_bytes
from ckptools.text import first_few
from ckptools.training_state.sections import Section, is_gathered, sections_of_kind, stream_of

MAY = "; only ranks that share one copy of the model should"
"""Not every file tells whether they do: in a DCP folder a tensor-parallel matrix looks as one that FSDP cut."""


def distinct_states(ck: Checkpoint) -> Check:
    """Whether every rank has a state of its own for each generator."""
    states: dict[str, dict[Any, int]] = {}
    for section in sections_of_kind(ck, "rng"):
        for stream, rank, digest in _states_of(ck, section):
            states.setdefault(stream, {})[rank] = zlib.crc32(b"%d" % digest, states.get(stream, {}).get(rank, 0))
    shared = {s: d for s, d in states.items() if len(d) > 1}
    if not shared:
        return skipped("rng", "no RNG state" if not states else "RNG state of one rank")
    counts = ", ".join(f"{stream} {len(set(d.values()))} distinct of {len(d)}" for stream, d in shared.items())
    problems = [
        Problem(Code.RNG_STATES_EQUAL, f"all {len(d)} ranks have the same {stream} state{MAY}")
        for stream, d in shared.items()
        if len(set(d.values())) == 1
    ]
    problems += _equal_for_some(shared)
    if problems and _share_a_model(ck):
        return judged("rng", [], f"{counts}; ranks that share one copy of the model may draw alike")
    return judged("rng", problems, counts)


def _share_a_model(ck: Checkpoint) -> bool:
    """Whether all ranks work on one copy of the model, and so on the same data.

    Stages of a pipeline do, and a mesh of one dimension on which something is repeated: FSDP shards every parameter,
    tensor parallel leaves biases whole.
    """
    model = (t for s in sections_of_kind(ck, "model") for _, t in tensors_in(s.value))
    return ck.in_parts or any(t.placements == ("Replicate()",) and t.mesh == (ck.world_size.value,) for t in model)


def _equal_for_some(states: Mapping[str, Mapping[Any, int]]) -> Iterator[Problem]:
    """Ranks that have one state where others have their own.

    Groups of one size, such as the data-parallel copies of each tensor-parallel rank, are meant to be equal.
    """
    streams: dict[tuple[Any, ...], list[str]] = {}
    for stream, digests in states.items():
        groups: dict[int, list[Any]] = {}
        for rank, digest in digests.items():
            groups.setdefault(digest, []).append(rank)
        if len({len(ranks) for ranks in groups.values()}) > 1:
            for members in (m for m in groups.values() if len(m) > 1):
                streams.setdefault(tuple(members), []).append(stream)
    for ranks, same in streams.items():
        text = f"ranks {first_few(ranks)} have the same {', '.join(same)} state, other ranks have their own"
        yield Problem(Code.RNG_STATES_EQUAL, f"{text}; a file may have been copied, or restored on the wrong rank")


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
