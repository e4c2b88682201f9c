"""Find the value of a checkpoint that a key of a running state dict means, where only one reading is possible.

The key may be that of the saved tree, or of torch's state_dict API. It may also stand below other keys than these
(`state.model…`, `app.net…`), have the names of wrappers in it, or lack a module that stands before every name of the
checkpoint's model (Lightning's `model.`). All keys that are found in these ways have to stand below the same key: else
a second model would silently get the weights of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from ckptools.keys.renames import applied, rename_words, suggested
from ckptools.loading.saved_state import MODEL, OPTIMIZER, Entry, SavedState, Value
from ckptools.model.tensor import Tensor
from ckptools.option import spelled
from ckptools.text import clip, common_prefix, first_few, plural, printable
from ckptools.training_state.optimizers import give_names
from ckptools.training_state.role_words import MODEL_KEYS, WORDS, words_in
from ckptools.training_state.sections import storage_identity
from ckptools.training_state.wrappers import DDP, without_wrappers

MOST_NAMED = 5
"""At most this many keys of a kind are named in a message."""

MOST_COMPARED = 20_000
"""At most this many keys are searched for the nearest one."""

STATE, GROUPS, PARAMS = "state.", "param_groups.", "params"

CONTAINERS = frozenset((*MODEL_KEYS, OPTIMIZER, "optim", "optimizers", "state", "app"))
"""Keys below which scripts keep a state dict; any other may be a module's."""


class Answer(NamedTuple):
    """The value that a key means.

    Attributes:
        value: None if the running value is to be kept: a hyperparameter that the checkpoint does not know.
        entry: the number of its entry; None for a param group's value.
        section: `model` or `optimizer` if the key was found there, else empty.
        head: the part of the key before the part that stands in the section.
        group: the number of the param group whose parameters the key lists; their names are `Keys.listed`.
    """

    value: Value | None
    entry: int | None = None
    section: str = ""
    head: str = ""
    group: int | None = None


