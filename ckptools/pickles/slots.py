"""Interpret a pickle with slots in the place of some values, which proves where in its tree those values go.

A slot is no number and no text, so nothing can be worked out of it. It may be put into containers and objects and come
out in the tree; where a call that ckptools answers, a key or a class would look at one, the pickle is refused. Then any
pickle that is spelled alike has the same tree, but for the slots: what fills them is what it has there.

Two things may look at slots. A storage's device is dropped. The mesh of a DTensor holds the rank, so it is filled with
the values of the pickle that is interpreted, and the DTensor notes what it was placed by, to be placed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

from ckptools.model.tensor import Tensor
from ckptools.model.tree import of_kinds
from ckptools.model.values import Global, Opaque
from ckptools.pickles.classes.rebuild import REBUILD
from ckptools.pickles.machine import Machine
from ckptools.pickles.machine_state import Locate, MachineState, PickleError
from ckptools.pickles.objects import attributes, attributes_in
from ckptools.pickles.opcodes import DISPATCH, Handler
from ckptools.pickles.spelling import VALUES, Spelling, values_at

REBUILDS_DTENSOR = ("torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2")
REBUILDS_PARAMETER = "torch._utils._rebuild_parameter"
WRAPPER = "_rebuild_wrapper_subclass"

MAX_LOOKED_AT = 50_000_000
"""Values that are looked at in search of slots."""

DEVICE = 3
"""Index of the device in a persistent id of a storage: `('storage', class, key, device, numel)`."""


class ValueSlot:
    """Stands for a value; `number` counts the values of the pickle."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Placing(NamedTuple):
    """What a DTensor is placed by, kept as its `detail`.

    Attributes:
        local: the local tensor.
        mesh: the state of its mesh, with slots.
        placements: as `classes.dtensor` reads them.
    """

    local: Tensor
    mesh: Any
    placements: tuple[Any, ...]


class SlotMachine(Machine):
    """Interprets a pickle with slots for the values of these numbers.

    Raises:
        PickleError: something would look at a slot, or the pickle cannot be interpreted.
    """

    def __init__(self, spelling: Spelling, numbers: Collection[int], locate: Locate) -> None:
        places = {number: spelling.starts[number] for number in numbers}
        values = values_at(spelling.data, places)
        if values is None:
            raise PickleError("malformed values")
        self.values: Mapping[int, Any] = values
        self.slots = {place: ValueSlot(number) for number, place in places.items()}
        self.left = MAX_LOOKED_AT
        super().__init__(spelling.data, locate, fast=False)
        self.dispatch = _DISPATCH

    def key(self, key: Any) -> Any:
        """Return `key`, in which there is no slot."""
        self.refuse(key)
        return super().key(key)

    def persistent(self, pid: Any) -> Any:
        """Return the storage that a persistent id describes, whose device may be a slot."""
        if isinstance(pid, tuple) and len(pid) > DEVICE and isinstance(pid[DEVICE], ValueSlot):
            pid = (*pid[:DEVICE], self.values[pid[DEVICE].number], *pid[DEVICE + 1 :])
        self.refuse(pid)
        return super().persistent(pid)

    def without_slots(self, value: Any) -> Any:
        """The value with what the interpreted pickle has in its slots."""
        made = filled(value, self.values)
        self.refuse(made)
        return made

    def placed(self, tensor: Tensor, local: Tensor, mesh: Any, placements: tuple[Any, ...]) -> Tensor:
        """The DTensor, with what it was placed by."""
        return replace(tensor, detail=Placing(local, mesh, placements))

    def refuse(self, value: Any, but: object = None) -> None:
        """Refuse a value that a slot, or a DTensor, can be reached from, other than by way of `but`."""
        stack, seen = [value], {id(but)}
        while stack:
            node = stack.pop()
            if isinstance(node, ValueSlot) or (
                isinstance(node, Tensor) and id(node) not in seen and node.detail is not None
            ):
                raise PickleError("a value that differs is looked at")
            if id(node) in seen or not isinstance(node, _ENTERED):
                continue
            seen.add(id(node))
            inside = node.parts() if isinstance(node, Opaque) else node.values() if isinstance(node, dict) else node
            found = of_kinds([*inside], (*_ENTERED, ValueSlot, Tensor))
            self.left -= 1 + len(found)
            if self.left < 0:
                raise PickleError("too much to look at")
            stack += found


