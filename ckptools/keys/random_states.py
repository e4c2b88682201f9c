"""The states of random number generators, rank by rank, as fingerprints.

A fingerprint covers every value of a state, so all that decides what is drawn next: NumPy's algorithm, key, place in it
and the normal number that it keeps; the version, numbers and kept number of Python's `random`; the bytes of torch's
state, of every device. Sources: numpy/random/mtrand.pyx `get_state`; CPython's Lib/random.py `getstate`;
torch/random.py `get_rng_state`, torch/cuda/random.py `get_rng_state_all`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckptools.files.opening import OpenFiles
from ckptools.keys.rank_leaves import rank_leaves
from ckptools.keys.value_digests import Content, content_of, joined, parts_of_value
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows, displayed
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath
from ckptools.model.values import NumpyArray
from ckptools.tensor_io.fetch_ahead import fetched
from ckptools.training_state.generators import stream_of, twister_of
from ckptools.training_state.sections import Section, sections_of_kind

MAX_STATE = 64 << 20
"""Bytes of a tensor that is a state; one that all ranks gathered has 5 KB for each."""

MANY_NUMBERS = 100
"""More integers than this in a row are the state of a generator: Python's is 625 of them."""

LONGEST_SEED = 64
"""Bits of a seed or a counter; a longer integer is the state of a generator, as NumPy's PCG64 has it."""

Owner = int | str | None
"""The owner of a state: a rank, or of Megatron's torch_dist `shard 0.1`; None where it is unknown."""

ByRank = Mapping[Owner, Content]
"""The state of one generator by whose it is."""

SHARD = re.compile(r"shard_([\d.]+)_[\d.]+")
"""Key of what ranks of one pipeline and tensor-parallel place saved: where that is, and how many places there are.

Source: megatron/core/dist_checkpointing/mapping.py, `ShardedObject.unique_key`; megatron/training/checkpointing.py,
`get_rng_state`.
"""


@displayed
class StreamRow(NamedTuple):
    """The states of one random number generator on all ranks.

    Attributes:
        stream: which generator: `torch`, `cuda`, `numpy`, `python`.
        ranks: of how many ranks there is a state, or of how many places of Megatron's grid of ranks.
        distinct: how many of these differ, of those that can be read.
        fingerprints: of each rank's state, all that decides what is drawn next, by rank: 8 hexadecimal digits, the
            same in every command and wherever the state lies. Without those that cannot be read. `shard 0.1` stands
            for the ranks of one pipeline and tensor-parallel place (Megatron), `unknown` where it is not known whose.
        problem: why the state of a rank cannot be read; "" where all can.
    """

    stream: str
    ranks: int
    distinct: int
    fingerprints: Mapping[str, str]
    problem: str


def random_states(ck: Checkpoint, files: OpenFiles, names: Iterable[str] | None = None) -> dict[str, ByRank]:
    """The state of each generator on every rank, by the generator's name: `torch`, `cuda`, `numpy`, `python`.

    A generator that a second section holds too has the name of that section behind it. All ranks of the checkpoint have
    been read; only sections of some `names` are looked into, if given.
    """
    found: dict[str, ByRank] = {}
    wanted = None if names is None else set(names)
    for section in sections_of_kind(ck, "rng"):
        if wanted is None or section.name in wanted:
            for stream, leaves in generator_leaves(ck, section).items():
                if holds_state(leaves):
                    found[f"{stream} of {section.name}" if stream in found else stream] = states_in(leaves, files)
    return found


class StateLeaf(NamedTuple):
    """A leaf of a section of random states, and the key path to it in what its owner saved."""

    path: KeyPath
    rank: Owner
    value: Any


def generator_leaves(ck: Checkpoint, section: Section) -> dict[str, list[StateLeaf]]:
    """The leaves of a section of random states by generator, else by the first word of their key."""
    found: dict[str, list[StateLeaf]] = {}
    leaves = list(_owned_leaves(ck, section))
    by_form = _streams_by_form(leaves)
    for leaf in leaves:
        words = (str(key) for key in leaf.path if not str(key).isdigit())
        stream = next((by_form[leaf.path[:n]] for n in range(len(leaf.path)) if leaf.path[:n] in by_form), "")
        stream = stream or stream_of((*section.path, *leaf.path))
        stream = stream or next(words, "torch" if _is_state(leaf.value) else "state")
        found.setdefault(stream, []).append(leaf)
    return found


def _streams_by_form(leaves: Iterable[StateLeaf]) -> dict[KeyPath, str]:
    """Find states by their form, whatever their keys: the generator by path."""
    found: dict[KeyPath, str] = {}
    for leaf in leaves:
        if leaf.path[-1:] == (1,):
            found[leaf.path[:-1]] = twister_of(leaf.value)
        elif leaf.path[-1:] == ("bit_generator",) and isinstance(leaf.value, str):
            found[leaf.path[:-1]] = "numpy"
    return {path: stream for path, stream in found.items() if stream}


def _owned_leaves(ck: Checkpoint, section: Section) -> Iterator[StateLeaf]:
    keys = list(section.value) if isinstance(section.value, Mapping) else []
    sharded = bool(keys) and all(isinstance(key, str) and SHARD.fullmatch(key) for key in keys)
    for leaf in rank_leaves(ck, section):
        place = SHARD.fullmatch(leaf.path[0]) if sharded else None
        if place is None:
            yield StateLeaf(leaf.path, leaf.rank, leaf.value)
        else:
            yield StateLeaf(leaf.path[1:], f"shard {place[1]}", leaf.value)


def holds_state(leaves: Iterable[StateLeaf]) -> bool:
    """Whether leaves are the state of a generator, and not a seed or a counter that lies beside one."""
    return any(_is_state(leaf.value) for leaf in leaves)


def _is_state(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) > MANY_NUMBERS and all(type(v) is int for v in value[:MANY_NUMBERS])
    if type(value) is int:
        return value.bit_length() > LONGEST_SEED
    return isinstance(value, (Tensor, NumpyArray, bytes, bytearray))


def states_in(leaves: Iterable[StateLeaf], files: OpenFiles) -> ByRank:
    """The states of one generator by owner, each made of all its pieces."""
    pieces: dict[Owner, list[Content]] = {}
    for leaf in fetched(leaves, lambda leaf: parts_of_value(leaf.value, _rank(leaf), MAX_STATE)):
        pieces.setdefault(leaf.rank, []).append(content_of(leaf.value, files, _rank(leaf), MAX_STATE))
    return {owner: joined(contents) for owner, contents in pieces.items()}


def _rank(leaf: StateLeaf) -> int | None:
    return leaf.rank if isinstance(leaf.rank, int) else None


def stream_rows(ck: Checkpoint, names: Iterable[str]) -> Rows[StreamRow]:
    """A row for each generator whose states some sections hold."""
    with OpenFiles() as files:
        return Rows(_row(stream, states) for stream, states in random_states(ck, files, names).items())


def _row(stream: str, states: ByRank) -> StreamRow:
    known = {"unknown" if rank is None else str(rank): c.fingerprint for rank, c in states.items() if not c.problem}
    distinct = {content.digest for content in states.values() if not content.problem}
    rank, problem = next(((rank, c.problem) for rank, c in states.items() if c.problem), (None, ""))
    whose = "" if rank is None else f"{rank}: " if isinstance(rank, str) else f"rank {rank}: "
    return StreamRow(stream, len(states), len(distinct), known, f"{whose}{problem}")
