"""The names of weights that bitsandbytes packed: several tensors of a state dict, beside each other, make one weight.

Source: bitsandbytes 0.50.2, functional.py (`QuantState.as_dict`), nn/modules.py (`Linear8bitLt._save_to_state_dict`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, leaf_at, nodes_in

STATE = ".quant_state.bitsandbytes__"
"""Between a weight's name and its kind, in the name of the JSON that describes it."""

FOUR_BITS = ("nf4", "fp4")
"""Kinds of two codes to a byte."""


class PackedWeight(NamedTuple):
    """A packed weight: its kind (`nf4`, `fp4` or `int8`), and the keys of its parts in its state dict.

    Attributes:
        kind: how it is packed.
        keys: the key of each part; that of the codes is the weight's own name.
    """

    kind: str
    keys: Mapping[str, str]


def packed_in(node: Mapping[Any, Any]) -> dict[str, PackedWeight]:
    """The weights of a state dict that bitsandbytes packed, by name; by the names beside them alone."""
    found = {}
    for key in node:
        if not isinstance(key, str):
            continue
        name, between, kind = key.rpartition(STATE)
        if between and kind in FOUR_BITS and isinstance(node.get(name), Tensor):
            parts = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
            beside = {part: f"{name}.{part}" for part in parts if f"{name}.{part}" in node}
            found[name] = PackedWeight(kind, {"codes": name, **beside, "quant_state": key})
        elif key == "SCB" or key.endswith(".SCB"):
            name, layout = f"{key[:-3]}weight", f"{key[:-3]}weight_format"
            if isinstance(node.get(name), Tensor) and node[name].dtype == "int8":
                beside = {"weight_format": layout} if layout in node else {}
                found[name] = PackedWeight("int8", {"codes": name, "SCB": key, **beside})
    return found


def count_packed(tree: Any) -> Counter[str]:
    """The number of packed weights in a tree, by kind."""
    dicts = (node for _, node in nodes_in(tree, (dict,)))
    return Counter(packed.kind for node in dicts for packed in packed_in(node).values())


def is_packed(tree: Any, path: KeyPath) -> bool:
    """Whether a key path is that of a packed weight's codes."""
    node = leaf_at(tree, path[:-1]) if path else None
    return isinstance(node, dict) and path[-1] in packed_in(node)
