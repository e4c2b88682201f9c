"""Decide which of a checkpoint's models is meant: the one that the user names, else the trained one.

Many runs carry an average of the weights, a teacher, a reference or a critic beside the model that they train. The
trained one is found, in this order: its layout says so; it is the only one without a role, and no optimizer's states
fit another alone; the optimizer's states fit it alone; it alone has a key under which trainers save their model. If
none of these decides, the user has to.

Some averages are saved without names, as a list in the order of `model.parameters()`, or with a wrapper's names. They
get the names of the trained model, where only one reading is possible.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckptools.dtypes import is_floating
from ckptools.errors import UsageError
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code
from ckptools.model.records import Rows
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.option import spelled
from ckptools.text import few, plural, printable
from ckptools.training_state.optimizers import FITS, believed, fits, name_parameters, nested
from ckptools.training_state.role_words import TRAINED
from ckptools.training_state.roles import called_model, candidates, role_of
from ckptools.training_state.sections import ALL, Section, sections_of, sections_of_kind
from ckptools.training_state.wrappers import bare_name, ddp_prefix, without_wrappers


class Model(NamedTuple):
    """A model of a checkpoint.

    Attributes:
        section: its section, with the names of parameters where the file has numbers or a wrapper's names.
        role: `trained`, `ema`, `teacher`, `reference`, `critic`, `discriminator` …; "" if it is the only model, or if
            no role is proven.
        note: how its tensors got their names, or why they have none; "" if the file has them.
    """

    section: Section
    role: str
    note: str = ""


class _Found(NamedTuple):
    """The models of a checkpoint, and why one of them is the trained one; "" if none is, or if it is the only one."""

    models: tuple[Model, ...]
    why: str


def models_of(ck: Checkpoint) -> tuple[Model, ...]:
    """Every model of a checkpoint with its role, in the order of the file."""
    return _found(ck).models


def chosen_models(ck: Checkpoint) -> Rows[Section]:
    """The models that the user named, else the trained one; none if the checkpoint has none or if none is proven.

    Raises:
        UsageError: the user named a model that is not there.
    """
    models, wanted = models_of(ck), _wanted(ck)
    if wanted == ALL or (len(models) < 2 and not wanted):
        return Rows(model.section for model in models)
    if not wanted:
        return Rows(model.section for model in models if model.role == TRAINED)
    named = [m for m in models if wanted == m.section.name] or [m for m in models if wanted == m.role]
    if len(named) != 1:
        there = few([_called(model) for model in models], 20) or "none"
        many = f"{plural(len(named), 'model')} of this role" if named else "no such model"
        raise UsageError(ck.path, f"{spelled('model', wanted)}: {many}; it holds {there}")
    return Rows(model.section for model in named)


def the_models(ck: Checkpoint) -> Rows[Section]:
    """The model to look at, as `chosen_models`; several only if the user asked for all, or if each is a rank's slice.

    Raises:
        UsageError: the user named a model that is not there; or has to choose one of several.
    """
    found = chosen_models(ck)
    if not found and any(problem.kind is Code.ONE_OF_SEVERAL for problem in ck.problems):
        return Rows(model.section for model in models_of(ck))
    if not found and models_of(ck):
        names = [model.section.name for model in models_of(ck)]
        ways = f"{spelled('model', names[0])} takes one, {spelled('model', ALL)} all"
        held = f"holds {len(names)} models, and nothing says which one was trained"
        raise UsageError(ck.path, f"{held}: {few([_called(model) for model in models_of(ck)], 20)}; {ways}")
    return found


def trained_model(ck: Checkpoint) -> Section | None:
    """The trained model, whatever the user named; None if the checkpoint has none, or several and none is proven."""
    models = models_of(ck)
    return next((model.section for model in models if len(models) == 1 or model.role == TRAINED), None)


def trained_or_all(ck: Checkpoint) -> Sequence[Section]:
    """The trained model alone; every model if none is proven to be the trained one."""
    trained = trained_model(ck)
    return sections_of_kind(ck, "model") if trained is None else (trained,)


def with_every_model(ck: Checkpoint) -> Checkpoint:
    """The checkpoint as if the user had named no model."""
    named = ck.options is not None and ck.options.model is not None
    return replace(ck, options=replace(ck.options, model=None)) if named else ck


def listed_sections(ck: Checkpoint) -> list[Section]:
    """Every section, for commands that list what is there; where the user named a model, without the others."""
    every = [model.section for model in models_of(ck)]
    models = {section.path: section for section in (chosen_models(ck) if _wanted(ck) else every)}
    found = list[Section]()
    for section in sections_of(ck):
        if section.kind != "model":
            found.append(section)
        elif named := models.get(section.path):
            found += [named, *_beside(section, named)]
    return found


def _beside(section: Section, named: Section) -> Iterator[Section]:
    """What a wrapper saved beside the module whose names a model got, such as `n_averaged`."""
    kept = {named.keys.get(key, key) for key in named.value}
    for key, value in section.value.items():
        if section.keys.get(key, key) not in kept:
            yield Section("other", f"{section.name}.{key}", section.place_of((key,)), value)


def put_together(ck: Checkpoint, names: Collection[str] | None = None) -> Checkpoint:
    """The checkpoint with the models inside one state dict as the one model that they are in the file.

    With `names`, only if more of these are names in that state dict than names of one of its models. Where the user
    named a model, nothing changes.
    """
    parts = [model.section for model in models_of(ck)]
    inside = {section.inside for section in parts}
    if ck.options is None or _wanted(ck) or len(inside) != 1 or None in inside:
        return ck
    alone = {name for section in parts for name in section.value}
    if names is not None and len(names_in_file(ck).intersection(names)) <= len(alone.intersection(names)):
        return ck
    return replace(ck, options=replace(ck.options, model=ALL))


def names_in_file(ck: Checkpoint) -> set[str]:
    """The names of the model that the user named, else of every model, as a state dict that holds several has them."""
    if _wanted(ck):
        return {str(name) for section in chosen_models(ck) for name in section.value}
    sections = [model.section for model in models_of(ck)]
    return {str(name) for s in sections for name in (s.value if s.inside is None else s.keys.values())}


def role_of_model(ck: Checkpoint, section: Section) -> str:
    """The role of a section that is a model among several; "" for any other."""
    mine = (m.role for m in models_of(ck) if section.kind == "model" and m.section.path == section.path)
    return next(mine, "")


def role_words(ck: Checkpoint, section: Section) -> str:
    """The role of a model among several, and how its tensors got their names, in words."""
    note = next((m.note for m in models_of(ck) if m.section.path == section.path), "")
    return "; ".join(filter(None, (role_of_model(ck, section), note)))


def prefix_of(ck: Checkpoint, section: Section) -> str:
    """The beginning of the names of a section's keys: "" for the one model that is looked at."""
    chosen = chosen_models(ck) if section.kind == "model" else ()
    return "" if len(chosen) == 1 and chosen[0].path == section.path else section.name


