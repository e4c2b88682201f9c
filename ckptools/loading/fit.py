"""Say in one message what of a running state dict does not fit a checkpoint, given what every rank asks for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckptools.keys.renames import Rename, applied, rename_words, suggested
from ckptools.loading.keys import GROUPS, PARAMS, STATE
from ckptools.loading.saved_state import MODEL, OPTIMIZER, SavedEntry, SavedState, Value
from ckptools.model.tensor import Tensor as SavedTensor
from ckptools.option import spelled
from ckptools.text import clip, first_few, plural, printable, shape
from ckptools.training_state.optimizers import give_names
from ckptools.training_state.sections import storage_identity

MOST_NAMED = 5
"""At most this many keys of a kind are named in a message."""

MOST_COMPARED = 20_000
"""At most this many keys are searched for the nearest one."""

NUMBERED = re.compile(r"(^|\.)state\.\d+\.[^.]+$")
"""The state of a parameter in an optimizer's own state dict, such as `optimizer.state.0.exp_avg`."""


class Unfit(NamedTuple):
    """A value that is saved and running, but not as the same.

    Attributes:
        what: `shape`, `dtype`, `codes` of a quantized weight, or `kind`, a tensor on one side alone.
        saved: that of the saved value, in words.
        running: that of the running value.
    """

    what: str
    saved: str
    running: str


def unfit(saved: Value, running: Any, cast: bool) -> Unfit | None:
    """Why a running value cannot become a saved one; None if it can.

    A number may become a tensor of one element, and the other way round. Such a tensor may have any dtype.

    Args:
        saved: a tensor, or the archive of any other value.
        running: a tensor, of which the sizes of all ranks together count, or any other value.
        cast: whether values are converted to the running dtype.
    """
    if not isinstance(running, Tensor):
        more = isinstance(saved, SavedTensor) and bool(saved.shape)
        return Unfit("kind", "a tensor", f"a {type(running).__name__}") if more else None
    if not isinstance(saved, SavedTensor):
        return Unfit("kind", "no tensor", "a tensor") if running.dim() else None
    if tuple(saved.shape) != tuple(running.shape):
        return Unfit("shape", shape(saved.shape), shape(running.shape))
    return other_dtype(saved, running, cast)


def other_dtype(saved: SavedTensor, running: Tensor, cast: bool) -> Unfit | None:
    """The dtypes of a saved tensor and a running one, or its part on a rank; None if they are the same, or converted.

    A number may have any dtype. A dtype that this torch does not have cannot be converted, nor can codes of a quantized
    weight, which are no values.
    """
    if not hasattr(torch, saved.dtype):
        text = f"{saved.dtype}, which torch {torch.__version__} does not have,"
        return Unfit("dtype", text, str(running.dtype).removeprefix("torch."))
    same = not saved.shape or running.dtype is getattr(torch, saved.dtype)
    if not same and saved.coded is not None and saved.are_codes:
        return Unfit("codes", f"codes of {saved.coded.scheme}", str(running.dtype).removeprefix("torch."))
    return None if same or cast else Unfit("dtype", saved.dtype, str(running.dtype).removeprefix("torch."))


class Found(NamedTuple):
    """Where the value of a key was found, without the value; the fields are those of an `Answer`."""

    section: str
    entry: int | None
    head: str
    with_around: bool | None


class AskedKeys(NamedTuple):
    """What one rank asks for.

    Attributes:
        found: where every key was found.
        missing: keys that were not found.
        unfit: keys that were found, but whose values do not fit.
        mixed: what is wrong with the running param groups; empty if nothing is.
    """

    found: Mapping[str, Found]
    missing: tuple[str, ...]
    unfit: Mapping[str, Unfit]
    mixed: str = ""


