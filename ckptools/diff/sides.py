"""The keys of one compared checkpoint in a common form: no prefixes of wrappers, sections matched by kind.

`torch.optim.Optimizer.state_dict()` numbers the parameters through all param groups. A side that lists names in its
groups in that order tells the number of each name. Both sides have the same order only if their groups have equally
many parameters, names known on both sides agree, and every state has the same slots and shapes.
Source: torch/optim/optimizer.py, `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import eq
from typing import Any, NamedTuple, TypeVar

from ckptools.diff.record import Side, Subject
from ckptools.errors import ReadError
from ckptools.files.opening import OpenFiles
from ckptools.keys.entries import (
    MAX_ENTRIES,
    Entry,
    RankLeaf,
    entries_left_out,
    entries_of,
    rank_containers,
    rank_leaves,
)
from ckptools.keys.random_states import generator_leaves, holds_state, random_states
from ckptools.keys.sharding import placement, sharding_rows
from ckptools.keys.value_digests import (
    MAX_SMALL,
    Content,
    content_of,
    digest_of,
    is_number,
    kind_of,
    number_in,
    parts_of_value,
    traits_of,
)
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover_problem, repeat_problem
from ckptools.model.rank_vote import vote
from ckptools.model.records import grouped
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Absent, leaf_at
from ckptools.option import spelled
from ckptools.tensor_io.fetch_ahead import fetched, parts_of_all
from ckptools.text import KeyPath, few, fqn_of, plural
from ckptools.training_state.models import chosen_models, listed_sections, models_of
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.rank_values import is_own
from ckptools.training_state.role_words import APART
from ckptools.training_state.sections import Section, is_flat_optimizer, sections_of
from ckptools.training_state.steps import COUNTERS, EPOCH_COUNTERS
from ckptools.training_state.wrappers import ddp_prefix, without_wrappers

Identity = tuple[str, ...]
"""Identifies a key on both sides: kind of the section, section, and name in the section."""


class SideTensor(NamedTuple):
    """A tensor of the model, of an optimizer's state, or a large one elsewhere.

    Attributes:
        layout: how it is sharded, in words.
        number: True if its parameter has a number but no name.
        assumed: True if its parameter got its name by order.
        problem: why its values cannot be read.
        tensor: None in a digest file.
        sha256: of its values in row-major order; "" if not computed.
        traits: its class and flags, such as `Parameter, requires_grad`.
    """

    identity: Identity
    name: str
    subject: Subject
    dtype: str
    shape: tuple[int, ...]
    layout: str
    number: bool = False
    assumed: bool = False
    problem: str = ""
    tensor: Tensor | None = None
    sha256: str = ""
    traits: str = ""


class SideValue(NamedTuple):
    """A plain value by rank; under the key None if all ranks share it."""

    identity: Identity
    name: str
    subject: Subject
    contents: Mapping[int | None, Content]
    number: bool = False


class ContainerForm(NamedTuple):
    """The form of a dict, list or tuple; the values in it are compared as keys of their own.

    Attributes:
        kind: class.
        keys: digest of the sorted keys.
        order: digest of the keys in order.
        texts: digest of the sorted keys as texts.
        attributes: digest of the attributes saved with the container; "" for none.
    """

    kind: str
    keys: str
    order: str
    texts: str
    attributes: str


class SideContainer(NamedTuple):
    """A dict, list or tuple that contains other keys.

    Attributes:
        by_name: True if its keys may be names of parameters, whose order means nothing.
        node: the container; None in a digest file.
        form: read from a digest file; None if `node` is given.
    """

    name: str
    subject: Subject
    rank: int | None
    by_name: bool
    node: Any
    form: ContainerForm | None = None


class SideGroup(NamedTuple):
    """A param group.

    Attributes:
        params: fqns of its parameters without wrappers' prefixes; `?3` if only the number is known.
        ordered: True if its parameters are listed in the order of the optimizer, by which it numbers them.
    """

    section: str
    number: int
    params: tuple[str, ...]
    settings: Mapping[str, Content]
    ordered: bool = False

    @property
    def numbered(self) -> bool:
        """Whether the group lists a number whose name is unknown."""
        return any(name.startswith("?") for name in self.params)


@dataclass
class Contents:
    """All keys of one of the two compared checkpoints, called sides.

    Attributes:
        sections: names of its sections by kind.
        lost_ranks: ranks with missing or unreadable files.
        by_rank: identities, cut short, below which ranks have different values.
        text_keys: whether the format stores numbers as keys as texts.
        written_by: format and writer, which decide which classes of values are kept.
        containers: dicts, lists and tuples by identity and rank.
        left_out: note on keys beyond the limit, which are not compared; "" for none.
        model: section of the model that is looked at; "" if there are several, or none.
    """

    facts: Side
    sections: dict[str, list[str]] = field(default_factory=dict)
    tensors: dict[Identity, SideTensor] = field(default_factory=dict)
    values: dict[Identity, SideValue] = field(default_factory=dict)
    groups: list[SideGroup] = field(default_factory=list)
    lost_ranks: tuple[int, ...] = ()
    damage: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    by_rank: set[Identity] = field(default_factory=set)
    text_keys: bool = False
    written_by: str = ""
    containers: dict[tuple[Identity, int | None], SideContainer] = field(default_factory=dict)
    left_out: str = ""
    model: str = ""


# -- pairs -------------------------------------------------------------------------------------------------------------


PAIRED: tuple[str, ...] = ("model", "optimizer", "scheduler")
"""Kinds of sections that are paired even if their names differ."""

OneSide = TypeVar("OneSide", SideTensor, SideValue)


def without_quotes(identity: Identity) -> Identity:
    """Remove the quotes that tell the key "1" from the key 1."""
    return tuple(part[1:-1] if part[:1] == part[-1:] == "'" and part[1:-1].isdecimal() else part for part in identity)


def renamed_sections(a: Contents, b: Contents) -> dict[tuple[str, str], str]:
    """Pair renamed sections, if one of a kind is left on each side: the name in A by kind and name in B.

    The models that are looked at are a pair, whatever other models either side has.
    """
    found: dict[tuple[str, str], str] = {}
    both = bool(a.model and b.model)
    if both and a.model not in b.sections["model"]:
        found["model", b.model] = a.model
    for kind in PAIRED[both:]:
        left = [name for name in a.sections.get(kind, ()) if name not in b.sections.get(kind, ())]
        right = [name for name in b.sections.get(kind, ()) if name not in a.sections.get(kind, ())]
        if len(left) == len(right) == 1:
            found[kind, right[0]] = left[0]
    return found


def as_in_a(b: Contents, names: Mapping[tuple[str, str], str]) -> Contents:
    """Rename the sections of B as in A."""

    def at(identity: Identity) -> Identity:
        kind, section, *rest = identity
        return kind, names.get((kind, section), section), *rest

    return replace(
        b,
        sections={kind: [names.get((kind, name), name) for name in own] for kind, own in b.sections.items()},
        model=names.get(("model", b.model), b.model),
        tensors={at(i): t._replace(identity=at(i)) for i, t in b.tensors.items()},
        values={at(i): v._replace(identity=at(i)) for i, v in b.values.items()},
        groups=[g._replace(section=names.get(("optimizer", g.section), g.section)) for g in b.groups],
        by_rank={at(i) for i in b.by_rank},
        containers={(at(i), rank): c for (i, rank), c in b.containers.items()},
    )


def without_models_of_one_side(a: Contents, b: Contents, asked: str) -> tuple[Contents, Contents, list[str]]:
    """Drop the models that only one side has beside the one that is looked at; also return a note on each.

    The user `asked` for one of them if it is the name of the section to compare.
    """
    if not (a.model and b.model):
        return a, b, []
    kept, notes = [], list[str]()
    for which, side, other in (("A", a, b), ("B", b, a)):
        alone = set(side.sections["model"]) - set(other.sections["model"]) - {side.model, asked}
        for name in sorted(alone):
            count = sum(identity[:2] == ("model", name) for identity in side.tensors)
            ways = f"{spelled('model', name)} compares it, {spelled('model', 'all')} counts it"
            notes.append(f"not compared: {plural(count, 'tensor')} of the model {name}, which only {which} has; {ways}")
        kept.append(_without_models(side, alone))
    return kept[0], kept[1], notes


def _without_models(side: Contents, names: set[str]) -> Contents:
    def kept(identity: Identity) -> bool:
        return identity[0] != "model" or identity[1] not in names

    return replace(
        side,
        tensors={i: t for i, t in side.tensors.items() if kept(i)},
        values={i: v for i, v in side.values.items() if kept(i)},
        containers={(i, rank): c for (i, rank), c in side.containers.items() if kept(i)},
    )


def without_classes(side: Contents) -> Contents:
    """Drop details that formats keep differently: classes of values, the order of keys, traits of tensors."""

    def loose(content: Content) -> Content:
        return replace(content, exact="")

    def setting(group: SideGroup) -> SideGroup:
        return group._replace(settings={key: loose(content) for key, content in group.settings.items()})

    return replace(
        side,
        tensors={i: t._replace(traits="") for i, t in side.tensors.items()},
        values={
            i: v._replace(contents={rank: loose(c) for rank, c in v.contents.items()}) for i, v in side.values.items()
        },
        groups=[setting(group) for group in side.groups],
        containers={},
    )


def unlisted(side: Contents, other: Contents) -> Contents:
    """Split lists by rank, such as the third rank's `position.2.sample`, if the other side has one value per rank."""
    values: dict[Identity, SideValue] = {}
    for identity, value in side.values.items():
        cut = next((len(b) for b in other.by_rank - side.by_rank if _lists(b, identity)), None)
        if cut is None or None not in value.contents:
            values[identity] = value
            continue
        rank, own = int(identity[cut]), (*identity[:cut], *identity[cut + 1 :])
        known = values.get(own)
        name = value.name.replace(f".{rank}.", ".", 1).removesuffix(f".{rank}")
        before = known.contents if known else {}
        values[own] = value._replace(identity=own, name=name, contents={**before, rank: value.contents[None]})
    return replace(side, values=values)