def note_on_choice(ck: Checkpoint) -> str:
    """One line on a model that was chosen among several, and how to choose another; "" if there was no choice."""
    models, chosen = models_of(ck), chosen_models(ck)
    mine = next((model for model in models if len(chosen) == 1 and model.section.path == chosen[0].path), None)
    if mine is None or (len(models) == 1 and not mine.note):
        return ""
    if _wanted(ck) or len(models) == 1:
        return f"model: {_called(mine)}" + (f"; {mine.note}" if mine.note else "")
    others = [printable(_shortest(model, models)) for model in models if model is not mine]
    rest = "the other" if len(others) == 1 else f"another, of {few(others)}"
    why = f"{TRAINED}: {_found(ck).why}"
    return f"model: {printable(mine.section.name)} ({why}); {spelled('model', others[0])} takes {rest}"


def _wanted(ck: Checkpoint) -> str:
    return (ck.options.model if ck.options is not None else None) or ""


def _shortest(model: Model, models: Sequence[Model]) -> str:
    """The shorter of a model's name and its role, if no other model has the role."""
    alone = sum(other.role == model.role for other in models) == 1
    return min(model.section.name, model.role, key=len) if alone and model.role else model.section.name


def _called(model: Model) -> str:
    name = printable(model.section.name)
    return f"{name} ({model.role})" if model.role not in ("", name) else name


# -- the trained model -------------------------------------------------------------------------------------------------


def _found(ck: Checkpoint) -> _Found:
    if "models" not in ck.worked_out:
        ck.worked_out["models"] = _judged(ck)
    found: _Found = ck.worked_out["models"]
    return found


def _judged(ck: Checkpoint) -> _Found:
    sections = sections_of(ck)
    models = [s for s in sections if s.kind == "model"]
    if len(models) < 2:
        return _Found(tuple(_with_names(ck, s, "", None) for s in models), "")
    trained, why = _trained(sections)
    roles = (TRAINED if s is trained else role_of(s, sections).replace(TRAINED, "") for s in models)
    return _Found(tuple(_with_names(ck, s, r, trained) for s, r in zip(models, roles, strict=True)), why)


