"""Names of a Megatron model as a whole, from the names that each pipeline stage gives its part.

Each stage numbers its layers from 0, in each of its chunks when the pipeline is interleaved (`model0`, `model1`, …).
Layers follow each other chunk by chunk, and within a chunk stage by stage, however many each has: even and uneven
pipelines, `pipeline_model_parallel_layout`, embedding and loss counted as layers or stages of their own. So the number
of a stage's first layer is the number of layers before it, which the files themselves tell. Source:
megatron/core/transformer/transformer_layer.py (`get_transformer_layer_offset`); arguments.py for older versions.

Old versions (`megatron/model`, up to v3.0 and core 0.5) nest the model's state dict (`language_model`, `encoder`);
its keys are joined with dots here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from ckptools.model.checkpoint import ModuleOrder
from ckptools.training_state.module_order import CONFIRMED, order_of

Chunk = Mapping[str, Any]
"""Part of the model on one rank: value by name as that rank has it."""

Place = tuple[int, int]
"""`(chunk, stage)`: the order of layers is the order of these."""

LAYER = re.compile(r"(?P<block>(?:.*?\.)?layers)\.(?P<index>\d{1,6})\.(?P<rest>.+)", re.DOTALL)
CHUNK = re.compile(r"model(\d{1,4})")


def chunks_of(tree: Mapping[Any, Any]) -> list[Chunk]:
    """The model in one file: one chunk under `model`, or several under `model0`, `model1` and so on."""
    if isinstance(tree.get("model"), dict):
        return [dict(_flat(tree["model"], ""))]
    numbers = {int(m[1]): k for k in tree if isinstance(k, str) and (m := CHUNK.fullmatch(k))}
    ordered = sorted(numbers) == list(range(len(numbers)))
    return [dict(_flat(tree[numbers[i]], "")) for i in sorted(numbers)] if ordered else []


def _flat(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Depth is bounded by the reader's budget."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def module_order_in(tree: Mapping[Any, Any]) -> ModuleOrder:
    """Whether the model in one file has the order of its modules, chunk by chunk.

    Older versions put the state dicts of embedding, encoder and output layer into dicts by hand, in that order.
    """
    parts = [tree["model"]] if isinstance(tree.get("model"), dict) else [tree[k] for k in tree if is_chunk(k)]
    orders = [order_of(dict(_flat(part, "")), dict(_modules(part, ""))) for part in parts if isinstance(part, dict)]
    return next((order for order in orders if not order.kept), CONFIRMED)


def _modules(node: Any, prefix: str) -> Iterator[tuple[str, None]]:
    """Every module that the state dicts in a part of the model list."""
    listed = getattr(node, "_metadata", None)
    for module in listed if isinstance(listed, dict) else ():
        yield f"{prefix}{module}".removesuffix("."), None
    for key, value in node.items() if listed is None else ():
        if isinstance(value, dict):
            yield from _modules(value, f"{prefix}{key}.")


def is_chunk(key: Any) -> bool:
    """Whether a key of a file holds (a part of) the model."""
    return isinstance(key, str) and (key == "model" or CHUNK.fullmatch(key) is not None)


class Layers:
    """Numbers the layers of the whole model, counted over the pipeline stages.

    Args:
        chunks: the part of the model at each place that was read.
        stages: number of pipeline stages.
        number: number of layers of the whole model where something tells it.

    Attributes:
        counts: layers per block, such as `decoder.layers`, and place.
        complete: whether the files here tell of every place.
    """

    def __init__(self, chunks: Mapping[Place, Chunk], stages: int, number: int | None) -> None:
        self.virtual, self.stages = 1 + max((chunk for chunk, _ in chunks), default=0), stages
        self.complete = len(chunks) == self.virtual * stages
        found = {place: _indices(names) for place, names in chunks.items()}
        blocks = dict.fromkeys(b for place in found.values() for b in place)
        self.counts = {b: {place: found[place].get(b, set()) for place in found} for b in blocks}
        self.starts = {b: dict(self._starts(self.counts[b], number)) for b in blocks}

    def _starts(self, counts: Mapping[Place, set[int]], number: int | None) -> Iterator[tuple[Place, int]]:
        """The first number at each place; none from where on it cannot be told."""
        even = {len(indices) for indices in counts.values()}
        (each,) = even if len(even) == 1 else (None,)
        even_everywhere = each is not None and number == each * self.virtual * self.stages
        start = 0
        for place in product(range(self.virtual), range(self.stages)):
            if counts.get(place, set()) != set(range(len(counts.get(place, ())))):
                return
            yield place, start
            if place in counts:
                start += len(counts[place])
            elif even_everywhere and each is not None:
                start += each
            else:
                return

    def total(self, block: str) -> int:
        """Number of layers that the files hold of a block."""
        return sum(map(len, self.counts[block].values()))

    def name(self, name: str, place: Place) -> tuple[str, str]:
        """The name in the whole model, and why its layer's number cannot be told, or nothing."""
        found = LAYER.fullmatch(name)
        if found is None:
            return name, ""
        block, index, rest = found["block"], int(found["index"]), found["rest"]
        start = self.starts[block].get(place)
        if start is not None:
            return f"{block}.{start + index}.{rest}", ""
        why = f"the layers before pipeline stage {place[1]} cannot be counted, so this one's number is not known"
        return f"{block}.?{index} of stage {place[1]}.{rest}", why


def _indices(names: Chunk) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for name in names:
        layer = LAYER.fullmatch(name)
        if layer:
            found.setdefault(layer["block"], set()).add(int(layer["index"]))
    return found
