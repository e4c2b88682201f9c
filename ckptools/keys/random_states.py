"""The saved random states as users hold them: rank to generator to state, each with a fingerprint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ckptools.files.opening import OpenFiles
from ckptools.keys.value_digests import (
    Owner,
    StateLeaf,
    StreamRow,
    generator_leaves,
    holds_state,
    states_in,
    stream_rows,
)
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows, as_html, displayed, line_of, to_dict
from ckptools.model.state_dict import StateDict
from ckptools.model.tensor import Tensor
from ckptools.text import few, plural
from ckptools.training_state.sections import Section, sections_of_kind


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
    rank: int | str | None
    value: Any = field(repr=False)
    fingerprint: str
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Rank, generator and fingerprint, without the state itself."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        names = ("rank", "stream", "fingerprint", "problem")
        return {name: getattr(self, name) for name in names}

    def _summary(self) -> str:
        return f"{self.stream} {_of_rank(self.rank)}: {self.fingerprint or self.problem}"


class RandomStates(Mapping[int | str | None, StateDict]):
    """The saved random states: rank to generator (`torch`, `cuda`, `numpy`, `python`) to `RandomState`.

    States are small; the first access reads all of them, with every rank's file. A rank is None if the files do not
    state the rank of a state.

    Attributes:
        raw: the states as in the tree; None without any.
    """

    def __init__(self, checkpoint: Checkpoint, raw: Any) -> None:
        self._checkpoint, self.raw = checkpoint, raw

    @cached_property
    def states(self) -> Rows[RandomState]:
        """Every state, rank by rank."""
        found: dict[str, list[RandomState]] = {}
        for section in sections_of_kind(self._checkpoint, "rng"):
            for stream, states in self._of_section(section).items():
                name = f"{stream} of {section.name}" if stream in found else stream
                found[name] = [replace(state, stream=name) for state in states]
        states = [state for of_stream in found.values() for state in of_stream]
        return Rows(sorted(states, key=lambda state: state.rank if isinstance(state.rank, int) else -1))

    @cached_property
    def rows(self) -> Rows[StreamRow]:
        """A row for each generator: the number of ranks with a state, and the number of distinct states."""
        return stream_rows(self._checkpoint, {section.name for section in sections_of_kind(self._checkpoint, "rng")})

    def _of_section(self, section: Section) -> dict[str, list[RandomState]]:
        found: dict[str, list[RandomState]] = {}
        with OpenFiles() as files:
            for stream, leaves in generator_leaves(self._checkpoint, section).items():
                for rank, content in (states_in(leaves, files) if holds_state(leaves) else {}).items():
                    value = _rebuilt([(leaf.path, _own(leaf)) for leaf in leaves if leaf.rank == rank])
                    state = RandomState(stream, rank, value, content.fingerprint, content.problem)
                    found.setdefault(stream, []).append(state)
        return found

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


def _rebuilt(parts: list[tuple[tuple[Any, ...], Any]]) -> Any:
    """Reassemble leaves: a single value, a tuple of the values at 0, 1, 2 …, else a dict."""
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][1]
    groups: dict[Any, list[tuple[tuple[Any, ...], Any]]] = {}
    for path, value in parts:
        groups.setdefault(path[0] if path else "", []).append((path[1:], value))
    made = {key: _rebuilt(inside) for key, inside in groups.items()}
    if list(made) == list(range(len(made))):
        return tuple(made.values())
    return next(iter(made.values())) if len(made) == 1 else made
