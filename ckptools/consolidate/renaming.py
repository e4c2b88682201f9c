"""The contents of an output under new names: those of the model and, following them, of the optimizer's state.

A `.pt` keeps the source's tree, which `optimizer.load_state_dict` takes with its numbers. A flat list of tensors gets
the known names in place of numbers, with a note on their origin. Parameters without a name keep their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptools.consolidate.options import Renaming
from ckptools.consolidate.writers.layout import OutputContents
from ckptools.errors import RefusedError
from ckptools.formats.shared.merge import empty_like, with_value
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tree import KeyPath, leaf_at
from ckptools.model.values import describe_for_error
from ckptools.text import clip
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.parameter_names import UNNAMED, Naming, without_ddp
from ckptools.training_state.sections import Section, flat_key, is_flat_optimizer, sections_of_kind

NewKey = Callable[[Any], Any]
"""Maps a key of a section to its new key."""

Move = tuple[Section, KeyPath, NewKey]
"""A section with its key path in the tree of the output, and the new keys in it."""


def renamed(selection: OutputContents, renaming: Renaming) -> OutputContents:
    """Rename a selection; optimizer state keyed by number keeps its numbers.

    Raises:
        UsageError: a rule fits no name.
        RefusedError: two names become one, or an optimizer's state cannot follow.
    """
    source = selection.source
    names, notes = renaming.of(_names(source), source.path)
    follow = _following(names, source.path)

    def new_key_of(section: Section) -> NewKey | None:
        if section.kind == "model":
            return lambda key: names.get(key, key) if key in section.value else key
        return follow if section.kind == "optimizer" else None

    return replace(
        _with_new_keys(selection, new_key_of),
        notes=[*selection.notes, *notes, _renaming_note(names)],
        renamed=names,
    )


def by_name(selection: OutputContents) -> OutputContents:
    """Key the state of every optimizer by name, as far as names are known."""
    sections = [s for s, _ in selection.places if s.kind == "optimizer" and not is_flat_optimizer(s.value)]
    namings = {section.path: naming_of(selection, section) for section in sections}

    def new_key_of(section: Section) -> NewKey | None:
        naming = namings.get(section.path)
        return None if naming is None else lambda key: naming.names.get(key, key)

    notes = [note for naming in namings.values() for note in naming_notes(naming)]
    return replace(_with_new_keys(selection, new_key_of), notes=[*selection.notes, *notes])


def naming_of(selection: OutputContents, section: Section) -> Naming:
    """The naming of the parameters of an optimizer in the output."""
    found = (o.naming for o in optimizers_of(selection.source).values() if o.path == section.path)
    naming, new = next(found, Naming({}, "fqn", (), (), "")), selection.renamed
    return naming._replace(names={new.get(i, i): new.get(name, name) for i, name in naming.names.items()})


def naming_notes(naming: Naming) -> Iterator[str]:
    """Notes for the user on the names in the output."""
    if naming.note:
        yield f"optimizer: {naming.note}"
    if naming.unnamed and naming.by != "fqn":
        yield f"optimizer: state without a name is written under its number ({len(naming.unnamed)})"


def _names(source: Checkpoint) -> list[str]:
    """The names that may be renamed: the model's or, without a model, those that the optimizer knows."""
    models = sections_of_kind(source, "model")
    if models:
        return list(dict.fromkeys(str(name) for section in models for name in section.value))
    known = (name for optimizer in optimizers_of(source).values() for name in optimizer.naming.names.values())
    return list(dict.fromkeys(known))


def _renaming_note(names: Mapping[str, str]) -> str:
    changed = [(old, new) for old, new in names.items() if old != new]
    example = " is ".join(clip(describe_for_error(name), 80) for name in changed[0]) if changed else ""
    return f"names of the model: {len(changed)} of {len(names)} are new ({example})"


def _following(names: Mapping[str, str], path: Path) -> NewKey:
    """New names in an optimizer for the parameters of the model, apart from wrappers."""
    bare = {without_ddp(name): name for name in names}

    def new_name(key: Any) -> Any:
        own = key if key in names else bare.get(without_ddp(key)) if isinstance(key, str) else None
        if own is not None:
            return names[own]
        if not isinstance(key, str) or key.startswith(UNNAMED) or key.isdecimal():
            return key
        text = f"the model has no {describe_for_error(key)}, of which the optimizer has state, so that it cannot follow"
        raise RefusedError(path, f"{text} the new names; write the model alone: --only model")

    return new_name


