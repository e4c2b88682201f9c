"""A mapping as users hold it: it shows itself, completes its keys, and names the nearest of one that is not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptools.api.tensor import Tensor
from ckptools.model import tensor as tensor_data
from ckptools.model.records import as_html, line_of, to_plain
from ckptools.text import clip_middle, plural


class StateDict(Mapping[str, Any]):
    """A part of a checkpoint by name, such as the state dict of its model. Unknown names are told with the nearest.

    Args:
        name: what it is part of, for its `repr`.
        values: what it maps.
        prefix: what the names of its tensors begin with, before their keys.
    """

    def __init__(self, name: str, values: Mapping[Any, Any], prefix: str = "") -> None:
        self._name, self._values, self._prefix = name, values, prefix

    def __getitem__(self, key: str) -> Any:
        if key in self._values:
            value = self._values[key]
            return replace(value, name=f"{self._prefix}{key}") if isinstance(value, Tensor) else value
        from ckptools.text import no_such_key

        raise KeyError(no_such_key(key, map(str, self._values)))

    def get(self, key: str, default: Any = None) -> Any:
        """The value at `key`, or `default`."""
        return self[key] if key in self._values else default

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _ipython_key_completions_(self) -> list[str]:
        return [str(k) for k in self._values]

    def __repr__(self) -> str:
        tensors = sum(isinstance(v, tensor_data.Tensor) for v in self._values.values())
        name = clip_middle(self._name or "values", 60)
        held = [plural(len(self), "key"), *([plural(tensors, "tensor")] if tensors else [])]
        return line_of(f"{name}:", ", ".join(held))

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Its values as texts, numbers, and lists and dicts of these; of a tensor what is known of it."""
        return {str(key): to_plain(value) for key, value in self.items()}