def _lists(below: Identity, identity: Identity) -> bool:
    n = len(below)
    return len(identity) > n and identity[:n] == below and identity[n].isdecimal()


def pairs(
    a: Mapping[Identity, OneSide], b: Mapping[Identity, OneSide]
) -> Iterator[tuple[OneSide | None, OneSide | None]]:
    """Pair the keys in the order of A, a key 1 also with a key "1"; keys of B alone come last."""
    left = {without_quotes(identity): identity for identity in b if identity not in a}
    taken: set[Identity] = set()
    for identity, key in a.items():
        there = identity if identity in b else left.get(without_quotes(identity))
        yield key, b[there] if there is not None else None
        taken |= {there} if there is not None else set()
    yield from ((None, key) for identity, key in b.items() if identity not in taken)


def with_text_keys(side: Contents) -> Contents:
    """Turn keys that are numbers into texts, to compare with a format that stores only texts."""
    at = {i: i if without_quotes(i) in side.values else without_quotes(i) for i in side.values}
    values = {at[i]: v._replace(identity=at[i]) for i, v in side.values.items()}
    return replace(side, values=values, by_rank={without_quotes(i) for i in side.by_rank})


# -- numbered parameters -----------------------------------------------------------------------------------------------


def unsure() -> str:
    """Why names cannot be matched with numbers, as the detail of a row."""
    way = f"{spelled('names')} FROM gives them"
    return f"one side has numbers, the other names, and their order is not proven ({way})"


