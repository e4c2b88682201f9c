"""Which entries a KEY means: a name, the beginning of names, a kind of section, or a glob."""

from __future__ import annotations

from collections.abc import Sequence

from ckptools.contents.entries import Entry, entries_of
from ckptools.contents.selection import KINDS, is_glob, matching, pattern
from ckptools.errors import UsageError
from ckptools.model.checkpoint import Checkpoint
from ckptools.text import no_such_key
from ckptools.training_state.sections import sections_of, sections_of_kind


def entries_at(ck: Checkpoint, key: str) -> list[Entry]:
    """The entries that a key means: that of this name, and those whose names go on with a dot.

    Where there are none, it may be a glob, which in a checkpoint without any keys means none, or begin with a kind of
    section: `optimizer.param_groups` is that of the section `optimizers.AdamW`, `model` is all of the model.

    Raises:
        UsageError: nothing is there; the message has the nearest name.
    """
    entries = entries_of(ck)
    found = _beginning(entries, key) or (matching(entries, key) if is_glob(key) else []) or _of_kind(ck, key)
    if not found and (entries or not is_glob(key)):
        names = [*(entry.name for entry in entries), *(section.name for section in sections_of(ck))]
        raise UsageError(ck.path, f"{no_such_key(key, names)}; ckptools tree lists all")
    return found


def _beginning(entries: Sequence[Entry], key: str) -> list[Entry]:
    found = [entry for entry in entries if entry.name == key or entry.name.startswith(f"{key}.")]
    return found or [e for e in entries if any(name == key or name.startswith(f"{key}.") for name in e.names)]


def _of_kind(ck: Checkpoint, key: str) -> list[Entry]:
    """The entries that a key means which is the name of a section, or whose first word is a kind of section."""
    kind, _, rest = key.partition(".")
    own = [entry for entry in entries_of(ck) if entry.section == key]
    if own or kind not in KINDS:
        return own
    names = {section.name for section in sections_of_kind(ck, kind)}
    inside = [entry for entry in entries_of(ck) if entry.section in names]
    if is_glob(rest):
        wanted = pattern((rest,))
        return [entry for entry in inside if wanted.fullmatch(_inside(entry))]
    return [entry for entry in inside if not rest or f"{_inside(entry)}.".startswith(f"{rest}.")]


def _inside(entry: Entry) -> str:
    """The name of an entry below its section."""
    return entry.name.removeprefix(f"{entry.section}.")
