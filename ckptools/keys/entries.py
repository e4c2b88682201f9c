"""Name the keys of a checkpoint as users do, and select some by glob or section."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from fnmatch import translate
from functools import cached_property, lru_cache
from itertools import groupby, islice, takewhile
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Generic, NamedTuple, TypeVar

from ckptools.errors import UsageError
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.model.tree import (
    MAX_UNFOLDING,
    Global,
    Lost,
    NumpyArray,
    Opaque,
    children_of,
    describe_for_error,
    leaf_at,
    of_kinds,
    plain,
    scalar,
)
from ckptools.option import spelled
from ckptools.text import MAX_BITS, Key, KeyPath, fqn_of, runs_of
from ckptools.training_state.models import listed_sections, prefix_of
from ckptools.training_state.optimizers import Optimizer, nested, optimizers_of
from ckptools.training_state.sections import (
    Section,
    SectionKind,
    is_flat_optimizer,
    is_gathered,
    is_private_name,
    sections_of,
)

# -- trees of dotted names, and their folding: equal siblings become one branch with all their labels ------------------
# A folded tree unfolds into exactly the names it was made of, each with its item.


Item = TypeVar("Item")

MAX_LEVELS = 60
"""Levels into which a name is split; a file may put any number of dots into a name."""

_LAYER = re.compile(r"()([0-9]{1,18})()")

NUMBERED = re.compile(r"(.*?)([0-9]{1,18})([^0-9]*)", re.DOTALL)
"""A label, split into the text before its last number, the number, and the text behind it."""


@dataclass(slots=True)
class Branch(Generic[Item]):
    """A node in a tree of names, or several siblings that differ only in their labels.

    Attributes:
        labels: the last word of the name; for folded siblings, all of their last words, in order.
        items: the items at this name, or at the names of the folded siblings; empty for an inner node.
    """

    labels: tuple[str, ...]
    items: list[Item] = field(default_factory=list)
    children: list[Branch[Item]] = field(default_factory=list)


def tree_of(items: Iterable[tuple[str, Item]]) -> list[Branch[Item]]:
    """Build the tree of some dotted names, in the order in which each branch first occurs."""
    root: Branch[Item] = Branch(())
    known: dict[str, Branch[Item]] = {}
    for name, item in items:
        _branch_at(name, root, known).items.append(item)
    return root.children


def _branch_at(name: str, root: Branch[Item], known: dict[str, Branch[Item]]) -> Branch[Item]:
    """The branch of a name; missing branches on its path are created."""
    branch = known.get(name)
    if branch is None:
        above, label = _last_word(name)
        branch = known[name] = Branch((label,))
        (root if above is None else _branch_at(above, root, known)).children.append(branch)
    return branch


def _last_word(name: str) -> tuple[str | None, str]:
    """Split a name before its last word; None for a single word. Too deep a name keeps dots in its last word."""
    if name.count(".") > MAX_LEVELS:
        label = name.split(".", MAX_LEVELS)[-1]
        return name[: -len(label) - 1], label
    above, dot, label = name.rpartition(".")
    return above if dot else None, label


def fold(
    branches: Sequence[Branch[Item]],
    same: Callable[[Item], Hashable],
    beside: Callable[[Item], Hashable],
    by_words: Callable[[Item], bool],
) -> list[Branch[Item]]:
    """Fold a tree: join siblings whose subtrees have equal names and equal items.

    Labels that differ only in a number fold wherever they stand; others, such as `q`, `k`, `v`, only with their
    neighbours.

    Args:
        branches: made by `tree_of`.
        same: key that two items must share to be folded.
        beside: further key that they must share if they are siblings themselves, not in the subtrees of siblings.
        by_words: whether an item lets branches fold whose labels differ in more than a number; it must be equal for
            items with equal `same`.
    """
    return [branch for branch, _ in _Folding(same, beside, by_words).siblings(branches)]


def unfold(branches: Iterable[Branch[Item]]) -> Iterator[tuple[str, list[Item]]]:
    """Yield the names of a folded tree, each with the items of its branch, in the order of the items."""
    for branch in branches:
        for label in branch.labels:
            if branch.items:
                yield label, branch.items
            yield from ((f"{label}.{rest}", items) for rest, items in unfold(branch.children))


@dataclass
class _Folding(Generic[Item]):
    """Numbers the contents of branches, so that two branches of any size are compared in one step."""

    _same: Callable[[Item], Hashable]
    _beside: Callable[[Item], Hashable]
    _by_words: Callable[[Item], bool]
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _wordy: set[int] = field(default_factory=set)

    def siblings(self, branches: Sequence[Branch[Item]]) -> list[tuple[Branch[Item], int]]:
        """Fold the children of one parent; return each branch with the number of its content."""
        if len(branches) < 2:
            return list(map(self._numbered, branches))
        groups: dict[Hashable, list[Branch[Item]]] = {}
        for branch in branches:
            whole, number = self._numbered(branch)
            own = tuple(map(self._beside, branch.items))
            groups.setdefault((number, own, _stem(branch.labels[0]) or branch.labels[0]), []).append(whole)
        return self._neighbours([(_joined(alike), key[0]) for key, alike in groups.items()])  # type: ignore[index]

    def _numbered(self, branch: Branch[Item]) -> tuple[Branch[Item], int]:
        """A branch with its children folded, and a number that branches with equal content share."""
        children = self.siblings(branch.children) if branch.children else []
        holds = tuple(map(self._same, branch.items)), tuple((child.labels, number) for child, number in children)
        known = self._numbers.get(holds)
        number = self._numbers.setdefault(holds, len(self._numbers)) if known is None else known
        if known is None and (any(map(self._by_words, branch.items)) or any(n in self._wordy for _, n in children)):
            self._wordy.add(number)
        return Branch(branch.labels, branch.items, [child for child, _ in children]) if children else branch, number

    def _neighbours(self, siblings: Sequence[tuple[Branch[Item], int]]) -> list[tuple[Branch[Item], int]]:
        """Fold consecutive siblings whose labels differ in words."""
        found: list[tuple[Branch[Item], int]] = []
        for _, run in groupby(siblings, self._word_key):
            alike = list(run)
            found.append((_joined([branch for branch, _ in alike]), alike[0][1]))
        return found

    def _word_key(self, sibling: tuple[Branch[Item], int]) -> Hashable:
        branch, number = sibling
        return number if number in self._wordy and not _stem(branch.labels[0]) else branch.labels


@lru_cache(maxsize=4096)
def _stem(label: str) -> tuple[str, str] | None:
    """The text before and behind the last number of a label; None if it has no number."""
    found = NUMBERED.fullmatch(label)
    return (found[1], found[3]) if found else None


def layer_and_role(name: str) -> tuple[str | None, str]:
    """Split a name into the number of its layer, as written, and the name with `*` in its place.

    The number is the first word that is a number (`blocks.3.up.weight`), else the last number of the first word that
    contains one (`layer3.conv.weight`); without either, it is None and the name is unchanged.
    """
    words = name.split(".")
    for pattern in (_LAYER, NUMBERED):
        for at, word in enumerate(words):
            if found := pattern.fullmatch(word):
                return found[2], ".".join([*words[:at], f"{found[1]}*{found[3]}", *words[at + 1 :]])
    return None, name


def _joined(branches: Sequence[Branch[Item]]) -> Branch[Item]:
    """Join branches with equal content into one with all their labels; its items are in the order of the names."""
    if len(branches) == 1:
        return branches[0]
    return replace(_under(branches), labels=tuple(label for branch in branches for label in branch.labels))


def _under(branches: Sequence[Branch[Item]]) -> Branch[Item]:
    """Join branches with equal labels below several folded branches into one."""
    places = zip(*(branch.children for branch in branches), strict=True)
    items = [item for branch in branches for item in branch.items]
    return Branch(branches[0].labels, items, [_under(children) for children in places])


def label_text(labels: Sequence[str], most: int = 8) -> str:
    """Join folded labels in a word: `{0..23}`, `norm{1,2}`, `{q,k,v,o}_proj`; at most `most` runs or words."""
    if len(labels) == 1:
        return labels[0]
    stems = {_stem(label) for label in labels}
    stem = stems.pop() if len(stems) == 1 else None
    before, behind = stem or ("", _common_end(labels))
    words = [label[len(before) : len(label) - len(behind)] for label in labels]
    shown = numbers_folded(words) if stem else words
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return f"{before}{{{','.join(shown[:most])}{more}}}{behind}"


def _common_end(labels: Sequence[str]) -> str:
    """The common end of all labels, from a `_` on: `_proj`; "" if it would be all of a label."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*map(reversed, labels), strict=False))
    end = "".join(letters[0] for letters in alike)[::-1]
    behind = end[end.index("_") :] if "_" in end else ""
    return "" if behind in labels else behind