class Keys:
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
        exact = {e.flat: n for n, e in enumerate(entries)} | {e.saved: n for n, e in enumerate(entries)}
        # A group of the running optimizer may be in another place than the saved one.
        self._exact = {key: n for key, n in exact.items() if not key.startswith(f"{OPTIMIZER}.{GROUPS}")}
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
            if words_of_another_model(head) or not (self._strict or CONTAINERS.issuperset(head)):
                return None
            found = self._in_optimizer(rest, head) or self._in_model(rest, head)
            if found is not None:
                return found
        return None

    def _exactly(self, key: str, number: int) -> Answer:
        entry = self._state.entries[number]
        section, _, rest = entry.flat.partition(".")
        if section not in (MODEL, OPTIMIZER):
            return Answer(entry.value, number)
        return Answer(entry.value, number, section, key.removesuffix(rest).rstrip("."))

    def _in_model(self, rest: str, head: Sequence[str]) -> Answer | None:
        number = self._number(self._models, rest, head)
        return None if number is None else Answer(self._state.entries[number].value, number, MODEL, ".".join(head))

    def _in_optimizer(self, rest: str, head: Sequence[str]) -> Answer | None:
        if rest.startswith(STATE):
            for inside, name in self._below_modules(rest.removeprefix(STATE)):
                number = self._number(self._states, name, (*head, *inside))
                if number is not None:
                    at = ".".join((*head, *inside))
                    return Answer(self._state.entries[number].value, number, OPTIMIZER, at)
        if not rest.startswith(GROUPS):
            return None
        parameter, _, hyperparameter = rest.removeprefix(GROUPS).rpartition(".")
        modules, group = self._group(parameter)
        if group is None:
            return None
        if parameter.isdecimal() and hyperparameter == PARAMS and PARAMS in group:
            return Answer(b"", None, OPTIMIZER, ".".join(head), int(parameter))
        value = group.get(hyperparameter)
        if PARAMS not in group and any(other.get(hyperparameter) != value for other in self._state.groups):
            return None  # nothing says which parameters have which of the values
        # torch adds hyperparameters over time; the checkpoint of an older one does not have the newer ones.
        known = hyperparameter in self._hyperparameters and hyperparameter != PARAMS
        return Answer(value if known else None, None, OPTIMIZER, ".".join((*head, *modules)))

    def _group(self, name: str) -> tuple[Sequence[str], Mapping[str, Any] | None]:
        """The saved param group of this number, or with this parameter, and the modules that stand before it here."""
        if name.isdecimal() and int(name) < len(self._state.groups):
            return (), self._state.groups[int(name)]
        for inside, below in self._below_modules(name):
            group = self._group_of.get(below.removeprefix(DDP).removeprefix(self._around))
            if group is not None:
                return inside, group
        return (), None

    def mixed(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Say which running param group has parameters of which a hyperparameter was saved with several values.

        Args:
            groups: the running param groups; `params` are fqns.
        """
        for number, group in enumerate(groups):
            saved = [(name, self._group(without_wrappers(name))[1] or {}) for name in group[PARAMS]]
            for hyperparameter in sorted(group.keys() & self._hyperparameters - {PARAMS}):
                values = [(name, own[hyperparameter]) for name, own in saved if hyperparameter in own]
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

    def listed(self, group: int, asked: Mapping[str, Answer | None]) -> list[object]:
        """The parameters of a group, by which torch finds the group of each running parameter.

        Their names have the module around the model in front if the optimizer's states are asked for with it.
        """
        numbers = ((key, a.entry) for key, a in asked.items() if a is not None and a.section == OPTIMIZER)
        inside = ((key, self._state.entries[n].flat.partition(".")[2]) for key, n in numbers if n is not None)
        in_full = any(name.startswith(STATE) and key.endswith(name) for key, name in inside)
        names = self._state.groups[group][PARAMS]
        return [n if in_full or not isinstance(n, str) else n.removeprefix(self._around) for n in names]

    def _number(self, names: Mapping[str, int], rest: str, head: Sequence[str]) -> int | None:
        """The entry of a name; a module around all names is passed over only below keys that are no module's."""
        for name in dict.fromkeys((rest, rest.removeprefix(DDP))):
            inside = not self._around or name.startswith(self._around)
            if (inside or CONTAINERS.issuperset(head)) and (short := name.removeprefix(self._around)) in names:
                return names[short]
        return None


def module_around(names: Collection[str]) -> str:
    """The modules that stand before every name of a model, with the dot behind them; empty without one."""
    around = next(iter(names), "").split(".")[:-1]
    for name in names:
        around = around[: common_prefix(around, name.split(".")[:-1])]
    return "".join(f"{part}." for part in around)


def words_of_another_model(head: Sequence[str]) -> bool:
    """Whether a key stands below the name of a model that was not trained, such as `ema`."""
    return any(word in WORDS for word in words_in(tuple(head)))


# -- what is wrong with the keys of a running state dict, in one message -----------------------------------------------


class Asked(NamedTuple):
    """The keys that one rank asks for.

    Attributes:
        found: the section, the entry and the head of every key that was found.
        missing: keys that were not found.
        mixed: what is wrong with the running param groups; empty if nothing is.
    """

    found: Mapping[str, tuple[str, int | None, str]]
    missing: tuple[str, ...]
    mixed: str = ""


def problem_with(asked: Sequence[Asked], state: SavedState) -> str:
    """Say what is wrong with the keys that all ranks ask for, and what mends it; empty if nothing is.

    Wrong are keys that the checkpoint does not have, names of a section that nothing asks for although others are
    asked for, and two keys that mean one value.
    """
    found = {key: where for one in asked for key, where in one.found.items()}
    missing = sorted({key for one in asked for key in one.missing} - found.keys())
    heads = {section: _heads(found, section) for section in (MODEL, OPTIMIZER)}
    for section, several in heads.items():
        doubled = _doubled(found, section, several)
        missing = sorted({*missing, *doubled})
        if len(several) > 1 and not doubled:
            under = " and ".join(f"{head or 'the top'}" for head in sorted(several)[:3])
            return f"its one {section} is asked for under {under}; load each model from its own checkpoint, or name it"
    unexpected = _unexpected(found, state)
    texts = []
    untrained = _parameters_without_group(missing)
    theirs = tuple(f"{OPTIMIZER}.{part}{name}." for name in untrained for part in (STATE, GROUPS))
    others = [key for key in missing if not key.startswith(theirs)]
    if others:
        texts.append(f"lacks {_named(others, 'key')}{_nearest(others[0], state)}")
    if untrained:
        texts.append(f"the optimizer here has {_named(untrained, 'more parameter')}")
    if unexpected:
        texts.append(f"has {_named(unexpected, 'key')} that nothing here asks for")
    if missing and state.without is not None:
        texts.append(f"only its model can be loaded: {state.without.reason}")
    if missing and (own := next((key for key in missing if key in state.own), "")):
        texts.append(f"of {own} each of its {len(state.own[own])} ranks has its own, for as many ranks")
    if any(key.removeprefix(f"{OPTIMIZER}.{STATE}").partition(".")[0].isdecimal() for key in unexpected):
        texts.append(f"its optimizer is keyed by number: {give_names()}")
    rule = _renaming(missing, unexpected, heads[MODEL][:1])
    return "; ".join([*texts, *rule]) if texts else ""


def _heads(found: Mapping[str, tuple[str, int | None, str]], section: str) -> list[str]:
    """The heads below which a section is asked for, the one with the most keys first."""
    return [head for head, _ in Counter(head for s, _, head in found.values() if s == section).most_common()]


def _doubled(found: Mapping[str, tuple[str, int | None, str]], section: str, heads: Sequence[str]) -> list[str]:
    """The keys of other heads than the first, if each asks for fewer than half of the values that the first asks for.

    Then the running model has a module that the checkpoint does not have, with names as the checkpoint's model has.
    """
    entries = [{entry for s, entry, head in found.values() if (s, head) == (section, one)} for one in heads]
    if any(not (other <= entries[0] and 2 * len(other) < len(entries[0])) for other in entries[1:]):
        return []
    return [key for key, (s, _, head) in found.items() if s == section and head in heads[1:]]


def _parameters_without_group(missing: Sequence[str]) -> list[str]:
    """The parameters of which every hyperparameter is missing: their names here."""
    begin = f"{OPTIMIZER}.{GROUPS}"
    names = (key.removeprefix(begin).rpartition(".")[0] for key in missing if key.startswith(begin))
    return sorted({name for name in names if name and not name.isdecimal()})


def _named(keys: Sequence[str], kind: str) -> str:
    shown = first_few([clip(printable(key), 100) for key in keys], MOST_NAMED)
    return f"{plural(len(keys), kind)}: {shown}"


def _nearest(key: str, state: SavedState) -> str:
    names = [entry.flat for entry in state.entries[:MOST_COMPARED]]
    near = get_close_matches(key, names, 1)
    return f" (the nearest is {clip(printable(near[0]), 100)})" if near else ""


def _unexpected(found: Mapping[str, tuple[str, int | None, str]], state: SavedState) -> list[str]:
    """The names of model or optimizer that nothing asks for; not a second name of a tensor that is asked for."""
    taken = {entry for _, entry, _ in found.values()}
    sections = {section for section, _, _ in found.values()} - {""}
    known = {identity for n in taken if n is not None and (identity := _identity(state.entries[n])) is not None}
    left = (
        entry.flat
        for n, entry in enumerate(state.entries)
        if n not in taken and entry.flat.partition(".")[0] in sections and _identity(entry) not in known
    )
    # Beside its states an optimizer may have what only its own class knows.
    return [key for key in left if key.startswith((f"{MODEL}.", f"{OPTIMIZER}.{STATE}"))]


def _identity(entry: Entry) -> object:
    return storage_identity(entry.value) if isinstance(entry.value, Tensor) else None


def _renaming(missing: Sequence[str], unexpected: Sequence[str], heads: Sequence[str]) -> list[str]:
    """The one rename of the model's names that mends most, if it mends any."""
    begin = f"{heads[0] if heads else MODEL}."
    wanted = [key.removeprefix(begin) for key in missing if not key.partition(f".{STATE}")[1]]
    here = [key.removeprefix(f"{MODEL}.") for key in unexpected if key.startswith(f"{MODEL}.")]
    if not wanted or not here:
        return []
    names = set(wanted)
    mended = ((len(names.intersection(applied(rule, here, wanted).values())), rule) for rule in suggested(here, wanted))
    most, rule = max(mended, key=lambda one: one[0], default=(0, None))
    if rule is None or not most:
        return []
    return [f"{rename_words(rule)} mends {most} of {len(wanted)}: see {spelled('rename')}, or ckptools match"]
