"""New names for those of a state dict, by rules that act on whole components: `block` is no part of `blocks`."""

from __future__ import annotations

from collections.abc import Collection


def replaced_prefix(name: str, old: str, new: str) -> str:
    """The name with `new` in the place of a beginning `old`; both are empty or end with a dot."""
    return new + name[len(old) :] if name.startswith(old) else name


def replaced_module(name: str, old: str, new: str) -> str:
    """The name with `new` in the place of `old`, which is the name itself or the module that it begins with."""
    return new + name[len(old) :] if name == old or name.startswith(f"{old}.") else name


def replaced_component(name: str, old: str, new: str) -> str:
    """The name with `new` in the place of every component `old`."""
    if old not in name:
        return name
    return ".".join([new if part == old else part for part in name.split(".")])


def without_components(name: str, gone: Collection[str]) -> str:
    """The name without its components that are among some."""
    return ".".join([part for part in name.split(".") if part not in gone])
