"""New names for the model in an output: first a map, then a prefix to strip, then rules.

The map takes the checkpoint's own names. All names, mapped or not, go through `strip_prefix`, then through each
`rename` in order. A rule `OLD=NEW` renames the tensor OLD and everything below a module OLD; if OLD ends with a dot (or
is empty), OLD and NEW are beginnings of names.

A `.pt` keeps the source's tree, which `optimizer.load_state_dict` takes with its numbers. A flat list of tensors gets
the known names in place of numbers, with a note on their origin. Parameters without a name keep their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.selection import OutputContents
from ckptools.errors import UsageError
from ckptools.keys.name_map import read_map, replaced_module, replaced_prefix
from ckptools.model.tree import KeyPath
from ckptools.model.values import describe_for_error
from ckptools.text import few
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.parameter_names import Id, Naming
from ckptools.training_state.sections import Section, is_flat_optimizer

MAX_NAMED = 5


@dataclass(frozen=True)
class RenameRule:
    """One rule as the user gave it, and its effect on a name."""

    given: str
    new_name: Callable[[str], str]


@dataclass(frozen=True)
class Renaming:
    """The renaming that the user asked for.

    Attributes:
        names: new names by old ones.
        rules: applied after them.
    """

    names: Mapping[str, str]
    rules: tuple[RenameRule, ...]

    def new_name(self, name: str) -> str:
        """The new name for a name."""
        name = self.names.get(name, name)
        for rule in self.rules:
            name = rule.new_name(name)
        return name

    def of(self, names: Iterable[str], path: Path) -> tuple[dict[str, str], list[str]]:
        """Every name of a model with its new one, and a note on entries that match no name.

        Raises:
            UsageError: the map or a rule fits no name at all, or a name would become empty.
        """
        now = {name: self.names.get(name, name) for name in names}
        unknown = [old for old in self.names if old not in now]
        if self.names and len(unknown) == len(self.names):
            raise UsageError(path, f"--map: the model has none of its {len(unknown)} names; {_begin(now)}")
        for rule in self.rules:
            after = {old: rule.new_name(new) for old, new in now.items()}
            if not all(after.values()):
                lost = next(old for old, new in after.items() if not new)
                raise UsageError(path, f"{rule.given}: nothing would be left of the name {describe_for_error(lost)}")
            if after == now:
                raise UsageError(path, f"{rule.given}: fits no name of the model; {_begin(now)}")
            now = after
        note = f"--map: the model has no {few(list(map(describe_for_error, unknown)), MAX_NAMED)}" if unknown else ""
        return now, [note] if note else []


def _begin(now: Mapping[str, str]) -> str:
    return f"its names are such as {few([describe_for_error(name) for name in now.values()][:2])}"


def renaming_of(options: ConsolidateOptions) -> Renaming | None:
    """The renaming that the user asked for; None if there is none.

    Raises:
        ReadError: the map cannot be read.
        UsageError: a rule is malformed.
    """
    rules = [_stripped(options.strip_prefix)] if options.strip_prefix is not None else []
    rules += [_rule(text) for text in options.rename]
    names = _map(options.map)
    return Renaming(names, tuple(rules)) if names or rules else None


def _map(given: Mapping[str, str] | str | Path | None) -> Mapping[str, str]:
    if given is None or isinstance(given, Mapping):
        bad = next(((old, new) for old, new in (given or {}).items() if not (new and isinstance(new, str))), None)
        if bad is not None:
            raise UsageError(None, f"map: expected a name for {describe_for_error(bad[0])}, found {bad[1]!r:.80}")
        return given or {}
    return read_map(Path(given))


def _stripped(prefix: str) -> RenameRule:
    """The rule that strips a prefix of whole components, given with its dot or without."""
    begin = prefix.rstrip(".") + "."
    if begin == ".":
        raise UsageError(None, "--strip-prefix is empty; give the beginning of names that goes, such as module.")
    return RenameRule(f"--strip-prefix {prefix}", lambda name: replaced_prefix(name, begin, ""))


def _rule(text: str) -> RenameRule:
    old, sign, new = text.partition("=")
    given = f"--rename {text}"
    if not sign or not (old or new):
        raise UsageError(None, f"{given}: expected OLD=NEW, such as blocks=layers or module.=")
    if not old or old.endswith("."):
        if new and not new.endswith("."):
            raise UsageError(None, f"{given}: {old or 'nothing'} is the beginning of names; end {new} with a dot too")
        return RenameRule(given, lambda name: replaced_prefix(name, old, new))
    if not new or new.endswith("."):
        raise UsageError(None, f"{given}: {old} is a whole name; end both or none with a dot")
    return RenameRule(given, lambda name: replaced_module(name, old, new))


# -- named state ------------------------------------------------------------------------------------------------------


NOT_NAMED = Naming({}, "fqn", (), (), "")


def naming_of(selection: OutputContents, section: Section) -> Naming:
    """The naming of the parameters of an optimizer in the output."""
    optimizers = optimizers_of(selection.source).values() if selection.source is not None else ()
    naming = next((o.naming for o in optimizers if o.path == section.path), NOT_NAMED)
    new = selection.renamed
    return naming._replace(names={new.get(i, i): new.get(name, name) for i, name in naming.names.items()})


def by_name(selection: OutputContents) -> OutputContents:
    """Key the state of every optimizer by name, as far as names are known."""
    renamed = [(at, naming_of(selection, s)) for s, at in selection.places if _is_keyed(s)]
    tree = selection.tree
    for at, naming in renamed:
        tree = _replaced(tree, at, naming.names)
    return replace(
        selection.moved(lambda path: _path(path, renamed)),
        tree=tree,
        notes=[*selection.notes, *(note for _, naming in renamed for note in naming_notes(naming))],
    )


def naming_notes(naming: Naming) -> Iterator[str]:
    """Notes for the user on the names in the output."""
    if naming.note:
        yield f"optimizer: {naming.note}"
    if naming.unnamed and naming.by != "fqn":
        yield f"optimizer: state without a name is written under its number ({len(naming.unnamed)})"


def _is_keyed(section: Section) -> bool:
    return section.kind == "optimizer" and not is_flat_optimizer(section.value)


def _replaced(node: Any, at: KeyPath, names: Mapping[Id, str]) -> Any:
    """Copy a tree with names in place of numbers in the optimizer at a key path."""
    if not at:
        return _named(node, names)
    first, *rest = at
    if isinstance(node, (list, tuple)):
        return type(node)(_replaced(v, tuple(rest), names) if i == first else v for i, v in enumerate(node))
    return {key: _replaced(v, tuple(rest), names) if key == first else v for key, v in node.items()}


def _named(optimizer: Mapping[str, Any], names: Mapping[Id, str]) -> dict[str, Any]:
    state = {names.get(i, i): entry for i, entry in optimizer["state"].items()}
    groups = [_group(group, names) for group in optimizer["param_groups"]]
    return {**optimizer, "state": state, "param_groups": groups}


def _group(group: Mapping[str, Any], names: Mapping[Id, str]) -> dict[str, Any]:
    params = group.get("params")
    listed = isinstance(params, (list, tuple)) and all(isinstance(i, (int, str)) for i in params)
    return {**group, "params": [names.get(i, i) for i in params]} if listed and params else dict(group)


def _path(path: KeyPath, renamed: list[tuple[KeyPath, Naming]]) -> KeyPath:
    """The key path in the tree with names."""
    for at, naming in renamed:
        n = len(at)
        if path[:n] == at and path[n : n + 1] == ("state",) and len(path) > n + 1:
            return (*path[: n + 1], naming.names.get(path[n + 1], path[n + 1]), *path[n + 2 :])
    return path