Names = Mapping[str, str]
"""The other side's name for a numbered parameter such as `?3`."""


def named_by_order(a: Contents, b: Contents) -> tuple[Contents, Contents, list[str], set[str]]:
    """Name the numbered parameters of one side if the other side proves their order.

    Also returns a note for each optimizer that got names, and the sections where numbers on one side still face names
    on the other, so that a key that only one side seems to have may exist on both.
    """
    notes, unsure = [], set[str]()
    for section in dict.fromkeys(group.section for group in a.groups):
        mine, others = (tuple(g for g in side.groups if g.section == section) for side in (a, b))
        if _numbered(mine) == _numbered(others) or not others:
            continue
        names = _names(section, a, b) if _numbered(mine) else _names(section, b, a)
        if names is None:
            unsure.add(section)
            continue
        a, b = (_with_names(side, section, names) if _numbered(g) else side for side, g in ((a, mine), (b, others)))
        which = "A's numbers are B's names" if _numbered(mine) else "B's numbers are A's names"
        notes.append(f"{section}: {which} in the order of its groups, which {plural(len(names), 'shape')} agree with")
    return a, b, notes, unsure


def _numbered(groups: Sequence[SideGroup]) -> bool:
    return any(group.numbered for group in groups)


def _names(section: str, numbered: Contents, named: Contents) -> Names | None:
    """Map each number to its name; None if the order is not proven."""
    mine, others = ([g for g in side.groups if g.section == section] for side in (numbered, named))
    sizes = [len(group.params) for group in mine]
    if not all(g.ordered for g in (*mine, *others)) or sizes != [len(group.params) for group in others]:
        return None
    pairs = [pair for g, h in zip(mine, others, strict=True) for pair in zip(g.params, h.params, strict=True)]
    if any(not number.startswith("?") and number != name for number, name in pairs):
        return None
    here, there = _shapes(section, numbered), _shapes(section, named)
    if any(here.get(number) != there.get(name) for number, name in pairs):
        return None
    return {number: name for number, name in pairs if number.startswith("?")}