_ENTERED = (dict, list, tuple, set, frozenset, Opaque)


def _value(code: int) -> Handler:
    single = DISPATCH[code]

    def handler(m: MachineState, at: int) -> int:
        assert isinstance(m, SlotMachine)
        slot = m.slots.get(at - 1)
        end = single(m, at)
        if slot is not None:
            m.stack[-1] = slot
        return end

    return handler


def _call(code: int) -> Handler:
    single = DISPATCH[code]

    def handler(m: MachineState, at: int) -> int:
        assert isinstance(m, SlotMachine)
        args, function = m.stack[-1], m.stack[-2]
        if not isinstance(function, Global) or function.dotted in REBUILD:
            m.refuse((function, args), _may_differ(function, args))
        return single(m, at)

    return handler


def _may_differ(function: Any, args: Any) -> object:
    """What may differ in a call: the mesh of the DTensor that it makes, or the DTensor that becomes a parameter."""
    if isinstance(function, Global) and function.dotted == REBUILDS_PARAMETER and isinstance(args, tuple) and args:
        return args[0] if isinstance(args[0], Tensor) else None
    if not isinstance(function, Global) or function.dotted not in REBUILDS_DTENSOR:
        return None
    made_by, cls, _, state = args if isinstance(args, tuple) and len(args) == 4 else (None,) * 4
    is_dtensor = isinstance(cls, Global) and cls.name == "DTensor"
    if not is_dtensor or not isinstance(made_by, Global) or made_by.name != WRAPPER:
        return None
    return attributes(attributes_in(state).get("_spec")).get("mesh")


def _build(m: MachineState, at: int) -> int:
    assert isinstance(m, SlotMachine)
    if not isinstance(m.stack[-2], Opaque):
        m.refuse(m.stack[-1])
    return DISPATCH[b"b"[0]](m, at)


_DISPATCH = list(DISPATCH)
for _code in VALUES:
    _DISPATCH[_code] = _value(_code)
for _code in b"R\x81":
    _DISPATCH[_code] = _call(_code)
_DISPATCH[b"b"[0]] = _build


def slots_in(values: Iterable[Any]) -> Iterator[int]:
    """The numbers of the slots that can be reached from values, also by way of DTensors' meshes."""
    stack, seen = [*values], set[int]()
    while stack:
        node = stack.pop()
        if isinstance(node, ValueSlot):
            yield node.number
        elif id(node) not in seen and isinstance(node, _ENTERED):
            seen.add(id(node))
            inside = node.parts() if isinstance(node, Opaque) else node.values() if isinstance(node, dict) else node
            stack += of_kinds([*inside], (*_ENTERED, ValueSlot))


def filled(node: Any, values: Mapping[int, Any]) -> Any:
    """A value with those that belong into its slots; what holds none is the same object. Recursion is bounded."""
    return _filled(node, values, {})


def _filled(node: Any, values: Mapping[int, Any], done: dict[int, Any]) -> Any:
    if isinstance(node, ValueSlot):
        return values[node.number]
    if not isinstance(node, _ENTERED):
        return node
    if id(node) not in done:
        done[id(node)] = node  # one that lies in itself stays as it is
        done[id(node)] = _remade(node, values, done)
    return done[id(node)]


def _remade(node: Any, values: Mapping[int, Any], done: dict[int, Any]) -> Any:
    if isinstance(node, Opaque):
        held = node.args, node.state, node.items, node.pairs, node.keywords
        parts = [_filled(part, values, done) for part in held]
        if all(a is b for a, b in zip(parts, held, strict=True)):
            return node
        made = copy(node)
        made.args, made.state, made.items, made.pairs, made.keywords = parts
        return made
    if isinstance(node, dict):
        return _with_children(node, {key: _filled(child, values, done) for key, child in node.items()})
    if not of_kinds(node, (*_ENTERED, ValueSlot)):
        return node
    children = [_filled(child, values, done) for child in node]
    if all(a is b for a, b in zip(children, node, strict=True)):
        return node
    return type(node)(children) if type(node) in (list, tuple) else node


def _with_children(node: dict[Any, Any], children: Mapping[Any, Any]) -> dict[Any, Any]:
    if all(child is node[key] for key, child in children.items()):
        return node
    made = copy(node)
    for key, child in children.items():
        made[key] = child
    return made
