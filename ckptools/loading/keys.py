"""Find the value of a checkpoint that a key of a running state dict means, where only one reading is possible.

The key may be that of the saved tree, or of torch's state_dict API. It may also stand below other keys than these
(`state.model…`, `app.net…`), have the names of wrappers in it, or lack a module that stands before every name of the
checkpoint's model (Lightning's `model.`). All keys that are found in these ways have to stand below the same key: else
a second model would silently get the weights of the first.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ckptools.loading.saved_state import MODEL, OPTIMIZER, SavedState, Value
from ckptools.text import common_prefix, fqn_of
from ckptools.training_state.role_words import MODEL_KEYS, WORDS, words_in
from ckptools.training_state.wrappers import DDP, without_wrappers

STATE, GROUPS, PARAMS = "state.", "param_groups.", "params"

MODELS, OPTIMIZERS = frozenset(MODEL_KEYS), frozenset((OPTIMIZER, "optim", "optimizers"))
APPS = frozenset(("app", "state"))
"""SavedKeys below which scripts keep a model's state dict and an optimizer's."""


class Answer(NamedTuple):
    """The value that a key means.

    Attributes:
        value: None if the running value is to be kept: a hyperparameter that the checkpoint does not know.
        entry: the number of its entry; None for a param group's value.
        section: `model` or `optimizer` if the key was found there, else empty.
        head: the part of the key before the part that stands in the section.
        with_around: whether the key has the module in it that stands before every name of the checkpoint's model; None
            if there is no such module, or the key is no name of a parameter.
        params: the saved fqns of a param group, if the key means these.
    """

    value: Value | None
    entry: int | None = None
    section: str = ""
    head: str = ""
    with_around: bool | None = None
    params: tuple[str, ...] = ()


class SavedKeys:
    """The keys of a checkpoint, as one rank asks for them.

    Args:
        state: the checkpoint.
        rank: the rank of the running job, for values that each rank has for itself.
        world_size: number of ranks of the running job.
        strict: whether all keys are asked for, so that a key may stand below one that the checkpoint does not have.
    """

    def __init__(self, state: SavedState, rank: int, world_size: int, strict: bool) -> None:
        self._state, self._rank, self._strict = state, rank, strict
        self._same_world = state.world_size == world_size
        entries = state.entries
        self._exact = {e.flat: n for n, e in enumerate(entries)} | {e.saved: n for n, e in enumerate(entries)}
        flat = [(*entry.flat.partition("."), n) for n, entry in enumerate(entries)]
        models = {rest: n for section, _, rest, n in flat if section == MODEL and rest}
        self._around = module_around(models)
        self._models = {name.removeprefix(self._around): n for name, n in models.items()}
        self._states = {
            rest.removeprefix(STATE).removeprefix(self._around): n
            for section, _, rest, n in flat
            if section == OPTIMIZER and rest.startswith(STATE)
        }
        self._group_of = {
            str(fqn).removeprefix(self._around): group for group in state.groups for fqn in group.get(PARAMS, ())
        }
        self._hyperparameters = {name for group in state.groups for name in group}
        self.begin()

    def begin(self) -> None:
        """Forget in which form keys were asked for before."""
        self._around_is_asked = self._numbers_are_asked = False

    def find(self, key: str) -> Answer | None:
        """The value that a key means; None if there is none, or several."""
        if key in self._state.own:
            own = self._state.own[key].get(self._rank) if self._same_world else None
            return None if own is None else Answer(own)
        number = self._exact.get(key)
        if number is not None:
            return self._exactly(key, number)
        parts = without_wrappers(key).split(".")
        for n in range(len(parts)):
            head, rest = parts[:n], ".".join(parts[n:])
            if words_of_another_model(head):
                return None
            if not self._strict and not is_of_a_script(head):
                continue
            # A module may be named as a part of an optimizer is, and the other way round.
            found = None if MODELS.intersection(head) else self._in_optimizer(rest, head)
            found = found or (None if OPTIMIZERS.intersection(head) else self._in_model(rest, head))
            if found is not None:
                return found
        return None

    def _exactly(self, key: str, number: int) -> Answer | None:
        entry = self._state.entries[number]
        section, _, rest = entry.flat.partition(".")
        if section not in (MODEL, OPTIMIZER):
            return Answer(entry.value, number)
        if rest.startswith(GROUPS) and self._is_in_doubt(rest.removeprefix(GROUPS)):
            return None
        with_around = self._has_around(rest.removeprefix(STATE), section) if not rest.startswith(GROUPS) else None
        bare = without_wrappers(key)
        if bare.endswith(rest):
            head = bare.removesuffix(rest).rstrip(".")
        elif section == MODEL:
            head = fqn_of(entry.path[:-1])
        else:  # the script saved it keyed by number, and asks for it so
            self._numbers_are_asked = True
            head = min((f".{key}".partition(f".{mark}")[0] for mark in (STATE, GROUPS)), key=len).removeprefix(".")
        group, _, name = rest.removeprefix(GROUPS).rpartition(".")
        listed = rest.startswith(GROUPS) and name == PARAMS and group.isdecimal()
        params = self._params(self._state.groups[int(group)]) if listed else ()
        return Answer(entry.value, number, section, head, with_around, params)

    def _has_around(self, name: str, section: str) -> bool | None:
        found = name.startswith(self._around) if self._around else None
        # Of the optimizer alone: `model.emb` may be `emb` below the script's `model`, or what the checkpoint calls so.
        self._around_is_asked |= section == OPTIMIZER and found is not False
        return found

    def _in_model(self, rest: str, head: Sequence[str]) -> Answer | None:
        return self._named(self._models, rest, head, MODEL)

    def _in_optimizer(self, rest: str, head: Sequence[str]) -> Answer | None:
        if rest.startswith(STATE):
            for inside, name in self._below_modules(rest.removeprefix(STATE)):
                found = self._named(self._states, name, (*head, *inside), OPTIMIZER)
                if found is not None:
                    return found
        if not rest.startswith(GROUPS):
            return None
        parameter, _, hyperparameter = rest.removeprefix(GROUPS).rpartition(".")
        modules, groups = self._groups(parameter)
        if len(groups) != 1:  # none, or the number of a group is also a parameter's name, such as a ParameterList's
            return None
        (group,), at = groups, ".".join((*head, *modules))
        if hyperparameter == PARAMS:
            params = self._params(group)
            # Without names the running order is kept, and the number of a group is all that says which one it is.
            return Answer(archive_of(params) if params else None, None, OPTIMIZER, at, None, params)
        if self._is_in_doubt(rest.removeprefix(GROUPS)):
            return None
        # torch adds hyperparameters over time; the checkpoint of an older one does not have the newer ones.
        known = hyperparameter in self._hyperparameters
        return Answer(group.get(hyperparameter) if known else None, None, OPTIMIZER, at)

    def _is_in_doubt(self, name: str) -> bool:
        """Whether a group's hyperparameter has several values, and nothing says which parameters have which of them."""
        number, _, hyperparameter = name.rpartition(".")
        if not number.isdecimal() or any(PARAMS in group for group in self._state.groups):
            return False
        values = [group.get(hyperparameter) for group in self._state.groups]
        return any(value != values[0] for value in values)

    def _groups(self, name: str) -> tuple[Sequence[str], list[Mapping[str, Any]]]:
        """The saved param groups of this number, or with this parameter, and the modules that stand before it here."""
        groups = self._state.groups
        numbered = [groups[int(name)]] if name.isdecimal() and int(name) < len(groups) else []
        for inside, below in self._below_modules(name):
            group = self._group_of.get(below.removeprefix(DDP).removeprefix(self._around))
            if group is not None:
                return inside, numbered if group in numbered else [*numbered, group]
        return (), numbered

    def mixed(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Say which running param group has parameters of which a hyperparameter was saved with several values.

        Args:
            groups: the running param groups; `params` are fqns.
        """
        for number, group in enumerate(groups):
            saved = [(name, self._groups(without_wrappers(name))[1]) for name in group[PARAMS]]
            for hyperparameter in sorted(group.keys() & self._hyperparameters - {PARAMS}):
                values = [(name, own[hyperparameter]) for name, owns in saved for own in owns if hyperparameter in own]
                other = next((name for name, value in values if value != values[0][1]), None)
                if other is not None:
                    both = f"{values[0][0]} and {other}"
                    return (
                        f"{both} were saved with different {hyperparameter}, and are in one param group here"
                        f" (group {number}): make the param groups as the saved run did"
                    )
        return ""

    def _below_modules(self, name: str) -> Iterator[tuple[list[str], str]]:
        """A parameter's name, and if all keys are asked for, what it is below each module that stands before it."""
        parts = name.split(".")
        for n in range(len(parts) if self._strict else 1):
            if words_of_another_model(parts[:n]):
                return
            yield parts[:n], ".".join(parts[n:])

    def _params(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The fqns of a param group; empty without names, as then only numbers can be asked for."""
        fqns = group.get(PARAMS, ())
        return tuple(fqns) if all(isinstance(fqn, str) for fqn in fqns) else ()

    def bytes_of(self, answer: Answer) -> bytes:
        """The archive of a value that is no tensor, after all that was asked for is known.

        torch finds by the names in a param group which running group it is, whatever their order. So these have to be
        the names, or the numbers, by which the optimizer's states are asked for.
        """
        assert isinstance(answer.value, bytes)
        if not answer.params or self._numbers_are_asked:
            return answer.value
        around = "" if self._around_is_asked else self._around
        return archive_of([fqn.removeprefix(around) for fqn in answer.params])

    def _named(self, names: Mapping[str, int], rest: str, head: Sequence[str], section: str) -> Answer | None:
        """The entry of a name; a module around all names is passed over only below keys that are no module's."""
        for name in dict.fromkeys((rest, rest.removeprefix(DDP))):
            inside = not self._around or name.startswith(self._around)
            if (inside or is_of_a_script(head)) and (short := name.removeprefix(self._around)) in names:
                number = names[short]
                value = self._state.entries[number].value
                return Answer(value, number, section, ".".join(head), self._has_around(name, section))
        return None


def archive_of(value: object) -> bytes:
    """A value as DCP's planner unpacks it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def module_around(names: Collection[str]) -> str:
    """The modules that stand before every name of a model, with the dot behind them; empty without one."""
    around = next(iter(names), "").split(".")[:-1]
    for name in names:
        around = around[: common_prefix(around, name.split(".")[:-1])]
    return "".join(f"{part}." for part in around)


def is_of_a_script(head: Sequence[str]) -> bool:
    """Whether a script keeps a state dict below a key; any other may be a module's, such as `model.state`."""
    return not head or (APPS.issuperset(head[:-1]) and head[-1] in MODELS | OPTIMIZERS)


def words_of_another_model(head: Sequence[str]) -> bool:
    """Whether a key stands below the name of a model that was not trained, such as `ema`."""
    return any(word in WORDS for word in words_in(tuple(head)))
