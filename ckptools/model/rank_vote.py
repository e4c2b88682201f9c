"""Compare the values that several ranks have of one thing, and find the ranks that the majority contradicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

from ckptools.model.problems import Differing
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import (
    Device,
    Global,
    NumpyArray,
    NumpyDtype,
    NumpyScalar,
    Opaque,
    Size,
    TorchName,
    describe_for_error,
    first_difference,
    scalar,
)
from ckptools.text import clip, clip_middle, fqn_of, number, plural, printable, spans, told_apart

T = TypeVar("T")

MAX_VALUES = 8
"""At most this many distinct values are grouped; ranks with further values are counted apart."""

MAX_SHOWN = 4
"""At most this many values are shown in a message."""

MAX_WORDS = 60
"""Characters of a value in a message."""

MAX_FEW_WORDS = 40
"""Characters of a value, or of its name, in a headline."""


@dataclass(frozen=True, slots=True)
class Vote(Generic[T]):
    """The distinct values that ranks state for one setting, step or tensor.

    Attributes:
        groups: the distinct values, each with its ranks, in the order of their first rank.
        ungrouped: ranks that have further values.
    """

    groups: tuple[tuple[T, tuple[int, ...]], ...]
    ungrouped: tuple[int, ...] = ()

    @property
    def agree(self) -> bool:
        """Whether all ranks have one value."""
        return len(self.groups) < 2

    @property
    def majority(self) -> tuple[T, tuple[int, ...]] | None:
        """The value that more than half of the ranks have, and those ranks; None without such a majority."""
        count = sum(len(ranks) for _, ranks in self.groups) + len(self.ungrouped)
        return next((group for group in self.groups if 2 * len(group[1]) > count), None)

    @property
    def _others(self) -> tuple[Sequence[tuple[T, tuple[int, ...]]], int]:
        """The first values that are not the majority's, with their ranks; and how many ranks have further values."""
        usual = self.majority
        groups = [group for group in self.groups if group is not usual]
        return groups[:MAX_SHOWN], sum(len(ranks) for _, ranks in groups[MAX_SHOWN:]) + len(self.ungrouped)

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that the majority contradicts; empty without a majority."""
        usual = self.majority
        if usual is None:
            return ()
        others = chain.from_iterable(ranks for _, ranks in self.groups if ranks is not usual[1])
        return tuple(sorted((*others, *self.ungrouped)))

    def by_rank(self, words: Callable[[T], str] | None = None) -> str:
        """Describe the votes: `rank 1: 0.02, others: 0.003`; without a majority `rank 0: 0.003, rank 1: 0.02`.

        Args:
            words: renders a value; by default as in other messages.
        """
        usual = self.majority
        shown, hidden = self._others
        values = [value for value, _ in shown] + ([usual[0]] if usual else [])
        texts = list(map(words, values)) if words else words_apart(values, MAX_WORDS)
        named = zip(texts, (ranks for _, ranks in shown), strict=False)
        found = ", ".join(f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}: {text}" for text, ranks in named)
        more = f" and {plural(hidden, 'more rank')}" if hidden else ""
        return found + more + (f", others: {texts[-1]}" if usual else "")

    def differing(self, name: str, words: Callable[[T], str] | None = None, plain: bool = True) -> Differing:
        """The votes as data; numbers are cut to six digits if they still differ then.

        Args:
            name: of the thing.
            words: renders a value.
            plain: whether it is a plain value, not a tensor.
        """
        usual = self.majority
        shown, _ = self._others
        values = [value for value, _ in shown] + ([usual[0]] if usual else [])
        texts = list(map(words or _in_few_words, values))
        if len(set(texts)) < len(texts):
            texts = words_apart(values, MAX_WORDS)
        listed = tuple((text, ranks) for text, (_, ranks) in zip(texts, shown, strict=False))
        return Differing(clip_middle(printable(name), MAX_FEW_WORDS), listed, texts[-1] if usual else "", plain)


def _in_few_words(value: Any) -> str:
    value = scalar(value)
    return number(value) if type(value) is float else clip(in_words(value), MAX_FEW_WORDS)


def in_words(value: Any) -> str:
    """Render a plain value for a message, on one line; a dict or a foreign object by its class and size."""
    value = scalar(value)
    named = isinstance(value, (Opaque, TorchName, Device, NumpyArray, NumpyDtype))
    return clip(printable(repr(value) if named else describe_for_error(value)), MAX_WORDS)


def words_apart(values: Sequence[Any], width: int) -> list[str]:
    """Render values for a message; values that clipping would make equal show their first difference."""
    cut = [clip(in_words(value), width) for value in values]
    shown = list(cut)
    for n, value in enumerate(values):
        twin = next((m for m in range(len(values)) if m != n and cut[m] == cut[n]), None)
        if twin is None:
            continue
        found = first_difference(value, values[twin], same_value)
        place, mine, other = found or ((), value, values[twin])
        where = f"{clip_middle(fqn_of(place), MAX_FEW_WORDS)} is " if place else ""
        texts = [repr(v) if isinstance(v, (str, bytes)) else in_words(v) for v in (mine, other)]
        if texts[0] == texts[1] and isinstance(mine, (list, tuple, dict)) and len(mine) != len(other):
            texts = [plural(len(mine), "value"), plural(len(other), "value")]
        shown[n] = f"{where}{printable(told_apart(texts, width)[0])}"
    return shown


def vote(ranked: Sequence[tuple[int, T]], same: Callable[[T, T], bool]) -> Vote[T]:
    """Group ranks by the value they have."""
    groups: list[tuple[T, list[int]]] = []
    by_object: dict[int, list[int]] = {}  # Ranks often share one object: then a random state is compared once.
    ungrouped: list[int] = []
    for rank, value in ranked:
        members = by_object.get(id(value))
        if members is None:
            members = next((members for known, members in groups if same(value, known)), None)
        if members is None and len(groups) < MAX_VALUES:
            members = []
            groups.append((value, members))
        if members is None:
            ungrouped.append(rank)
        else:
            members.append(rank)
            by_object[id(value)] = members
    return Vote(tuple((value, tuple(ranks)) for value, ranks in groups), tuple(ungrouped))


# -- equality: pickled values, foreign objects, and stated facts of tensors --------------------------------------------


NAMES = (Global, TorchName, Device)
"""Stand-ins that are dict keys by identity, so that two files have two objects for one name."""


def _only_ints(values: Sequence[Any]) -> bool:
    """Whether all values are ints: a Python random state has 625, too many to compare singly for 1,024 ranks."""
    return set(map(type, values)) == {int}


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are equal, NaN included; foreign objects by name, tensors by their stated facts."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return bool(a == b or (a != a and b != b))
    if isinstance(a, NumpyArray) and a.objects:
        stated = [[one.shape, one.fortran_order, one.cls] for one in (a, b)]
        return stated[0] == stated[1] and same_value(a.objects, b.objects)
    if isinstance(a, NumpyScalar):
        return (a.dtype, a.data) == (b.dtype, b.data)
    if isinstance(a, NumpyArray):
        return [getattr(a, name) for name in a.__slots__] == [getattr(b, name) for name in b.__slots__]
    if isinstance(a, (TorchName, Device, NumpyDtype)):
        return bool(repr(a) == repr(b))
    if isinstance(a, Global):
        return bool(a.dotted == b.dotted)
    if isinstance(a, Opaque):
        return bool(a.name == b.name)
    if isinstance(a, (list, tuple)) and not isinstance(a, Size):
        if _only_ints(a) and _only_ints(b):
            return bool(a == b)
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_value(value, b[key]) for key, value in a.items())
    if isinstance(a, Tensor):
        return difference(a, b) is None and same_records([*a.shards, *b.shards])
    return bool(a == b)


MAX_INSIDE = 100_000
"""At most this many values in two foreign objects are compared."""


def same_inside(a: Any, b: Any) -> bool:
    """Whether two foreign objects hold the same values; cycles are allowed."""
    stack, seen, left = [(a, b)], set[tuple[int, int]](), MAX_INSIDE
    while stack and left:
        x, y = stack.pop()
        left -= 1
        if type(x) is not type(y) or (id(x), id(y)) in seen:
            if type(x) is not type(y):
                return False
        elif isinstance(x, (Opaque, dict, list, tuple)) or (isinstance(x, NumpyArray) and x.objects):
            seen.add((id(x), id(y)))
            pairs = _children_of_both(x, y)
            if pairs is None:
                return False
            stack += pairs
        elif not same_value(x, y):
            return False
    return not stack


def _children_of_both(x: Any, y: Any) -> list[tuple[Any, Any]] | None:
    """Pairs of values at the same keys of two containers; None if keys or classes differ."""
    if isinstance(x, Opaque):
        if x.name != y.name:
            return None
        x, y = x.fields, y.fields
    if isinstance(x, NumpyArray):
        x, y = [x.shape, x.cls, x.objects], [y.shape, y.cls, y.objects]
    if isinstance(x, dict):
        mine, other = ({repr(k) if isinstance(k, NAMES) else k: v for k, v in one.items()} for one in (x, y))
        return [(mine[k], other[k]) for k in mine] if mine.keys() == other.keys() else None
    return list(zip(x, y, strict=True)) if len(x) == len(y) else None


def difference(a: Tensor, b: Any) -> tuple[str, str] | None:
    """How two ranks' descriptions of one tensor differ, the second rank's first; None if they agree.

    Plain tensors of different shapes do not contradict each other: they may be pieces of a flattened parameter.
    """
    if not isinstance(b, Tensor):
        return f"a {type(b).__name__}", "a tensor"
    if a.kind != b.kind:
        return f"a {b.kind} tensor", f"a {a.kind} one"
    if a.dtype != b.dtype:
        return f"dtype {b.dtype}", a.dtype
    if a.shape != b.shape and not (a.kind == "plain" and len(a.shape) == len(b.shape) == 1):
        return f"shape {list(b.shape)}", str(list(a.shape))
    if a.placements != b.placements or a.mesh != b.mesh:
        return f"placements {b.placements} on mesh {b.mesh}", f"{a.placements} on {a.mesh}"
    if a.sharded and a.kind == "sharded_tensor" and [s.box for s in a.shards] != [s.box for s in b.shards]:
        return "another shard list", f"{len(a.shards)} shards"
    return None


def same_records(shards: Iterable[Shard]) -> bool:
    """Whether the zip entries of some shards have one checksum and length, as far as they state any."""
    stated = {
        tuple((source.crc, source.record_span[1]) for source in s.sources)
        for s in shards
        if s.was_read and all(source.crc for source in s.sources)
    }
    return len(stated) < 2