def numbers_folded(numbers: Sequence[str]) -> list[str]:
    """Fold three or more consecutive numbers as `0..23`, in ascending order; numbers with leading zeros come last."""
    runs = runs_of(int(n) for n in numbers if str(int(n)) == n)
    return [word for run in runs for word in run] + [n for n in numbers if str(int(n)) != n]


# -- the leaves of a section; values of which each rank has its own occur once per rank --------------------------------


class RankLeaf(NamedTuple):
    """A leaf of a section.

    Attributes:
        path: key path in the section, the same for every rank.
        rank: the rank of the value; None for a shared value.
        below: path in the section below which each rank has its own values; None for a shared value.
    """

    path: KeyPath
    rank: int | None
    value: Any
    below: KeyPath | None = None


def rank_leaves(ck: Checkpoint, section: Section) -> Iterator[RankLeaf]:
    """Yield the leaves of a section: for random states of all ranks and values of each rank's file, once per rank."""
    if section.kind == "rng" and is_by_rank(section.value):
        for key, value in children_of(section.value) or ():
            yield from (RankLeaf(path, int(key), leaf, ()) for path, leaf in leaves_of(value))
        return
    own = dict(_own(ck, section))
    for below, values in own.items():
        for rank, value in values.items():
            yield from (RankLeaf((*below, *path), rank, leaf, below) for path, leaf in leaves_of(value))
    for path, leaf in leaves_of(section.value):
        if not any(path[: len(below)] == below for below in own):
            # A tensor that is whole in several ranks' files has bytes of its own in each.
            ranks = sorted({s.rank for s in leaf.found if s.rank is not None}) if isinstance(leaf, Tensor) else []
            if len(ranks) > 1 and leaf.kind in ("plain", "storage"):
                yield from (RankLeaf(path, rank, leaf, path) for rank in ranks)
            else:
                yield RankLeaf(path, None, leaf)


