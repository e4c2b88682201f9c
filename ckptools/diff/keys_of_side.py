"""The keys of a checkpoint as one side of a comparison: tensors, plain values, param groups, states of generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import eq
from typing import Any

from ckptools.diff.record import Side, Subject
from ckptools.diff.sides import Contents, Identity, SideContainer, SideGroup, SideTensor, SideValue
from ckptools.errors import ReadError
from ckptools.files.opening import OpenFiles
from ckptools.keys.entries import MAX_ENTRIES, Entry, entries_left_out, entries_of
from ckptools.keys.random_states import generator_leaves, holds_state, random_states
from ckptools.keys.rank_leaves import RankLeaf, rank_containers, rank_leaves
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
from ckptools.model.cover import cover_problem
from ckptools.model.rank_vote import vote
from ckptools.model.records import grouped
from ckptools.model.shards import record_sizes
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of, leaf_at
from ckptools.model.values import Absent
from ckptools.tensor_io.fetch_ahead import fetched, parts_of_all
from ckptools.text import few, plural
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.parameter_names import ddp_prefix, without_wrappers
from ckptools.training_state.rank_values import is_own
from ckptools.training_state.sections import Section, is_flat_optimizer, sections_of
from ckptools.training_state.steps import COUNTERS, EPOCH_COUNTERS

MORE_COUNTERS = ("sample", "token", "samples", "tokens", "num_batches_fetched", "consumed_train_samples")

AGAIN = "again"
"""Ends the identity of a key that looks like another one of its side."""

MAX_REPEATED = 1 << 24
"""At most this many elements of an expanded tensor, which has fewer bytes, are read."""


def contents_of(ck: Checkpoint, files: OpenFiles) -> Contents:
    """Collect all keys of a checkpoint; values of large tensors are not read."""
    rows = tuple(f"{row.how}: {plural(row.tensors, 'tensor')}" for row in sharding_rows(ck))
    world = ck.world_size.exact if type(ck.world_size.exact) is int else None
    found = Contents(Side(str(ck.path), ck.name, ck.saved_as, ck.step.value, world, rows), text_keys=ck.text_keys)
    for section in sections_of(ck):
        found.sections.setdefault(section.kind, []).append(section.name)
    found.written_by = f"{ck.format}, {ck.saved_as}" + (", written by ckptools" if ck.provenance else "")
    found.damage = tuple(f"{p.code} {p.message}" for p in ck.problems if p.severity == "error")
    found.lost_ranks = tuple(f.rank for f in ck.files if f.status in ("missing", "cut", "bad") and f.rank is not None)
    _Keys(ck, files, found).add()
    found.left_out = _left_out(ck)
    return found


def _left_out(ck: Checkpoint) -> str:
    """Which keys of models and optimizers are too many to be compared; "" for none."""
    counts = entries_left_out(ck)
    own = {s.name: counts[s.name] for s in sections_of(ck) if s.kind in ("model", "optimizer") and counts[s.name]}
    some = counts.total() == MAX_ENTRIES  # more may follow, of any section
    if not own and not some:
        return ""
    count = "at least " * some + plural(sum(own.values()) or counts.total(), "key")
    whose = few(list(own or counts)) + " and what follows" * some
    return f"not compared: {count} of {whose}; at most {MAX_ENTRIES} of a checkpoint are"


class _Keys:
    """Add the keys of a checkpoint to the contents of its side."""

    def __init__(self, ck: Checkpoint, files: OpenFiles, found: Contents) -> None:
        self.ck, self.files, self.found = ck, files, found
        has_optimizer = any(s.kind == "optimizer" for s in sections_of(ck))
        self.optimizers = {o.path: o for o in optimizers_of(ck).values()} if has_optimizer else {}
        namings = [optimizer.naming for optimizer in self.optimizers.values()]
        self.assumed = {n.names[i] for n in namings for i in n.assumed if i in n.names}
        named = grouped((e for e in entries_of(ck) if e.parameter[:1] not in ("", "?")), lambda entry: entry.section)
        self.prefixes = {section: ddp_prefix([e.parameter for e in own]) for section, own in named.items()}

    def add(self) -> None:
        entries = fetched(entries_of(self.ck), lambda e: parts_of_all(e.value.found) if is_number(e.value) else [])
        for entry in entries:
            if entry.kind == "model" or (entry.kind == "optimizer" and not _is_setting(entry)):
                self._of_entry(entry)
        for section in sections_of(self.ck):
            if section.kind == "optimizer":
                self._groups(section)
            elif section.kind != "model":
                self._leaves(section)
            self._containers(section)
        self._generators()
        self.found.notes = tuple(self._notes())

    def _bare(self, section: str, name: str) -> str:
        """A fqn without the parts that wrappers put into it."""
        return without_wrappers(name).removeprefix(self.prefixes.get(section, ""))

    def _of_entry(self, entry: Entry) -> None:
        identity = self._identity(entry)
        number = entry.parameter.startswith("?")
        if not isinstance(entry.value, Tensor):
            subject: Subject = "moments" if entry.slot else "hyperparameters"
            subject = "weights" if entry.kind == "model" else "optimizer steps" if entry.slot == "step" else subject
            contents = self._contents(entry.path, entry.value)
            self._value(SideValue(identity, entry.name, subject, contents, number))
        elif entry.slot == "step" and entry.value.numel == 1:
            self._value(SideValue(identity, entry.name, "optimizer steps", {None: self._step(entry.value)}, number))
        else:
            subject = "weights" if entry.kind == "model" else "moments"
            parameter = entry.parameter if entry.kind == "optimizer" else ""
            self._tensor(identity, entry.name, subject, entry.value, parameter)

    def _identity(self, entry: Entry) -> Identity:
        if entry.parameter:
            return (entry.kind, entry.section, self._bare(entry.section, entry.parameter), entry.slot)
        return (entry.kind, entry.section, entry.name.removeprefix(f"{entry.section}."))

    def _contents(self, path: KeyPath, value: Any, whole: bool = False) -> dict[int | None, Content]:
        """The value at a key path: one for all ranks, or one for each rank if they differ."""
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
        while identity in self.found.tensors:  # two keys may look alike: "a.b" and "b" in "a"
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

    def _containers(self, section: Section) -> None:
        for path, rank, node, _ in rank_containers(self.ck, section):
            by_name = section.kind == "optimizer" and len(path) <= 2
            by_name |= section.kind == "model" and any(isinstance(v, Tensor) for v in _values_in(node))
            identity = (section.kind, section.name, *map(_key_text, path))
            name, subject = fqn_of((section.name, *path)), _subject(section, RankLeaf(path, rank, node))
            self.found.containers[identity, rank] = SideContainer(name, subject, rank, by_name, node)

    def _groups(self, section: Section) -> None:
        optimizer = self.optimizers[section.path]
        ordered = not (is_flat_optimizer(section.value) or self.ck.in_parts)
        for number, group in enumerate(optimizer.param_groups):
            path = () if is_flat_optimizer(section.value) else (*section.path, "param_groups", number)
            settings = {str(k): self._setting((*path, k), v) for k, v in group.items() if k != "params"}
            params = tuple(self._bare(section.name, name) for name in group.names)
            self.found.groups.append(SideGroup(section.name, number, params, settings, ordered))

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

    def _generators(self) -> None:
        """Add the states of generators by their stream, whatever object contains them."""
        for stream, states in random_states(self.ck, self.files).items():
            ranked = {owner: content for owner, content in states.items() if not isinstance(owner, str)}
            if ranked:
                self._value(SideValue(("rng", "", stream), f"rng {stream}", "rng", ranked))
            for owner, content in states.items():
                if isinstance(owner, str):
                    name = f"{stream} of {owner}"
                    self._value(SideValue(("rng", "", name), f"rng {name}", "rng", {None: content}))

    def _beside_generators(self, section: Section) -> Iterator[RankLeaf]:
        """Values in a section of random states that are no states, such as a seed."""
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
    """Why the values of a tensor cannot be read; a file may claim more elements than can be read."""
    found = cover_problem(tensor, name)
    if found is not None:
        return found.message
    repeated = any(numel > max(nbytes, MAX_REPEATED) for numel, nbytes in record_sizes(tensor.shards))
    return "its strides show the bytes of a record more than once" if repeated else ""


def _values_in(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node


def _is_setting(entry: Entry) -> bool:
    return not entry.parameter and entry.name.removeprefix(f"{entry.section}.").startswith("param_groups.")


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
    """A key in an identity: a text that looks like another key stands in quotes, a key of a rare type has a digest."""
    if isinstance(key, str):
        return f"'{key}'" if key.isdecimal() or key[:1] in ("'", "<") else key
    return str(key) if type(key) is int else f"<{kind_of(key)} {digest_of(key)}>"
