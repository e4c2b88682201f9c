"""Comparison of the dicts, lists and tuples that hold keys: their class, the order of keys, their attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptools.diff.record import ValueDifference
from ckptools.diff.sides import ContainerForm, Contents, SideContainer
from ckptools.keys.value_digests import UNREAD, apart, digest_of, kind_of, text_of
from ckptools.model.first_difference import first_difference
from ckptools.model.tree import fqn_of
from ckptools.text import few


def form_of(node: Any) -> ContainerForm:
    """The form of a container."""
    keys = list(node) if isinstance(node, dict) else []
    plain = set(map(type, keys)) == {str}
    exact = sorted(keys) if plain else sorted(map(digest_of, keys))
    in_order = keys if plain else list(map(digest_of, keys))
    attributes = vars(node) if hasattr(node, "__dict__") else {}
    unread = "" if plain or not any(key.startswith(UNREAD) for key in exact) else UNREAD
    return ContainerForm(
        kind_of(node), unread + digest_of(exact), digest_of(in_order), digest_of(sorted(map(str, keys))),
        digest_of(dict(attributes)) if attributes else "",
    )  # fmt: skip


def container_rows(a: SideContainer, b: SideContainer) -> Iterator[ValueDifference]:
    """A row for what differs in the form of two containers; none for the order of names of parameters."""
    if _alike(a.node, b.node):
        return
    forms = [side.form or form_of(side.node) for side in (a, b)]
    left, right = forms
    row = ValueDifference(a.name, a.subject, "differs", "", a.rank)
    if left.kind != right.kind and a.by_name:
        return
    if left.kind != right.kind:
        detail = f"a container of another class: {left.kind} → {right.kind}"
        yield row._replace(detail=detail, value_a=left.kind, value_b=right.kind)
    if left.keys != right.keys:
        if a.by_name and left.texts == right.texts:
            yield row._replace(detail="a key is a number on one side and its text on the other")
        return
    if left.order != right.order and not a.by_name:
        n, *keys = _first_key(a.node, b.node)
        yield row._replace(detail=f"the same keys in another order{n}", value_a=keys[0], value_b=keys[1])
    if UNREAD in (left.keys + right.keys + left.attributes + right.attributes):
        yield row._replace(verdict="cannot be compared", detail="its keys or attributes are not all known")
    elif left.attributes != right.attributes:
        yield _of_attributes(row, a.node, b.node)


def container_notes(a: Contents, b: Contents) -> Iterator[str]:
    """What does not count of dicts of parameters' names: the order of their keys, and their class."""
    moved, other_class = list[str](), list[str]()
    for key, one in a.containers.items():
        other = b.containers.get(key)
        if other is not None and one.by_name and not _alike(one.node, other.node):
            left, right = (side.form or form_of(side.node) for side in (one, other))
            moved += [one.name] if left.keys == right.keys and left.order != right.order else []
            other_class += [f"{one.name}: {left.kind} → {right.kind}"] if left.kind != right.kind else []
    if moved:
        yield f"keys of {few(moved, 3)} stand in another order, which does not count: parameters go by name"
    if other_class:
        yield f"the class of a dict of parameters does not count: {few(other_class, 3)}"


def _alike(x: Any, y: Any) -> bool:
    """Whether two containers have one form, as far as a short look tells."""
    if x is None or type(x) is not type(y) or kind_of(x) != kind_of(y) or (hasattr(x, "__dict__") and vars(x)):
        return False
    if not isinstance(x, dict):
        return True
    return len(x) == len(y) and all(type(v) is type(w) is str and v == w for v, w in zip(x, y, strict=True))


def _first_key(x: Any, y: Any) -> tuple[str, str | None, str | None]:
    """Where the order of keys begins to differ, and the key of each side there; nothing in files of digests."""
    if x is None or y is None:
        return "", None, None
    n, v, w = next((n, v, w) for n, (v, w) in enumerate(zip(x, y, strict=True)) if digest_of(v) != digest_of(w))
    return f", from number {n} on", text_of(v), text_of(w)


def _of_attributes(row: ValueDifference, x: Any, y: Any) -> ValueDifference:
    if x is None or y is None:
        return row._replace(detail="it was saved with other attributes")
    found = first_difference(vars(x), vars(y), lambda v, w: digest_of(v) == digest_of(w))
    if found is None:
        return row._replace(detail="it was saved with other attributes")
    path, v, w = found
    texts = apart(v, w)
    return row._replace(detail=f"another attribute {fqn_of(path)}", value_a=texts[0], value_b=texts[1])
