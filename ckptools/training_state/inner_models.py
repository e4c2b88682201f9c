"""Find several models inside one state dict: a model and its average, or a generator and its discriminator.

A module such as Lightning's `LightningModule` may hold several models as children, and its state dict has the names of
all: `model.*` and `ema_model.*`. Encoders and decoders, towers and losses look the same, and are one model. So a state
dict is divided only where this is the only reading:

- every tensor with a shape lies in a child; a loss or a metric may be beside;
- a child whose name says that it is a copy (an average, a teacher, a target network) has the names and shapes of
  exactly one other child, and no optimizer has state for more than that other child;
- one other child is left; or one of several is called by no role, and each of them has its own optimizer.

Without an optimizer, only the words of `PLAIN` prove a copy: `target` and `reference` are names of towers too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.text import Key
from ckptools.training_state.role_words import COPIES, LETTERS, LOSSES, NETWORKS, PLAIN, WORDS, words_in
from ckptools.training_state.wrappers import DDP, WRAPPERS, ddp_prefix, without_ddp, without_wrappers

States = Mapping[Key, Ints]
"""The shape of an optimizer's state for each parameter that has one, by name or number."""

_WRAPPERS = frozenset(wrapper.word for wrapper in WRAPPERS)


class _Child(NamedTuple):
    """A child of a module: its keys in the state dict by the names below it, and shapes of its tensors by bare name."""

    name: str
    words: frozenset[str]
    keys: dict[str, str]
    shapes: dict[str, Ints]


def models_inside(state: Mapping[str, Any], states_of: Callable[[], Sequence[States]]) -> dict[str, dict[str, str]]:
    """For each model inside a state dict its keys, by the names below it; empty if the state dict is one model.

    `states_of` gives the states of the checkpoint's optimizers, if they are needed.
    """
    leading = ddp_prefix(state)
    found: dict[str, dict[str, str]] = {}
    for key in state:
        child, name = _divided(key, leading)
        found.setdefault(child, {})[name] = key
    if not any(WORDS.keys() & set(words_in((child,))) or child in LETTERS for child in found):
        return {}
    children = [_child(child, keys, state) for child, keys in found.items() if child]
    loose = [state[key] for key in found.get("", {}).values()]
    models = [child for child in children if child.shapes and not child.words & LOSSES]
    copies = [child for child in models if child.words & COPIES]
    nets = [child for child in models if child not in copies]
    if any(isinstance(value, Tensor) and value.shape for value in loose) or not _are_copies(copies, nets):
        return {}
    states = [shapes for shapes in states_of() if shapes]
    if len(nets) == 1:
        plain = all(child.words & PLAIN for child in copies)
        sure = all(_may_train(nets[0], shapes, plain) for shapes in states) and bool(plain or states)
    else:
        sure = _have_one_role_each(nets) and _have_one_optimizer_each(nets, states)
    return {child.name: child.keys for child in models} if sure and len(models) > 1 else {}


def part_of(state: Mapping[str, Any], keys: Mapping[str, str], child: str) -> dict[str, Any]:
    """The state dict of one of the models inside a state dict, with the list of its modules if that has one."""
    part: dict[str, Any] = OrderedDict() if isinstance(state, OrderedDict) else {}
    part.update((name, state[key]) for name, key in keys.items())
    modules = getattr(state, "_metadata", None)
    if isinstance(part, OrderedDict) and isinstance(modules, Mapping):
        leading = ddp_prefix(state)
        places = ((_divided(f"{name}.", leading), version) for name, version in modules.items())
        mine = {name.removesuffix("."): version for (at, name), version in places if at == child}
        part._metadata = OrderedDict(mine)  # type: ignore[attr-defined]
    return part


def _divided(key: str, leading: str) -> tuple[str, str]:
    """The child in which a key lies, without the wrappers around the whole, and the name below it; "" for no child."""
    before, rest = "", key
    while (first := rest.partition(".")[0]) in _WRAPPERS and (f"{first}." != DDP or (leading and DDP not in before)):
        before, rest = f"{before}{first}.", rest.partition(".")[2]
    child, dot, name = rest.partition(".")
    return (child, name) if dot else ("", key)


def _child(child: str, keys: dict[str, str], state: Mapping[str, Any]) -> _Child:
    tensors = {name: state[key] for name, key in keys.items() if isinstance(state[key], Tensor)}
    shaped = {without_wrappers(name): tensor.shape for name, tensor in tensors.items() if tensor.shape}
    leading = ddp_prefix(shaped)
    shapes = {name.removeprefix(leading): shape for name, shape in shaped.items()}
    return _Child(child, frozenset(words_in((child,))), keys, shapes)


def _are_copies(copies: Collection[_Child], nets: Collection[_Child]) -> bool:
    """Whether each copy has the names and shapes of exactly one other model."""
    return all(sum(copy.shapes == net.shapes for net in nets) == 1 for copy in copies)


def _may_train(net: _Child, states: States, plain: bool) -> bool:
    """Whether an optimizer has state for parameters of this model alone; for `plain` copies its shapes do not count."""
    if plain and not _are_names(states):
        return len(states) <= len(net.shapes)
    return _fits(states, net)


def _fits(states: States, net: _Child) -> bool:
    """Whether states have names of this model, as the state dict or the model alone has them, or else its shapes."""
    if _are_names(states):
        return any(_names(states) <= _names(names) for names in (net.keys.values(), net.keys))
    return Counter(states.values()) <= Counter(net.shapes.values())


def _have_one_role_each(nets: Sequence[_Child]) -> bool:
    """Whether all but one of some models have a role of their own, as a discriminator or a critic has."""
    letters = {child.name: child.words - NETWORKS for child in nets}
    generator = any(words == {"g"} for words in letters.values())
    without = [
        child for child in nets if not (child.words & WORDS.keys() or (generator and letters[child.name] == {"d"}))
    ]
    return len(without) == 1


def _have_one_optimizer_each(nets: Sequence[_Child], states: Sequence[States]) -> bool:
    """Whether every optimizer has state for one of some models, and every model has one optimizer."""
    trained: list[str] = []
    for shapes in states:
        fitting = [net for net in nets if _fits(shapes, net)]
        exact = [net for net in fitting if len(shapes) == len(net.shapes)]
        mine = exact if len(exact) == 1 else fitting
        trained += [mine[0].name] if len(mine) == 1 else [""]
    return sorted(trained) == sorted(net.name for net in nets)


def _are_names(states: States) -> bool:
    return all(isinstance(key, str) and not key.isdecimal() for key in states)


def _names(names: Collection[Any]) -> set[str]:
    return {without_ddp(str(name)) for name in names}
