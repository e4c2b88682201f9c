"""The mappings of a checkpoint as users hold them: a state dict, and the tree of a file.

They show themselves, complete their keys, and name the nearest of one that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptools.model.problems import as_html, line_of, to_plain
from ckptools.model.tensor import Tensor
from ckptools.text import clip_middle, no_such_key, plural


class StateDict(Mapping[str, Any]):
    """A part of a checkpoint by name, such as the state dict of its model. Errors about unknown names give the nearest.

    `name` is for its `repr`; the names of its tensors begin with `prefix`, before their keys.
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
        """The same mapping with every tensor read as a `torch.Tensor`, for `load_state_dict`.

        Raises:
            NotWholeError: no file that is here holds some of a tensor.
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
        """Its values as texts, numbers, and lists and dicts of these; of a tensor what is known of it."""
        return {str(key): to_plain(value) for key, value in self.items()}


class RawTree(dict[Any, Any]):
    """The tree of a file, which a notebook shows as folds."""

    def _repr_html_(self) -> str | None:
        return as_html(self)