def _shapes(section: str, side: Contents) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of the state slots of each parameter; () for a plain number, as for a tensor of one element."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for identity, key in (*side.tensors.items(), *side.values.items()):
        if _is_state(identity, section):
            found.setdefault(identity[2], {})[identity[3]] = getattr(key, "shape", ())
    return found


def _is_state(identity: Identity, section: str) -> bool:
    return len(identity) == 4 and identity[:2] == ("optimizer", section)


def _with_names(side: Contents, section: str, names: Names) -> Contents:
    def named(key: OneSide) -> OneSide:
        kind, *rest = key.identity
        if not _is_state(key.identity, section) or rest[1] not in names:
            return key
        return key._replace(identity=(kind, rest[0], names[rest[1]], rest[2]), number=False)

    def group(one: SideGroup) -> SideGroup:
        params = tuple(names.get(name, name) for name in one.params)
        return one._replace(params=params) if one.section == section else one

    return replace(
        side,
        tensors={key.identity: key for key in map(named, side.tensors.values())},
        values={key.identity: key for key in map(named, side.values.values())},
        groups=list(map(group, side.groups)),
    )


# -- collect the keys of a checkpoint as one side: tensors, plain values, param groups, states of random generators


MORE_COUNTERS = ("sample", "token", "samples", "tokens", "num_batches_fetched", "consumed_train_samples")

AGAIN = "again"
"""Appended to the identity of a key that another key of the same side already has."""