def rank_containers(ck: Checkpoint, section: Section) -> Iterator[RankLeaf]:
    """Yield the containers of a section that `rank_leaves` enters: each rank's own, and shared ones."""
    own = dict(_own(ck, section))
    for below, values in own.items():
        for rank, value in values.items():
            yield from (RankLeaf((*below, *path), rank, node, below) for path, node in containers_of(value))
    for path, node in containers_of(section.value):
        if not any(path[: len(below)] == below for below in own):
            yield RankLeaf(path, None, node)


def is_by_rank(states: Any) -> bool:
    """Whether a value holds the states of all ranks: a list of dicts, or a dict keyed by rank; some may be lost."""
    if isinstance(states, Mapping):
        ranks = {str(key) for key in states}
        if len(ranks) > 1 and ranks == {str(n) for n in range(len(ranks))}:
            return True
        dicts = (isinstance(state, Mapping) for state in states.values())
        return bool(ranks) and all(rank.isdecimal() for rank in ranks) and all(dicts)
    return is_gathered(states)


def _own(ck: Checkpoint, section: Section) -> Iterator[tuple[KeyPath, Mapping[int, Any]]]:
    n = len(section.path)
    for key, values in ck.per_rank.items():
        if key[:n] == section.path:
            yield key[n:], values
        elif section.path[: len(key)] == key:
            yield (), {rank: leaf_at(value, section.path[len(key) :]) for rank, value in values.items()}


# -- leaves ------------------------------------------------------------------------------------------------------------


MAX_DEPTH = 250
"""Levels that are entered; a tree has fewer, foreign objects may have any number."""

LONG = 8
"""A sequence of more plain values than this is one leaf."""

MAX_BRIEF = 6
"""At most this many plain arguments of a foreign object are shown in one line."""

