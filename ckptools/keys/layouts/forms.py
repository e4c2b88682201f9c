"""How one stored tensor is made of the weights that an architecture has: the parts.

A part is a weight as `nn.Linear` has it: rows are outputs. Each form divides a stored tensor into its parts, and puts
parts together into one; the two are inverse to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptools.model.tensor import Tensor
from ckptools.tensor_io.rearranged import RowBlock, joined_rows, split_rows, stacked, transposed, unstacked


class Sizes(NamedTuple):
    """Numbers of a model that its config states; 0 for those that it does not have.

    Attributes:
        heads: attention heads (queries).
        groups: heads of keys and values; `heads` without grouped queries.
        experts: routed experts of a layer.
    """

    heads: int
    groups: int
    experts: int


class UnfitError(ValueError):
    """A tensor does not have the shape that its form asks for."""


Blocks = Callable[[int, Sizes], list[RowBlock]]
"""The blocks of rows of a stored matrix, by its number of rows."""


@dataclass(frozen=True)
class Form:
    """A form of stored tensors.

    Attributes:
        words: what is done to get its parts.
        blocks: which rows belong to which part; None where it has one part, with the same rows.
        turned: whether matrices are stored as [inputs, outputs].
        experts: whether dim 0 counts experts, each of which is divided for itself; parts come expert by expert.
    """

    words: str = ""
    blocks: Blocks | None = None
    turned: bool = False
    experts: bool = False

    def split(self, tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        """Divide a stored tensor into its parts.

        Raises:
            UnfitError: its shape does not allow it.
        """
        if self.experts and (len(tensor.shape) < 2 or tensor.shape[0] != sizes.experts):
            raise UnfitError(f"{list(tensor.shape)} is not a tensor of {sizes.experts} experts")
        found: list[Tensor] = []
        for one in unstacked(tensor) if self.experts else [tensor]:
            whole = transposed(one) if self.turned else one
            found += [whole] if self.blocks is None else split_rows(whole, self.blocks(whole.shape[0], sizes))
        return found

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Put parts together into a stored tensor.

        Raises:
            UnfitError: their shapes do not allow it.
        """
        count = sizes.experts if self.experts else 1
        each = len(parts) // max(count, 1)
        whole = [self._joined(parts[n * each : (n + 1) * each], sizes) for n in range(count)]
        return stacked(whole) if self.experts else whole[0]

    def _joined(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        if self.blocks is None:
            whole = parts[0]
        else:
            _check_alike(parts)
            blocks = self.blocks(sum(part.shape[0] for part in parts), sizes)
            for number, part in enumerate(parts):
                if sum(b.rows for b in blocks if b.part == number) != part.shape[0]:
                    raise UnfitError(f"a part has {part.shape[0]} rows, which is not what {sizes.heads} heads make")
            whole = joined_rows(parts, blocks)
        return transposed(whole) if self.turned else whole


def _check_alike(parts: Sequence[Tensor]) -> None:
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        shapes = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
        raise UnfitError(f"{shapes}: parts of different widths or dtypes cannot be joined")


def _cut(rows: int, by: int, what: str) -> int:
    if not by or rows % by:
        raise UnfitError(f"{rows} rows cannot be divided into {by} {what}")
    return rows // by


def _in_order(counts: Sequence[int]) -> list[RowBlock]:
    starts = [sum(counts[:n]) for n in range(len(counts))]
    return [RowBlock(start, count, n, 0) for n, (start, count) in enumerate(zip(starts, counts, strict=True))]


def _halves(rows: int, _: Sizes) -> list[RowBlock]:
    return _in_order([_cut(rows, 2, "halves")] * 2)


def _queries_keys_values(rows: int, sizes: Sizes) -> list[RowBlock]:
    head = _cut(rows, sizes.heads + 2 * sizes.groups, "heads of queries, keys and values")
    return _in_order([sizes.heads * head, sizes.groups * head, sizes.groups * head])


def _grouped(rows: int, sizes: Sizes) -> list[RowBlock]:
    head = _cut(rows, sizes.heads + 2 * sizes.groups, "heads of queries, keys and values")
    queries = _cut(sizes.heads, sizes.groups, "query groups") * head
    found = []
    for group in range(sizes.groups):
        at = group * (queries + 2 * head)
        found.append(RowBlock(at, queries, 0, group * queries))
        found += [RowBlock(at + queries + n * head, head, n + 1, group * head) for n in range(2)]
    return found


def _pairs(heads: int, rows: int) -> list[RowBlock]:
    head = _cut(rows, heads, "heads")
    half = _cut(head, 2, "halves of a head")
    return [RowBlock(h * head + j, half, 0, h * head + j * half, 2) for h in range(heads) for j in range(2)]


PLAIN = Form()
TURNED = Form("transposed: stored as [inputs, outputs]", turned=True)
FUSED_QKV = Form("q, k and v one behind the other", _queries_keys_values)
TURNED_QKV = Form("q, k and v one behind the other, transposed", _queries_keys_values, turned=True)
GROUPED_QKV = Form("for each query group the rows of its queries, its key and its value", _grouped)
GATE_UP = Form("gate and up one behind the other", _halves)
EXPERTS = Form("one tensor of all experts", experts=True)
EXPERTS_GATE_UP = Form("one tensor of all experts, gate and up one behind the other", _halves, experts=True)
PAIRED_QUERIES = Form("rows of each head from pairs into halves (rotary)", lambda rows, s: _pairs(s.heads, rows))
PAIRED_KEYS = Form("rows of each head from pairs into halves (rotary)", lambda rows, s: _pairs(s.groups, rows))