def contents_of(ck: Checkpoint, files: OpenFiles) -> Contents:
    """Collect all keys of a checkpoint, without reading values of large tensors."""
    rows = tuple(f"{row.how}: {plural(row.tensors, 'tensor')}" for row in sharding_rows(ck))
    world = ck.world_size.exact if type(ck.world_size.exact) is int else None
    found = Contents(Side(str(ck.path), ck.name, ck.saved_as, ck.step.value, world, rows), text_keys=ck.text_keys)
    for section in listed_sections(ck):
        found.sections.setdefault(section.kind, []).append(section.name)
    looked_at = chosen_models(ck)
    found.model = looked_at[0].name if len(looked_at) == 1 else ""
    found.written_by = f"{ck.format}, {ck.saved_as}" + (", written by ckptools" if ck.provenance else "")
    found.damage = tuple(f"{p.code} {p.message}" for p in ck.problems if p.severity == "error")
    found.lost_ranks = tuple(f.rank for f in ck.files if f.status in ("missing", "cut", "bad") and f.rank is not None)
    _Keys(ck, files, found).add()
    found.left_out = _left_out(ck)
    return found


def _left_out(ck: Checkpoint) -> str:
    """Note which keys of models and optimizers exceed the limit and are not compared; "" for none."""
    counts = entries_left_out(ck)
    own = {s.name: counts[s.name] for s in sections_of(ck) if s.kind in ("model", "optimizer") and counts[s.name]}
    some = counts.total() == MAX_ENTRIES  # further keys, of any section, may follow
    if not own and not some:
        return ""
    count = "at least " * some + plural(sum(own.values()) or counts.total(), "key")
    whose = few(list(own or counts)) + " and what follows" * some
    return f"not compared: {count} of {whose}; at most {MAX_ENTRIES} of a checkpoint are"