def _trained(sections: Sequence[Section]) -> tuple[Section | None, str]:
    """The trained one of several models, and why; None if nothing proves one."""
    models, left = [s for s in sections if s.kind == "model"], candidates(sections)
    if len(left) == 1 and role_of(left[0], sections) == TRAINED:
        return left[0], "Lightning's WeightAveraging saves the average as state_dict"
    optimizers = [nested(s.value) for s in sections if s.kind == "optimizer"]
    fitting = [s for s in models if any(fits(optimizer, s.value) for optimizer in optimizers)]
    if len(left) == 1 and (not fitting or left[0] in fitting):
        return left[0], "the only one without another role"
    if len(left) == 1:
        return None, ""
    likely = [s for s in left if s in fitting]
    if len(likely) == 1:
        return likely[0], "the optimizer's states fit it alone"
    called = called_model(left)
    if len(called) == 1 and (not fitting or called[0] in fitting):
        return called[0], "the only one under a model's usual key"
    return None, ""


# -- names for an average that has a wrapper's names, or none ----------------------------------------------------------


def _with_names(ck: Checkpoint, section: Section, role: str, trained: Section | None) -> Model:
    """Give an average the names of the trained model, if they are the same but for wrappers.

    A wrapper of the average, such as torch's `AveragedModel`, may hold a module that is wrapped or not, and so may the
    trained model's state dict: `torch.compile`, DDP.
    """
    if section.keys and section.inside is None:
        return _listed(ck, section, role, trained)
    if trained is None or section.path == trained.path or section.value.keys() == trained.value.keys():
        return Model(section, role)
    leading = ddp_prefix(trained.value)
    known = {bare_name(name, leading): name for name in trained.value}
    own = {without_wrappers(name): name for name in section.value}
    first = next((name for name, key in own.items() if getattr(section.value[key], "shape", ())), "").split(".")
    for prefix in ("", f"{first[0]}.", f"{'.'.join(first[:2])}."):
        inside = {name.removeprefix(prefix): key for name, key in own.items() if name.startswith(prefix)}
        taken = {known[name]: key for name, key in inside.items() if name in known}
        beside = [section.value[key] for key in section.value.keys() - taken.values()]
        if (
            taken.keys() == trained.value.keys()
            and all(_shape(section.value[key]) == _shape(trained.value[name]) for name, key in taken.items())
            and not any(isinstance(value, Tensor) and value.numel > 1 for value in beside)
        ):
            value = {name: section.value[key] for name, key in taken.items()}
            keys = {name: section.keys.get(key, key) for name, key in taken.items()}
            plain = all(key == f"{prefix}{name}" for name, key in taken.items())
            note = f"without the prefix {prefix} of its wrapper" if plain else f"with the names of {trained.name}"
            return Model(section._replace(value=value, keys=keys), role, note)
    return Model(section, role)


def _shape(value: Any) -> Ints | None:
    return value.shape if isinstance(value, Tensor) else None


def _listed(ck: Checkpoint, section: Section, role: str, trained: Section | None) -> Model:
    """Name the tensors of a list by the trained model's parameters, in its order; all of them, or none.

    The list is treated as the state of an optimizer that numbers its parameters in the order of `model.parameters()`.
    """
    if trained is None or trained.keys:
        return Model(section, role, f"{plural(len(section.keys), 'tensor')} by number, and no one model is beside it")
    state = {number: {"average": section.value[key]} for key, number in section.keys.items()}
    order = believed(ck.module_order, trained.value)
    naming = name_parameters({"state": state, "param_groups": [{"params": list(state)}]}, trained.value, order)
    if naming.unnamed:
        why = FITS if order.kept else f"their shapes fit several or none, and {order.why}"
        floating = sum(isinstance(t, Tensor) and is_floating(t.dtype) for t in trained.value.values())
        held = f"a list of {plural(len(state), 'tensor')} without names; {trained.name} has {floating}"
        return Model(section, role, f"{held} ({why})")
    names = {naming.names[number]: number for number in state}
    value = {name: section.value[str(number)] for name, number in names.items()}
    how = f"in the order of {trained.name}" if naming.assumed else "by their shapes"
    note = f"a list, named {how}" + (" (shapes agree)" if naming.assumed else "")
    rest = len(trained.value) - len(value)
    note += f", without {plural(rest, 'other value')} that {trained.name} has" if rest else ""
    return Model(section._replace(value=value, keys=names), role, note)