def problem_with(asked: Sequence[AskedKeys], state: SavedState, strict: bool) -> str:
    """Say what is wrong with what all ranks ask for, and what mends it; empty if nothing is.

    Wrong are values of another shape or dtype. If `strict`, also wrong are keys that the checkpoint does not have,
    names of a section that nothing asks for although others are asked for, and two keys that mean one value.
    """
    found = {key: where for one in asked for key, where in one.found.items()}
    missing = {key for one in asked for key in one.missing} - found.keys()
    for section in (MODEL, OPTIMIZER):
        heads = _heads(found, section)
        doubled = _doubled(found, section, heads) if strict else []
        missing.update(doubled)
        if len(heads) > 1 and not doubled:
            under = " and ".join(head or "the top" for head in sorted(heads)[:3])
            return f"its one {section} is asked for under {under}; load each model from its own checkpoint, or name it"
        ways = {where.with_around: key for key, where in found.items() if where.section == section}
        if True in ways and False in ways:
            return f"its names all begin alike, and {ways[True]} begins so here, but {ways[False]} does not"
    texts = _names(sorted(missing, key=lambda key: (GROUPS in key, key)), found, state) if strict else []
    texts += unfit_words({key: one for each in asked for key, one in each.unfit.items()})
    return "; ".join(texts) or next((one.mixed for one in asked if one.mixed), "")


def _heads(found: Mapping[str, Found], section: str) -> list[str]:
    """The heads below which a section is asked for, the one with the most keys first."""
    return [head for head, _ in Counter(one.head for one in found.values() if one.section == section).most_common()]


def _doubled(found: Mapping[str, Found], section: str, heads: Sequence[str]) -> list[str]:
    """The keys of other heads than the first, if each asks for fewer than half of the values that the first asks for.

    Then the running model has a module that the checkpoint does not have, with names as the checkpoint's model has.
    """
    entries = [{one.entry for one in found.values() if (one.section, one.head) == (section, head)} for head in heads]
    if any(not (other <= entries[0] and 2 * len(other) < len(entries[0])) for other in entries[1:]):
        return []
    return [key for key, one in found.items() if one.section == section and one.head in heads[1:]]


def _names(missing: Sequence[str], found: Mapping[str, Found], state: SavedState) -> list[str]:
    unexpected = _unexpected(found, state)
    texts = []
    # A parameter that only the running optimizer has is one fact, not one for each hyperparameter.
    untrained = _parameters_without_group(missing) if any(PARAMS in group for group in state.groups) else []
    theirs = tuple(f"{OPTIMIZER}.{part}{name}." for name in untrained for part in (STATE, GROUPS))
    others = [key for key in missing if not key.startswith(theirs)]
    if others:
        names = unexpected or [entry.flat for entry in state.entries]
        texts.append(f"lacks {_named(others, 'key')}{_nearest(others[0], names)}")
    if untrained:
        texts.append(f"the optimizer here has {_named(untrained, 'more parameter')}")
    if unexpected:
        texts.append(f"has {_named(unexpected, 'key')} that nothing here asks for")
    numbers = {
        key.rpartition(GROUPS)[2].rpartition(".")[0] for key, where in found.items() if where.section == OPTIMIZER
    }
    groups = sum(number.isdecimal() for number in numbers)
    if 0 < groups < len(state.groups):
        texts.append(f"its optimizer has {plural(len(state.groups), 'param group')}, the one here {groups}")
    if any(GROUPS in key for key in missing) and any(PARAMS not in group for group in state.groups):
        texts.append("its param groups do not list their parameters, and have different values")
    if missing and state.without is not None:
        texts.append(f"only its model can be loaded: {state.without.reason}")
    elif not state.groups and any(key.startswith(f"{OPTIMIZER}.") for key in missing):
        texts.append("it holds no optimizer: load the model alone")
    if missing and (own := next((key for key in missing if key in state.own), "")):
        texts.append(f"of {own} each of its {len(state.own[own])} ranks has its own, for as many ranks")
    if any(NUMBERED.search(key) for key in unexpected):
        texts.append(f"its optimizer is keyed by number: {give_names()}")
    elif any(NUMBERED.search(key) for key in missing):
        way = "ask for torch's get_optimizer_state_dict, or use ckptools.load"
        texts.append(f"the optimizer here is keyed by number, and the saved one by name: {way}")
    return [*texts, *_renaming(missing, unexpected, next(iter(_heads(found, MODEL)), MODEL))]


