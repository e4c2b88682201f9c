"""The states of random number generators, rank by rank: their fingerprints, and the states for Python.

A fingerprint covers every value of a state that determines the next draws: NumPy's algorithm, key, position and
cached normal number; the version, numbers and cached number of Python's `random`; the bytes of torch's state, of
every device. Sources: numpy/random/mtrand.pyx `get_state`; CPython's Lib/random.py `getstate`; torch/random.py
`get_rng_state`, torch/cuda/random.py `get_rng_state_all`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from ckptools.files.opening import OpenFiles
from ckptools.keys.entries import rank_leaves
from ckptools.keys.value_digests import Content, content_of, joined, parts_of_value
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows, as_html, displayed, grouped, line_of, to_dict
from ckptools.model.state_dict import StateDict
from ckptools.model.tensor import Tensor
from ckptools.model.tree import NumpyArray
from ckptools.tensor_io.fetch_ahead import fetched
from ckptools.text import KeyPath, few, plural
from ckptools.training_state.sections import Section, sections_of_kind, stream_of, twister_of

MAX_STATE = 64 << 20
"""Larger tensors are not read as states; a tensor gathered from all ranks has 5 KB for each."""

MANY_NUMBERS = 100
"""More consecutive integers than this are the state of a generator: Python's has 625."""

LONGEST_SEED = 64
"""Bits of a seed or a counter; a longer integer is the state of a generator, as NumPy's PCG64 has it."""

Owner = int | str | None
"""The owner of a state: a rank, or `shard 0.1` in Megatron's torch_dist; None if unknown."""

ByRank = Mapping[Owner, Content]
"""The state of one generator by owner."""

SHARD = re.compile(r"shard_([\d.]+)_[\d.]+")
"""Key of the states of one (pipeline, tensor) rank: its place in the grid of ranks, and the grid's size.

Source: megatron/core/dist_checkpointing/mapping.py, `ShardedObject.unique_key`; megatron/training/checkpointing.py,
`get_rng_state`.
"""


@displayed
class StreamRow(NamedTuple):
    """The states of one random number generator on all ranks.

    Attributes:
        stream: the generator: `torch`, `cuda`, `numpy`, `python`.
        ranks: number of ranks with a state, or of places in Megatron's grid of ranks.
        distinct: number of distinct states, among those that can be read.
        fingerprints: by rank, a digest of each readable state in 8 hexadecimal digits, the same in every command and
            format. `shard 0.1` stands for the ranks of one (pipeline, tensor) place (Megatron), `unknown` for an
            unknown rank.
        problem: why the state of a rank cannot be read; "" if all can.
    """

    stream: str
    ranks: int
    distinct: int
    fingerprints: Mapping[str, str]
    problem: str


class StateLeaf(NamedTuple):
    """A leaf of a section of random states, and its key path within its owner's state."""

    path: KeyPath
    rank: Owner
    value: Any


def random_states(ck: Checkpoint, files: OpenFiles, names: Collection[str] | None = None) -> dict[str, ByRank]:
    """The state of each generator on every rank, by the generator's name: `torch`, `cuda`, `numpy`, `python`.

    Every rank of `ck` must have been read; if `names` are given, only these sections are searched.
    """
    return {stream: states_in(leaves, files) for stream, leaves in generators_in(ck, names).items()}


def generators_in(ck: Checkpoint, names: Collection[str] | None = None) -> dict[str, list[StateLeaf]]:
    """The leaves of the states of each generator.

    If two sections have states of one generator, the second has its section's name appended.
    """
    found: dict[str, list[StateLeaf]] = {}
    for section in sections_of_kind(ck, "rng"):
        if names is None or section.name in names:
            for stream, leaves in generator_leaves(ck, section).items():
                if holds_state(leaves):
                    found[f"{stream} of {section.name}" if stream in found else stream] = leaves
    return found


def generator_leaves(ck: Checkpoint, section: Section) -> dict[str, list[StateLeaf]]:
    """The leaves of a section of random states, by generator, or by a word of their key if none is detected."""
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
    """Detect generators' states by their form, whatever their keys: generator by key path."""
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
    """Whether leaves contain the state of a generator, not only a seed or a counter beside one."""
    return any(_is_state(leaf.value) for leaf in leaves)


def _is_state(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) > MANY_NUMBERS and all(type(v) is int for v in value[:MANY_NUMBERS])
    if type(value) is int:
        return value.bit_length() > LONGEST_SEED
    return isinstance(value, (Tensor, NumpyArray, bytes, bytearray))


def states_in(leaves: Iterable[StateLeaf], files: OpenFiles) -> ByRank:
    """The states of one generator by owner, each combined from its pieces."""
    pieces: dict[Owner, list[Content]] = {}
    for leaf in fetched(leaves, lambda leaf: parts_of_value(leaf.value, _rank(leaf), MAX_STATE)):
        pieces.setdefault(leaf.rank, []).append(content_of(leaf.value, files, _rank(leaf), MAX_STATE))
    return {owner: joined(contents) for owner, contents in pieces.items()}


def _rank(leaf: StateLeaf) -> int | None:
    return leaf.rank if isinstance(leaf.rank, int) else None


def stream_rows(ck: Checkpoint, names: Collection[str]) -> Rows[StreamRow]:
    """A row for each generator whose state is in one of the sections."""
    with OpenFiles() as files:
        return Rows(_row(stream, states) for stream, states in random_states(ck, files, names).items())