class _Keys:
    """Adds the keys of a checkpoint to its side."""

    def __init__(self, ck: Checkpoint, files: OpenFiles, found: Contents) -> None:
        self.ck, self.files, self.found = ck, files, found
        has_optimizer = any(s.kind == "optimizer" for s in sections_of(ck))
        self.optimizers = {o.path: o for o in optimizers_of(ck).values()} if has_optimizer else {}
        namings = [optimizer.naming for optimizer in self.optimizers.values()]
        self.assumed = {n.names[i] for n in namings for i in n.assumed if i in n.names}
        named = grouped((e for e in entries_of(ck) if e.parameter[:1] not in ("", "?")), lambda entry: entry.section)
        self.prefixes = {section: ddp_prefix([e.parameter for e in own]) for section, own in named.items()}
        self.of_optimizers = {s.name for s in sections_of(ck) if s.kind == "optimizer"}
        self.apart = [f"{model.section.name}." for model in models_of(ck) if model.role in APART]

    def add(self) -> None:
        entries = fetched(entries_of(self.ck), lambda e: parts_of_all(e.value.found) if is_number(e.value) else [])
        for entry in entries:
            setting = not entry.parameter and entry.name.removeprefix(f"{entry.section}.").startswith("param_groups.")
            if entry.kind == "model" or (entry.kind == "optimizer" and not setting):
                self._of_entry(entry)
        for section in listed_sections(self.ck):
            if section.kind == "optimizer":
                optimizer = self.optimizers[section.path]
                ordered = not (is_flat_optimizer(section.value) or self.ck.in_parts)
                for number, group in enumerate(optimizer.param_groups):
                    at = () if is_flat_optimizer(section.value) else (*section.path, "param_groups", number)
                    settings = {str(k): self._setting((*at, k), v) for k, v in group.items() if k != "params"}
                    params = tuple(self._bare(section.name, name) for name in group.names)
                    self.found.groups.append(SideGroup(section.name, number, params, settings, ordered))
            elif section.kind != "model":
                self._leaves(section)
            for path, rank, node, _ in rank_containers(self.ck, section):
                by_name = section.kind == "optimizer" and len(path) <= 2
                inside = node.values() if isinstance(node, dict) else node
                by_name |= section.kind == "model" and any(isinstance(value, Tensor) for value in inside)
                identity = (section.kind, section.name, *map(_key_text, path))
                name, subject = fqn_of((section.name, *path)), _subject(section, RankLeaf(path, rank, node))
                self.found.containers[identity, rank] = SideContainer(name, subject, rank, by_name, node)
        for stream, states in random_states(self.ck, self.files).items():
            ranked = {owner: content for owner, content in states.items() if not isinstance(owner, str)}
            if ranked:
                self._value(SideValue(("rng", "", stream), f"rng {stream}", "rng", ranked))
            for owner, content in states.items():
                if isinstance(owner, str):
                    label = f"{stream} of {owner}"
                    self._value(SideValue(("rng", "", label), f"rng {label}", "rng", {None: content}))
        self.found.notes = tuple(self._notes())

    def _bare(self, section: str, name: str) -> str:
        """Remove wrappers' prefixes from a fqn, and the section of a discriminator or a critic from its optimizer's."""
        short = without_wrappers(name).removeprefix(self.prefixes.get(section, ""))
        before = next((one for one in self.apart if short.startswith(one) and section in self.of_optimizers), "")
        return short.removeprefix(before)

    def _of_entry(self, entry: Entry) -> None:
        identity = self._identity(entry)
        number = entry.parameter.startswith("?")
        if not isinstance(entry.value, Tensor):
            subject: Subject = "moments" if entry.slot else "hyperparameters"
            if entry.kind == "model":
                subject = self._weights(entry)
            elif entry.slot == "step":
                subject = "optimizer steps"
            contents = self._contents(entry.path, entry.value)
            self._value(SideValue(identity, entry.name, subject, contents, number))
        elif entry.slot == "step" and entry.value.numel == 1:
            self._value(SideValue(identity, entry.name, "optimizer steps", {None: self._step(entry.value)}, number))
        else:
            subject = self._weights(entry) if entry.kind == "model" else "moments"
            parameter = entry.parameter if entry.kind == "optimizer" else ""
            self._tensor(identity, entry.name, subject, entry.value, parameter)

    def _weights(self, entry: Entry) -> Subject:
        """The subject of a model's key; those of a model beside the one that is looked at are counted apart."""
        return "weights" if self.found.model in ("", entry.section) else "other models"

    def _identity(self, entry: Entry) -> Identity:
        if entry.parameter:
            return (entry.kind, entry.section, self._bare(entry.section, entry.parameter), entry.slot)
        return (entry.kind, entry.section, entry.name.removeprefix(f"{entry.section}."))

    def _contents(self, path: KeyPath, value: Any, whole: bool = False) -> dict[int | None, Content]:
        """Contents at a key path: one for all ranks, or one per rank if they differ."""
        above = next((path[:n] for n in range(len(path) + 1) if path and path[:n] in self.ck.unequal), None)
        if above is None:
            return {None: content_of(value, self.files, whole=whole)}
        own = {rank: leaf_at(tree, path[len(above) :]) for rank, tree in self.ck.unequal[above].items()}
        return {
            rank: content_of(v, self.files, rank, whole=whole) for rank, v in own.items() if not isinstance(v, Absent)
        }

    def _step(self, tensor: Tensor) -> Content:
        try:
            content = content_of(number_in(tensor, self.files), self.files)
            kind = f"{tensor.dtype} tensor {traits_of(tensor)}"
            return replace(content, exact=f"{kind} {content.exact.rpartition(' ')[2]}")
        except ReadError as error:
            return Content("", "unknown", error.reason)

    def _tensor(self, identity: Identity, name: str, subject: Subject, tensor: Tensor, parameter: str = "") -> None:
        while identity in self.found.tensors:  # two keys may have one name: "a.b", and "b" in "a"
            identity = (*identity, AGAIN)
        problem = _problem(tensor, name)
        try:
            traits = traits_of(tensor)
        except ReadError as error:
            traits, problem = "", f"its attributes: {error.reason}"
        self.found.tensors[identity] = SideTensor(
            identity, name, subject, tensor.dtype, tensor.shape, placement(tensor), parameter.startswith("?"),
            parameter in self.assumed, problem, tensor, traits=traits,
        )  # fmt: skip

    def _value(self, value: SideValue) -> None:
        while value.identity in self.found.values:
            value = value._replace(identity=(*value.identity, AGAIN))
        self.found.values[value.identity] = value

    def _setting(self, path: KeyPath, value: Any) -> Content:
        """A hyperparameter; if ranks disagree on it, it counts as unreadable."""
        own = self._contents(path, value, whole=True)
        if len(set(own.values())) < 2:
            return next(iter(own.values()))
        found = vote([(rank, content.text) for rank, content in own.items() if rank is not None], eq)
        return Content("", found.by_rank(str), "ranks have different values")

    def _leaves(self, section: Section) -> None:
        found: dict[Identity, list[RankLeaf]] = {}
        above = section.kind, section.name
        leaves = self._beside_generators(section) if section.kind == "rng" else rank_leaves(self.ck, section)
        for leaf in leaves:
            found.setdefault((*above, *map(_key_text, leaf.path)), []).append(leaf)
            if leaf.below is not None:
                self.found.by_rank.add((*above, *map(_key_text, leaf.below)))
        for identity, same in found.items():
            self._leaf(section, identity, same)

    def _leaf(self, section: Section, identity: Identity, leaves: Sequence[RankLeaf]) -> None:
        value, rank = leaves[0].value, leaves[0].rank
        name = fqn_of((section.name, *leaves[0].path))
        if rank is None and isinstance(value, Tensor) and value.nbytes > MAX_SMALL:
            self._tensor(identity, name, "other tensors", value)
            return
        if rank is None and not isinstance(value, Tensor):
            contents = self._contents((*section.path, *leaves[0].path), value)
        else:
            ahead = fetched(leaves, lambda leaf: parts_of_value(leaf.value, leaf.rank))
            contents = {leaf.rank: content_of(leaf.value, self.files, leaf.rank) for leaf in ahead}
        self._value(SideValue(identity, name, _subject(section, leaves[0]), contents))

    def _beside_generators(self, section: Section) -> Iterator[RankLeaf]:
        """Yield values stored beside random states, such as a seed."""
        for leaves in generator_leaves(self.ck, section).values():
            for path, owner, value in () if holds_state(leaves) else leaves:
                if isinstance(owner, str):
                    yield RankLeaf((owner, *path), None, value)
                else:
                    yield RankLeaf(path, owner, value)

    def _notes(self) -> Iterator[str]:
        wrapped = [e.parameter for e in entries_of(self.ck) if without_wrappers(e.parameter) != e.parameter]
        if wrapped:
            yield f"names of wrappers were taken off {plural(len(wrapped), 'name')}, such as {wrapped[0]}"
        ddp = [section for section, prefix in self.prefixes.items() if prefix]
        if ddp:
            yield f"DDP's `module.` was taken off every name of {few(ddp)}"
        for optimizer in self.optimizers.values():
            if optimizer.naming.note:
                yield f"{optimizer.name}: {optimizer.naming.note}"


def _problem(tensor: Tensor, name: str) -> str:
    """Why the values of a tensor cannot be read."""
    found = cover_problem(tensor, name)
    return repeat_problem(tensor) if found is None else found.message


def _subject(section: Section, leaf: RankLeaf) -> Subject:
    if section.kind == "scheduler":
        return "scheduler"
    if section.kind == "rng":
        return "rng"
    if is_own(section):
        return "data position"
    last: Any = (*section.path, *leaf.path)[-1:]
    counted = bool(last) and last[0] in (*COUNTERS, *EPOCH_COUNTERS, *MORE_COUNTERS)
    return "counters" if counted and type(leaf.value) in (int, float) else "other values"


def _key_text(key: Any) -> str:
    """Spell a key in an identity: text that looks like a number in quotes; a key of a rare type as class and digest."""
    if isinstance(key, str):
        return f"'{key}'" if key.isdecimal() or key[:1] in ("'", "<") else key
    return str(key) if type(key) is int else f"<{kind_of(key)} {digest_of(key)}>"
