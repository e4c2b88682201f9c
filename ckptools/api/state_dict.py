"""A mapping as users hold it: it shows itself, completes its keys, and names the nearest of one that is not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptools.model.tensor import Tensor


class StateDict(Mapping[str, Any]):
    """A part of a checkpoint by name, such as the state dict of its model. Unknown names are told with the nearest.

    Args:
        name: what it is part of, for its `repr`.
        values: what it maps.
    """

    def __init__(self, name: str, values: Mapping[Any, Any]) -> None:
        self._name, self._values = name, values

    def __getitem__(self, key: str) -> Any:
        if key in self._values:
            return self._values[key]
        from ckptools.text import no_such_key

        raise KeyError(no_such_key(key, map(str, self._values)))

    def get(self, key: str, default: Any = None) -> Any:
        """The value at `key`, or `default`."""
        return self._values.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _ipython_key_completions_(self) -> list[str]:
        return [str(k) for k in self._values]

    def __repr__(self) -> str:
        tensors = sum(isinstance(v, Tensor) for v in self._values.values())
        return f"<{self._name or 'values'}: {len(self)} entries, {tensors} tensors>"

    def _repr_html_(self) -> str:
        from ckptools.views.html import values_html

        return values_html(self)
