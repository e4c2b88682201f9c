"""New names for a model that is written: a map, a prefix that goes, and rules, one after the other.

The map takes the checkpoint's own names. What it leaves, and what it gives, goes through `strip_prefix`, then through
each `rename` in its order. A rule `OLD=NEW` renames the tensor OLD and everything below a module OLD; where OLD ends
with a dot (or is empty) it is the beginning of names, and so is NEW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptools.consolidate.options import ConsolidateOptions
from ckptools.contents.name_map import read_map
from ckptools.contents.renames import replaced_module, replaced_prefix
from ckptools.errors import UsageError
from ckptools.model.values import describe_for_error
from ckptools.text import few

MAX_NAMED = 5


@dataclass(frozen=True)
class Rule:
    """One rule, as it was given, and what it makes of a name."""

    given: str
    new_name: Callable[[str], str]


@dataclass(frozen=True)
class Renaming:
    """What was asked for.

    Attributes:
        names: new names by old ones.
        rules: what comes behind these.
    """

    names: Mapping[str, str]
    rules: tuple[Rule, ...]

    def new_name(self, name: str) -> str:
        """What a name becomes."""
        name = self.names.get(name, name)
        for rule in self.rules:
            name = rule.new_name(name)
        return name

    def of(self, names: Iterable[str], path: Path) -> tuple[dict[str, str], list[str]]:
        """Every name of a model with its new one, and what the user should know of entries that name nothing.

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
        told = f"--map: the model has no {few(list(map(describe_for_error, unknown)), MAX_NAMED)}" if unknown else ""
        return now, [told] if told else []


def _begin(now: Mapping[str, str]) -> str:
    return f"its names are such as {few([describe_for_error(name) for name in now.values()][:2])}"


def renaming_of(options: ConsolidateOptions) -> Renaming | None:
    """The renaming that was asked for; None where none was.

    Raises:
        ReadError: the map cannot be read.
        UsageError: a rule is none.
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


def _stripped(prefix: str) -> Rule:
    """The rule that takes a prefix of whole components away, with its dot or without."""
    begin = prefix.rstrip(".") + "."
    if begin == ".":
        raise UsageError(None, "--strip-prefix is empty; give the beginning of names that goes, such as module.")
    return Rule(f"--strip-prefix {prefix}", lambda name: replaced_prefix(name, begin, ""))


def _rule(text: str) -> Rule:
    old, sign, new = text.partition("=")
    given = f"--rename {text}"
    if not sign or not (old or new):
        raise UsageError(None, f"{given}: expected OLD=NEW, such as blocks=layers or module.=")
    if not old or old.endswith("."):
        if new and not new.endswith("."):
            raise UsageError(None, f"{given}: {old or 'nothing'} is the beginning of names; end {new} with a dot too")
        return Rule(given, lambda name: replaced_prefix(name, old, new))
    if not new or new.endswith("."):
        raise UsageError(None, f"{given}: {old} is a whole name; end both or none with a dot")
    return Rule(given, lambda name: replaced_module(name, old, new))