def _with_new_keys(selection: OutputContents, new_key_of: Callable[[Section], NewKey | None]) -> OutputContents:
    """Copy a selection with new keys in some sections."""
    tree, places = selection.tree, []
    moves: list[Move] = []
    for section, at in selection.places:
        if (new_key := new_key_of(section)) is not None:
            new = _renamed_section(section, leaf_at(tree, at), new_key, selection.source.path)
            tree = with_value(tree, at, new)
            moves.append((section, at, new_key))
            if not at:  # at the root of a tree it has only some of its keys
                mine = {_moved((key,), moves[-1:])[0] for key in section.value}
                new = {key: value for key, value in new.items() if key in mine}
            section = section._replace(value=new)
        places.append((section, at))
    return replace(
        selection,
        tree=tree,
        places=tuple(places),
        model_paths={_moved(path, moves) for path in selection.model_paths},
        left_out={_moved(path, moves): why for path, why in selection.left_out.items()},
        missing={_moved(path, moves): boxes for path, boxes in selection.missing.items()},
        lost={_moved(path, moves) for path in selection.lost},
        carried={_moved(path, moves): filled for path, filled in selection.carried.items()},
    )


def _moved(path: KeyPath, moves: Iterable[Move]) -> KeyPath:
    for section, at, new_key in moves:
        n = len(at)
        if path[:n] != at or len(path) == n or not section.holds((*section.path, *path[n:])):
            continue
        if section.kind == "model":
            return (*path[:n], new_key(path[n]), *path[n + 1 :])
        if is_flat_optimizer(section.value):
            return (*path[:n], _flat_key(path[n], new_key), *path[n + 1 :])
        if path[n] == "state" and len(path) > n + 1:
            return (*path[: n + 1], new_key(path[n + 1]), *path[n + 2 :])
    return path


def _renamed_section(section: Section, node: Any, new_key: NewKey, path: Path) -> Any:
    if section.kind == "model":
        made = _with_keys(node, new_key, path)
        return _with_new_modules(made, [(key, new_key(key)) for key in node])
    if is_flat_optimizer(section.value):
        return _with_keys(node, lambda key: _flat_key(key, new_key) if key in section.value else key, path)
    groups = type(node["param_groups"])(_renamed_group(group, new_key) for group in node["param_groups"])
    return with_value(with_value(node, ("state",), _with_keys(node["state"], new_key, path)), ("param_groups",), groups)


def _flat_key(key: str, new_key: NewKey) -> str:
    """Rename a key such as `state.<fqn>.exp_avg` by the new name of its parameter."""
    kind, fqn, slot = flat_key(key)
    return f"{kind}{new_key(fqn)}.{slot}"


def _renamed_group(group: Mapping[str, Any], new_key: NewKey) -> dict[str, Any]:
    listed = {k: v for k, v in group.items() if k in ("params", "param_names") and isinstance(v, (list, tuple))}
    known = {k: v for k, v in listed.items() if all(isinstance(i, (int, str)) for i in v)}
    return {**group, **{key: type(value)(map(new_key, value)) for key, value in known.items()}}


def _with_keys(node: Any, new_key: NewKey, path: Path) -> Any:
    """Copy a dict of the same kind under new keys."""
    made = empty_like(node)
    came_from: dict[Any, Any] = {}
    for key, value in node.items():
        new = new_key(key)
        if new in made:
            both = f"{describe_for_error(came_from[new])} and {describe_for_error(key)}"
            raise RefusedError(path, f"{both} would both be called {describe_for_error(new)}; rename one of them")
        made[new], came_from[new] = value, key
    return made


def _with_new_modules(made: Any, names: Iterable[tuple[Any, Any]]) -> Any:
    """Rename the modules of a state dict (`_metadata`) like the tensors in them."""
    versions: Any = getattr(made, "_metadata", None)
    if not isinstance(versions, dict):
        return made
    modules: dict[str, str] = {}
    for old, new in names:
        for before, after in _modules(str(old), str(new)):
            modules.setdefault(before, after)
    modules.setdefault("", "")
    made._metadata = type(versions)((modules[m], v) for m, v in versions.items() if m in modules)
    return made


def _modules(old: str, new: str) -> Iterable[tuple[str, str]]:
    """The modules of a tensor by both names, as far as these end alike."""
    while old and new and old.rpartition(".")[2] == new.rpartition(".")[2]:
        old, new = old.rpartition(".")[0], new.rpartition(".")[0]
        yield old, new