def _row(stream: str, states: ByRank) -> StreamRow:
    known = {"unknown" if rank is None else str(rank): c.fingerprint for rank, c in states.items() if not c.problem}
    distinct = {content.digest for content in states.values() if not content.problem}
    rank, problem = next(((rank, c.problem) for rank, c in states.items() if c.problem), (None, ""))
    whose = "" if rank is None else f"{rank}: " if isinstance(rank, str) else f"rank {rank}: "
    return StreamRow(stream, len(states), len(distinct), known, f"{whose}{problem}")


# -- the states of one checkpoint in Python: rank to generator to state ------------------------------------------------


@displayed
@dataclass(frozen=True, repr=False)
class RandomState:
    """The state of one generator on one rank.

    Attributes:
        stream: the generator: `torch`, `cuda`, `numpy`, `python`.
        rank: its rank; `shard 0.1` for a place in Megatron's grid of ranks; None if the file does not say.
        value: as the file has it: a lazy tensor of torch's bytes, NumPy's or Python's tuple.
        fingerprint: the first digits of a digest of the whole state, as in `ckptools show`; "" if it cannot be read.
        problem: why it cannot be read.
    """

    stream: str
    rank: Owner
    value: Any = field(repr=False)
    fingerprint: str
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Rank, generator and fingerprint, without the state itself."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        return {"rank": self.rank, "stream": self.stream, "fingerprint": self.fingerprint, "problem": self.problem}

    def _summary(self) -> str:
        return f"{self.stream} {_of_rank(self.rank)}: {self.fingerprint or self.problem}"


class RandomStates(Mapping[Owner, StateDict]):
    """The saved random states: rank to generator (`torch`, `cuda`, `numpy`, `python`) to `RandomState`.

    States are small; the first access reads all of them, with every rank's file. A rank is None if the files do not
    state the rank of a state.

    Attributes:
        raw: the states as in the tree; None without any.
    """

    def __init__(self, checkpoint: Checkpoint, raw: Any) -> None:
        self._checkpoint, self.raw = checkpoint, raw

    @cached_property
    def _read(self) -> dict[str, tuple[list[StateLeaf], ByRank]]:
        with OpenFiles() as files:
            return {s: (leaves, states_in(leaves, files)) for s, leaves in generators_in(self._checkpoint).items()}

    @cached_property
    def states(self) -> Rows[RandomState]:
        """Every state, rank by rank."""
        states = []
        for stream, (leaves, by_rank) in self._read.items():
            own = grouped(leaves, lambda leaf: leaf.rank)
            for rank, content in by_rank.items():
                value = _rebuilt([(leaf.path, _own(leaf)) for leaf in own[rank]])
                states.append(RandomState(stream, rank, value, content.fingerprint, content.problem))
        return Rows(sorted(states, key=lambda state: state.rank if isinstance(state.rank, int) else -1))

    @cached_property
    def rows(self) -> Rows[StreamRow]:
        """A row for each generator: the number of ranks with a state, and the number of distinct states."""
        return Rows(_row(stream, by_rank) for stream, (_, by_rank) in self._read.items())

    @cached_property
    def _by_rank(self) -> dict[Owner, StateDict]:
        found: dict[Owner, dict[str, RandomState]] = {}
        for state in self.states:
            found.setdefault(state.rank, {})[state.stream] = state
        return {rank: StateDict(f"random states {_of_rank(rank)}", streams) for rank, streams in found.items()}

    def __getitem__(self, rank: Owner) -> StateDict:
        if rank not in self._by_rank:
            raise KeyError(f"no random states {_of_rank(rank)} here; there are {few(list(map(_of_rank, self)))}")
        return self._by_rank[rank]

    def __iter__(self) -> Iterator[Owner]:
        return iter(self._by_rank)

    def __len__(self) -> int:
        return len(self._by_rank)

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per rank and generator, with its fingerprint, for pandas for example."""
        return self.states.to_dicts()

    def __repr__(self) -> str:
        counts = [f"{row.stream} {row.distinct} distinct" for row in self.rows]
        return line_of("RandomStates", f"of {plural(len(self), 'rank')}: {few(counts)}" if counts else "of no rank")

    def _repr_html_(self) -> str | None:
        return as_html(self.rows)


def _of_rank(rank: Owner) -> str:
    if rank is None:
        return "of no known rank"
    return f"of {rank}" if isinstance(rank, str) else f"of rank {rank}"


def _own(leaf: StateLeaf) -> Any:
    """The value of a leaf; for a tensor that several ranks have in full, its own rank's copy."""
    value = leaf.value
    if not isinstance(value, Tensor):
        return value
    mine = value.on_rank(leaf.rank) if isinstance(leaf.rank, int) else ()
    return replace(value, shards=mine) if mine else value


def _rebuilt(parts: list[tuple[KeyPath, Any]]) -> Any:
    """Reassemble values by key path: a single value, a tuple of the values at 0, 1, 2 …, else a dict."""
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][1]
    groups: dict[Any, list[tuple[KeyPath, Any]]] = {}
    for path, value in parts:
        groups.setdefault(path[0] if path else "", []).append((path[1:], value))
    made = {key: _rebuilt(inside) for key, inside in groups.items()}
    if list(made) == list(range(len(made))):
        return tuple(made.values())
    return next(iter(made.values())) if len(made) == 1 else made
