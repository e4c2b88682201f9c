"""The mappings that users hold: a state dict, and the tree of a file.

They have a readable `repr`, complete their keys, and name the nearest key in a `KeyError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptools.model.records import as_html, line_of, to_plain
from ckptools.model.tensor import Tensor
from ckptools.text import clip_middle, no_such_key, plural


class StateDict(Mapping[str, Any]):
    """A part of a checkpoint by name, such as the model's state dict. A `KeyError` names the nearest key.

    `name` is for its `repr`; `prefix` comes before its keys in the names of its tensors.
    """

    def __init__(self, name: str, values: Mapping[Any, Any], prefix: str = "") -> None:
        self._name, self._values, self._prefix = name, values, prefix

    def __getitem__(self, key: str) -> Any:
        if key in self._values:
            value = self._values[key]
            return value.called(f"{self._prefix}{key}") if isinstance(value, Tensor) else value
        raise KeyError(no_such_key(key, map(str, self._values)))

    def get(self, key: str, default: Any = None) -> Any:
        """The value at `key`, or `default`."""
        return self[key] if key in self._values else default

    def load(self) -> dict[str, Any]:
        """Read every tensor as a `torch.Tensor`, for `load_state_dict`; other values stay as they are.

        Raises:
            NotWholeError: elements of a tensor are in no file.
            ReadError: a file cannot be read, or a tensor cannot be put together; the message says why.
        """
        return {key: value.load() if isinstance(value, Tensor) else value for key, value in self.items()}

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
        name = clip_middle(self._name or "values", 60)
        counts = [plural(len(self), "key"), *([plural(tensors, "tensor")] if tensors else [])]
        return line_of(f"{name}:", ", ".join(counts))

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def to_dict(self) -> dict[str, Any]:
        """The state dict's values as texts, numbers, and lists and dicts of these; a tensor as its stated facts."""
        return {str(key): to_plain(value) for key, value in self.items()}


class RawTree(dict[Any, Any]):
    """The tree of a file, which a notebook shows as foldable sections."""

    def _repr_html_(self) -> str | None:
        return as_html(self)