HOLDING = (dict, list, tuple, Opaque)
"""Types that may contain other values; values of any other type are leaves."""


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a flag or None, which fits into one cell."""
    return scalar(value) is None or isinstance(scalar(value), (bool, int, float, str, timedelta, date))


def is_brief(value: Opaque) -> bool:
    """Whether a foreign object is only a class and a few plain arguments, such as an enum or a path."""
    bare = value.state is None and not value.items and not value.keywords and isinstance(value.args, tuple)
    return bare and len(value.args) <= MAX_BRIEF and all(is_plain(a) or isinstance(a, Global) for a in value.args)


def path_text(value: Opaque) -> str:
    """A path of `pathlib` as text, `.` for an empty one; "" for any other object.

    Its class is in `pathlib._local` if Python 3.13 has pickled it.
    """
    args = value.args if isinstance(value.args, tuple) else (None,)
    is_path = value.name.startswith("pathlib.") and all(isinstance(part, str) for part in args)
    kind = PureWindowsPath if value.name.endswith("WindowsPath") else PurePosixPath
    return str(kind(*args)) if is_path else ""


def brief_args(value: Opaque) -> tuple[Any, ...]:
    """The few plain arguments of a foreign object, the parts of a POSIX path joined; none of an object with more."""
    args: tuple[Any, ...] = value.args if is_brief(value) else ()
    return (path_text(value),) if args and value.name.endswith("PosixPath") and path_text(value) else args


def leaves_of(tree: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Walk a subtree in order, lazily; a long run of plain values is a leaf.

    A foreign object is a leaf, followed by its attributes. It may contain itself, so it is not entered twice on a path.
    """
    return ((path, node) for path, node, is_entered in _nodes_of(tree) if not is_entered or isinstance(node, Opaque))


