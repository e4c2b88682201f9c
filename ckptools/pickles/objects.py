"""Objects that a pickle describes and nothing makes: the storages of tensors, and the attributes of the others."""

from __future__ import annotations

from typing import Any

from ckptools.dtypes import STORAGE_CLASS
from ckptools.model.values import Global, Opaque, describe_for_error


class Storage(Opaque):
    """A storage that a persistent id names: where a tensor's elements come from.

    Attributes:
        key: the record is `data/<key>`.
        dtype: of its elements; `uint8` for an untyped storage.
        numel: number of elements.
        location: device tag, such as `cpu` or `cuda:3`.
    """

    __slots__ = ("dtype", "key", "location", "numel")

    def __init__(self, kind: str, key: str, location: str, numel: int) -> None:
        super().__init__(f"torch.{kind}")
        self.key = key
        self.dtype = STORAGE_CLASS[kind]
        self.numel = numel
        self.location = location

    @classmethod
    def from_pid(cls, pid: Any) -> Storage:
        """Read torch's persistent id: `('storage', storage class, key, location, numel)`.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise ValueError("a persistent id that is not torch's")
        kind, key, location, numel = pid[1:5]
        name = kind.name if isinstance(kind, Global) else ""
        if name not in STORAGE_CLASS or not isinstance(key, str) or not isinstance(location, str):
            raise ValueError(f"a storage of unknown type {describe_for_error(name or kind)}")
        if type(numel) is not int or numel < 0:
            raise ValueError(f"storage {describe_for_error(key)} has {describe_for_error(numel)} elements")
        return cls(name, key, location, numel)


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object: its state is a dict, or `(dict, slots dict)` for classes with slots."""
    return attributes_in(value.state) if isinstance(value, Opaque) else {}


def attributes_in(state: Any) -> dict[str, Any]:
    """The attributes in what an object's `__setstate__` would have got."""
    parts = [part for part in (state[:2] if isinstance(state, tuple) else (state,)) if isinstance(part, dict)]
    if len(parts) > 1:
        return {**parts[0], **parts[1]}
    return parts[0] if parts else {}