def _parameters_without_group(missing: Sequence[str]) -> list[str]:
    """The parameters of which every hyperparameter is missing: their names here."""
    begin = f"{OPTIMIZER}.{GROUPS}"
    names = (key.removeprefix(begin).rpartition(".")[0] for key in missing if key.startswith(begin))
    return sorted({name for name in names if name and not name.isdecimal()})


def unfit_words(values: Mapping[str, Unfit]) -> list[str]:
    """Say which values do not fit, and what mends it."""
    texts = []
    for what, words in (
        ("kind", "another kind"),
        ("shape", "another shape"),
        ("dtype", "another dtype"),
        ("codes", "codes"),
    ):
        some = {key: one for key, one in values.items() if one.what == what}
        if some:
            named = [
                f"{clip(printable(key), 100)} is {one.saved} there and {one.running} here" for key, one in some.items()
            ]
            texts.append(f"has {plural(len(some), 'value')} of {words}: {first_few(named, MOST_NAMED)}")
    if any(one.what == "dtype" and hasattr(torch, one.saved) for one in values.values()):
        texts.append(f"{spelled('cast', True)} converts while loading")
    if any(one.what == "codes" for one in values.values()):
        texts.append(f"{spelled('dequantize', True)} loads the values")
    return texts


def _named(keys: Sequence[str], kind: str) -> str:
    shown = first_few([clip(printable(key), 100) for key in keys], MOST_NAMED)
    return f"{plural(len(keys), kind)}: {shown}"


def _nearest(key: str, names: Sequence[str]) -> str:
    near = get_close_matches(key, names[:MOST_COMPARED], 1)
    return f" (the nearest to the first is {clip(printable(near[0]), 100)})" if near else ""


def _unexpected(found: Mapping[str, Found], state: SavedState) -> list[str]:
    """The names of model or optimizer that nothing asks for; not a second name of a tensor that is asked for."""
    taken = {where.entry for where in found.values()}
    sections = {where.section for where in found.values()} - {""}
    known = {identity for n in taken if n is not None and (identity := _identity(state.entries[n])) is not None}
    left = (
        entry.flat
        for n, entry in enumerate(state.entries)
        if n not in taken
        and entry.value is not None
        and entry.flat.partition(".")[0] in sections
        and _identity(entry) not in known
    )
    # Beside its states an optimizer may have what only its own class knows.
    return [key for key in left if key.startswith((f"{MODEL}.", f"{OPTIMIZER}.{STATE}"))]


def _identity(entry: SavedEntry) -> object:
    return storage_identity(entry.value) if isinstance(entry.value, SavedTensor) else None


def _renaming(missing: Sequence[str], unexpected: Sequence[str], head: str) -> list[str]:
    """The one rename of the model's names that mends most, if it mends any."""
    begin = f"{head}."
    wanted = [key.removeprefix(begin) for key in missing if not key.partition(f".{STATE}")[1]]
    here = [key.removeprefix(f"{MODEL}.") for key in unexpected if key.startswith(f"{MODEL}.")]
    if not wanted or not here:
        return []
    names = set(wanted)
    mended = ((len(names.intersection(applied(rule, here, wanted).values())), rule) for rule in suggested(here, wanted))
    most, rule = max(mended, key=lambda one: one[0], default=(0, None))
    if rule is None or not most:
        return []
    option = _as_option(rule, here)
    way = spelled("rename", option) if option else f"{rename_words(rule)}: a map of this, which ckptools match writes,"
    return [f"{way} mends {most} of {len(wanted)}"]


def _as_option(rule: Rename, names: Sequence[str]) -> str:
    """A rule as the option has it, `OLD.=NEW.`; empty if the option cannot say it."""
    if rule.kind == "prefix":
        return f"{rule.old}={rule.new}"
    old, new = f"{rule.old}.", f"{rule.new}."
    inside = [name for name in names if f".{old}" in f".{name}"]
    return f"{old}={new}" if rule.kind == "component" and rule.new and all(n.startswith(old) for n in inside) else ""