def containers_of(tree: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the dicts, lists and tuples that `leaves_of` enters, outer ones first."""
    nodes = _nodes_of(tree, HOLDING)
    return ((path, node) for path, node, is_entered in nodes if is_entered and not isinstance(node, Opaque))


def _nodes_of(tree: Any, kinds: type | tuple[type, ...] = object) -> Iterator[tuple[KeyPath, Any, bool]]:
    """Yield the nodes of some classes with their key paths, outer ones first, and whether the nodes in each follow."""
    stack: list[tuple[KeyPath, Any, frozenset[int]]] = [((), tree, frozenset())]
    while stack:
        path, node, above = stack.pop()
        node = plain(node)
        if not isinstance(node, HOLDING):
            yield path, node, False
            continue
        children = [] if id(node) in above or is_run(node) else children_inside(node, inner=bool(above))
        if len(path) >= MAX_DEPTH and children:
            lost = Lost(f"it lies more than {MAX_DEPTH} levels deep") if isinstance(node, Opaque) else node
            yield path, lost, False
            continue
        yield path, node, bool(children)
        above = above | {id(node)} if isinstance(node, Opaque) else above
        stack += [((*path, key), child, above) for key, child in reversed(children) if isinstance(child, kinds)]


def children_inside(node: Any, inner: bool = False) -> list[tuple[Key, Any]]:
    """The children of a container, or the data of a foreign object beyond its own line.

    An `inner` object lies in another object, which is known to unfold to few values.
    """
    if isinstance(node, Opaque):
        return [] if is_brief(node) or (not inner and _unfolds(node)) else list(node.fields.items())
    return children_of(node) or []


def _unfolds(node: Opaque) -> bool:
    """Whether a foreign object shares objects or containers so often that it unfolds to too many values."""
    leaves: dict[int, int] = {}
    kept: list[Any] = []  # keeps the objects alive, so that no id is reused
    own = 0
    stack: list[tuple[Any, list[Any] | None]] = [(node, None)]
    while stack:
        one, values = stack.pop()
        if values is None and id(one) not in leaves:
            inside = one.fields if isinstance(one, Opaque) else one
            values = of_kinds(inside.values() if isinstance(inside, dict) else inside, HOLDING)
            leaves[id(one)] = 1 + len(inside) - len(values)
            own += 1 + len(inside)
            kept.append(inside)
            stack += [(one, values), *((value, None) for value in values)]
        elif values is not None:
            leaves[id(one)] = min(leaves[id(one)] + sum(leaves[id(value)] for value in values), MOST_COUNTED)
    return leaves[id(node)] > MAX_SHARED + MAX_UNFOLDING * own


MAX_SHARED = 10_000
"""Values that a foreign object may unfold to by sharing; an object with more is shown as one value."""

MOST_COUNTED = 1 << 62
"""Counting stops here: a number that doubles at each of many levels would take memory."""


def is_run(node: Any) -> bool:
    """Whether a sequence is shown as one value: short pairs such as betas, and long states of a generator."""
    return isinstance(node, (list, tuple)) and all(is_plain(item) for item in node[:LONG])


def fingerprint(value: Any) -> int | None:
    """CRC-32 of a long sequence of integers or of an array, to distinguish ranks; None for any other value."""
    data = value.data if isinstance(value, NumpyArray) else None
    if isinstance(data, bytes):
        return zlib.crc32(data)
    if isinstance(value, (list, tuple)) and len(value) > LONG and all(type(v) is int for v in value):
        return zlib.crc32(b",".join(b"%d" % v if v.bit_length() <= MAX_BITS else b"?" for v in value))
    return None


# -- entries, and their selection --------------------------------------------------------------------------------------


MAX_ENTRIES = 1_000_000
"""At most this many entries: containers can be shared, so that a small file may unfold to more than memory holds."""

KINDS = ("model", "optimizer", "scheduler", "rng", "other")

ALL = "all"
"""The name that selects every section, for commands that look at the model by default."""


class Entry(NamedTuple):
    """A key of a checkpoint and its value.

    Attributes:
        name: its name for users: `blocks.0.up.weight` of the model to look at, `timestamp.batch`,
            `optimizers.AdamW.state.emb.weight.exp_avg`. It is unique in its checkpoint.
        parameter: fqn of the model's tensor, or of the tensor whose optimizer state it is; "" for all other values.
        slot: name of the state, such as `exp_avg`; "" outside an optimizer's state.
        path: key path in the tree; empty for settings of a flattened optimizer that were grouped.
        value: a tensor, or a plain value; a long run of numbers is one value.
    """

    name: str
    section: str
    kind: SectionKind
    parameter: str
    slot: str
    path: KeyPath
    value: Any

    @property
    def names(self) -> tuple[str, ...]:
        """The entry's name, and its full key path, which problems use."""
        whole = fqn_of(self.path)
        return (self.name, whole) if whole not in ("", self.name) else (self.name,)

    @property
    def inside(self) -> str:
        """The entry's name below its section."""
        return self.name.removeprefix(f"{self.section}.")


def entries_of(ck: Checkpoint) -> tuple[Entry, ...]:
    """Every key of a checkpoint in the order of its sections, empty containers included; at most `MAX_ENTRIES`.

    Raises:
        RefusedError: the names given to `open` do not fit.
    """
    if "entries" not in ck.worked_out:
        ck.worked_out["entries"] = tuple(_with_own_names(islice(_entries(ck), MAX_ENTRIES)))
    found: tuple[Entry, ...] = ck.worked_out["entries"]
    return found


def entries_left_out(ck: Checkpoint) -> Counter[str]:
    """Count the keys of each section beyond `MAX_ENTRIES`; counting stops at twice that number."""
    if len(entries_of(ck)) < MAX_ENTRIES:
        return Counter()
    return Counter(entry.section for entry in islice(_entries(ck), MAX_ENTRIES, 2 * MAX_ENTRIES))


def tensor_entries(ck: Checkpoint) -> tuple[Entry, ...]:
    """The entries that are tensors."""
    return tuple(entry for entry in entries_of(ck) if isinstance(entry.value, Tensor))


def _entries(ck: Checkpoint) -> Iterator[Entry]:
    optimizers = {o.path: o for o in optimizers_of(ck).values()}
    for section in listed_sections(ck):
        if section.kind == "optimizer":
            yield from _of_optimizer(section, optimizers[section.path])
        else:
            prefix = prefix_of(ck, section)
            for path, value in leaves_of(section.value):
                own = fqn_of(path)
                name = ".".join(part for part in (prefix, own) if part) or section.name
                parameter = own if section.kind == "model" and isinstance(value, Tensor) else ""
                yield Entry(name, section.name, section.kind, parameter, "", section.place_of(path), value)


def _of_optimizer(section: Section, optimizer: Optimizer) -> Iterator[Entry]:
    flat = is_flat_optimizer(section.value)
    numbers = {name: number for number, name in optimizer.naming.names.items()}

    def entry(words: KeyPath, value: Any, path: KeyPath, parameter: str = "", slot: str = "") -> Entry:
        return Entry(fqn_of((section.name, *words)), section.name, "optimizer", parameter, slot, path, value)

    for key, state in optimizer.state.items():
        parameter = key if isinstance(key, str) else f"?{key}"
        for slot, values in state.items() if isinstance(state, Mapping) else (("state", state),):
            for path, value in leaves_of(values):
                at = (f"state.{key}.{slot}",) if flat else ("state", numbers.get(key, key), slot)
                words = ("state", parameter, slot, *path)
                yield entry(words, value, (*section.path, *at, *path), parameter, fqn_of((slot, *path)))
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            known = list(group.names) if key == "params" else value
            for path, leaf in leaves_of(known):
                words = ("param_groups", number, key, *path)
                yield entry(words, leaf, () if flat else (*section.path, *words))
    for key, value in nested(section.value).items():
        if key not in ("state", "param_groups"):
            yield from (entry((key, *path), leaf, (*section.path, key, *path)) for path, leaf in leaves_of(value))


def _with_own_names(entries: Iterator[Entry]) -> Iterator[Entry]:
    """Make names unique: prefix the section, then append a number."""
    used: set[str] = set()
    numbers: dict[tuple[str, str], int] = {}
    for entry in entries:
        name, same = entry.name, (entry.section, entry.name)
        while name in used:
            number = numbers[same] = numbers.get(same, 0) + 1
            name = f"{entry.section}.{entry.name}" if number == 1 else f"{entry.section}.{entry.name} {number}"
        used.add(name)
        yield entry if name == entry.name else entry._replace(name=name)


@dataclass(frozen=True)
class Selection:
    """The user's selection of entries; by default all.

    Attributes:
        include: globs, such as `blocks.*.weight`; a name must match at least one. `*` matches dots too. Empty selects
            all names.
        exclude: globs; a name that matches any of them is left out.
        section: a kind of section, or the name of one; "" and `ALL` for all.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    section: str = ""

    @classmethod
    def given(
        cls, filter: str | Iterable[str] | None, exclude: str | Iterable[str] | None, section: str | None = None
    ) -> Selection:
        """Make a selection from the user's globs: one, several, or none."""
        include, without = ((globs,) if isinstance(globs, str) else tuple(globs or ()) for globs in (filter, exclude))
        return cls(include, without, section or "")

    def of(self, ck: Checkpoint) -> list[Entry]:
        """The selected entries of a checkpoint, in its order.

        Raises:
            UsageError: it has no such section.
        """
        names = [section.name for section in sections_of(ck)]
        if self.section and self.section not in (*names, *KINDS, ALL):
            known = ", ".join(dict.fromkeys([*KINDS, *names]))
            raise UsageError(ck.path, f"has no section {self.section!r}; there are {known}")
        inside = [entry for entry in entries_of(ck) if self.section in ("", ALL, entry.kind, entry.section)]
        return [entry for entry in inside if self.takes(*entry.names)] if self.include or self.exclude else inside

    @property
    def words(self) -> str:
        """The globs as options: `--filter 'blocks.*' --exclude '*.bias'`."""
        given = [("filter", glob) for glob in self.include] + [("exclude", glob) for glob in self.exclude]
        return " ".join(f"{spelled(option)} {describe_for_error(glob)}" for option, glob in given)

    def takes(self, *names: str) -> bool:
        """Whether a thing with these names is selected: a glob includes one of the names, and none excludes any."""
        unwanted = bool(self.exclude) and any(map(self._unwanted.fullmatch, names))
        return not unwanted and any(map(self._wanted.fullmatch, names))

    @cached_property
    def _wanted(self) -> re.Pattern[str]:
        return pattern(self.include or ("*",))

    @cached_property
    def _unwanted(self) -> re.Pattern[str]:
        return pattern(self.exclude)


EVERYTHING = Selection()


def pattern(globs: Iterable[str]) -> re.Pattern[str]:
    """A pattern that fully matches the names that any of the globs matches; case-sensitive."""
    return re.compile("|".join(map(translate, globs)))


def is_glob(text: str) -> bool:
    """Whether a key is a glob."""
    return any(sign in text for sign in "*?[")


def matching(entries: Sequence[Entry], glob: str) -> list[Entry]:
    """The entries whose name a glob matches."""
    wanted = pattern((glob,))
    return [entry for entry in entries if wanted.fullmatch(entry.name)]


# -- private values ----------------------------------------------------------------------------------------------------


def is_private(entry: Entry) -> bool:
    """Whether the name of a value, or of a container on its path, begins with `_`; a parameter's values never count."""
    return not entry.parameter and is_private_value(entry.kind, entry.inside, entry.value)


def is_private_value(kind: str, name: str, value: Any) -> bool:
    """Whether a value, with its name below its section, is private; tensors and the model's values never are."""
    return kind != "model" and not isinstance(value, Tensor) and any(map(is_private_name, name.split(".")))


def asks_for_private(keys: Iterable[str]) -> bool:
    """Whether keys or globs contain a private name, such as `_is_initial` or `*._is*`."""
    return any(word.lstrip("*?").startswith("_") for key in keys for word in key.split("."))
