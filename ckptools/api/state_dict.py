"""The mappings of a checkpoint as users hold them: a state dict, and the random states of every rank.

They show themselves, complete their keys, and name the nearest of one that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckptools.api.tensor import Tensor, with_lazy_tensors
from ckptools.model import tensor as tensor_data
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Rows, as_html, displayed, line_of, to_dict, to_plain
from ckptools.text import clip_middle, few, no_such_key, plural
from ckptools.training_state.sections import Section, sections_of_kind

if TYPE_CHECKING:
    from ckptools.keys.value_digests import Owner, StateLeaf, StreamRow


class StateDict(Mapping[str, Any]):
    """A part of a checkpoint by name, such as the state dict of its model. Errors about unknown names give the nearest.

    `name` is for its `repr`; the names of its tensors begin with `prefix`, before their keys.
    """

    def __init__(self, name: str, values: Mapping[Any, Any], prefix: str = "") -> None:
        self._name, self._values, self._prefix = name, values, prefix

    def __getitem__(self, key: str) -> Any:
        if key in self._values:
            value = self._values[key]
            return replace(value, name=f"{self._prefix}{key}") if isinstance(value, Tensor) else value
        raise KeyError(no_such_key(key, map(str, self._values)))

    def get(self, key: str, default: Any = None) -> Any:
        """The value at `key`, or `default`."""
        return self[key] if key in self._values else default

    def load(self) -> dict[str, Any]:
        """The same mapping with every tensor read as a `torch.Tensor`, for `load_state_dict`.

        Raises:
            NotWholeError: no file that is here holds some of a tensor.
            ReadError: a file cannot be read, or a tensor cannot be put together; the message says why.
        """
        return {key: value.load() if isinstance(value, Tensor) else value for key, value in self.items()}

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _ipython_key_completions_(self) -> list[str]:
        return [str(k) for k in self._values]

    def __repr__(self) -> str:
        tensors = sum(isinstance(v, tensor_data.Tensor) for v in self._values.values())
        name = clip_middle(self._name or "values", 60)
        counts = [plural(len(self), "key"), *([plural(tensors, "tensor")] if tensors else [])]
        return line_of(f"{name}:", ", ".join(counts))

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Its values as texts, numbers, and lists and dicts of these; of a tensor what is known of it."""
        return {str(key): to_plain(value) for key, value in self.items()}


class RawTree(dict[Any, Any]):
    """The tree of a file, which a notebook shows as folds."""

    def _repr_html_(self) -> str | None:
        return as_html(self)


@displayed
@dataclass(frozen=True, repr=False)
class RandomState:
    """The state of one generator on one rank.

    Attributes:
        stream: which generator: `torch`, `cuda`, `numpy`, `python`.
        rank: whose it is; `shard 0.1` of a place in Megatron's grid of ranks; None where the file does not say.
        value: as the file has it: a lazy tensor of torch's bytes, NumPy's or Python's tuple.
        fingerprint: the first digits of a digest of all that it holds, the same as `ckptools show` has; "" where it
            cannot be read.
        problem: why it cannot.
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

    States are small; they are read, with every rank's file, when the first of them is asked for. A rank is None where
    the files do not say whose a state is.

    Attributes:
        raw: the states as the tree has them; None where there are none.
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
        """A row for each generator: of how many ranks there is a state, and how many of these differ."""
        from ckptools.keys.value_digests import stream_rows

        return stream_rows(self._checkpoint, {section.name for section in sections_of_kind(self._checkpoint, "rng")})

    def _of_section(self, section: Section) -> dict[str, list[RandomState]]:
        from ckptools.files.opening import OpenFiles
        from ckptools.keys.value_digests import generator_leaves, holds_state, states_in

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
        """A plain dict per rank and generator, with its fingerprint, such as pandas takes."""
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
    """The value of a leaf; of a tensor that several ranks hold whole, that of its rank."""
    value = leaf.value
    if not isinstance(value, tensor_data.Tensor):
        return value
    mine = value.on_rank(leaf.rank) if isinstance(leaf.rank, int) else ()
    return with_lazy_tensors(replace(value, shards=mine) if mine else value)


def _rebuilt(parts: list[tuple[tuple[Any, ...], Any]]) -> Any:
    """Put leaves together again: a value alone, a tuple of what lies at 0, 1, 2 …, else a dict."""
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][1]
    groups: dict[Any, list[tuple[tuple[Any, ...], Any]]] = {}
    for path, value in parts:
        groups.setdefault(path[0] if path else "", []).append((path[1:], value))
    made = {key: _rebuilt(inside) for key, inside in groups.items()}
    if list(made) == list(range(len(made))):
        return tuple(made.values())
    return next(iter(made.values())) if len(made) == 1 else made
