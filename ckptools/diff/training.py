"""Judge whether two checkpoints look like two steps of one training: which weights moved, how far, and what is odd.

Everything is taken from the rows of the comparison; no file is read again. A weight counts as trained if an optimizer
has state for it: torch's optimizers make state at the first step of a parameter that has a gradient.
Source: torch/optim/adamw.py and torch/optim/sgd.py, `_init_group`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from math import prod
from statistics import median
from typing import NamedTuple

from ckptools.diff.record import SAME_STEP, TensorDifference, Training, ValueDifference, holds_integers
from ckptools.diff.sides import Contents, Identity, SideTensor, SideValue
from ckptools.diff.tensor_values import ANOTHER_DIGEST
from ckptools.dtypes import ITEMSIZE, short
from ckptools.model.records import grouped
from ckptools.text import few, plural, spans

MOST = 3
"""At most this many names in a sentence."""

UNRELATED = 0.1
"""Two matrices with a smaller cosine are unrelated, such as two random starts; steps of training keep it near 1."""

FEWEST_ELEMENTS = 1000
"""Fewest elements of a matrix whose cosine is judged: that of two random matrices is about 1/sqrt(elements), 0.03."""

RELATED = 0.5
"""If the median cosine of all matrices is larger, A and B are of one training, and unrelated ones stand out."""

LAYER = re.compile(r"(.*?)\b(\d{1,18})\b")
"""A name up to its first number, and that number: `layers.3` of `layers.3.up.weight`."""


class ComparedTensor(NamedTuple):
    """Both sides of a compared tensor, one of which may lack it, and its row."""

    a: SideTensor | None
    b: SideTensor | None
    row: TensorDifference

    @property
    def identity(self) -> Identity:
        """Its identity in A, or in B if A lacks it."""
        key = self.a or self.b
        assert key is not None
        return key.identity

    @property
    def moved(self) -> bool | None:
        """Whether any element differs; None if that was not compared."""
        row = self.row
        if row.shape_a != row.shape_b or row.dtype_a != row.dtype_b or row.verdict == "cannot be compared":
            return None
        if row.differing is not None:
            return row.differing > 0
        return False if row.verdict in ("same", "same checksum") else True if ANOTHER_DIGEST in row.detail else None


class OptimizerStep(NamedTuple):
    """The number of optimizer steps of a parameter in A and in B; the parameter is a fqn, or a number such as `?3`."""

    parameter: str
    a: float
    b: float


def training_of(
    a: Contents,
    b: Contents,
    tensors: Sequence[ComparedTensor],
    values: Iterable[tuple[SideValue | None, SideValue | None]],
    rates: Iterable[ValueDifference],
) -> Training | None:
    """Judge a comparison; None if no step, weight or key tells anything.

    Args:
        a: keys of A, compared or not: they tell which weights are trained.
        b: keys of B.
        tensors: tensors that were compared.
        values: plain values that were compared.
        rates: rows of the param groups.
    """
    before, after = a.facts.step, b.facts.step
    steps = after - before if before is not None and after is not None else None
    weights = [one for one in tensors if one.row.subject == "weights"]
    compared = [one for one in weights if one.moved is not None]
    moved = [one for one in compared if one.moved]
    measured = [one.row for one in moved if _is_measured(one.row)]
    counters = list(_optimizer_steps(values))
    largest = max(measured, key=lambda row: row.change or 0.0, default=None)
    judged = _Judged(a, b, steps, tensors, weights, compared, counters)
    if not (steps or moved or any(judged.other_model())):
        return None
    odd, unsure = tuple(judged.odd()), tuple(judged.unsure())
    return Training(
        steps=steps,
        looks_normal=False if odd else True if steps and moved and not unsure else None,
        weights=len(compared),
        moved=len(moved),
        measured=len(measured),
        median=median(row.change or 0.0 for row in measured) if measured else None,
        largest=largest.change if largest else None,
        largest_name=largest.name if largest else "",
        optimizer_steps=len(counters),
        optimizer_steps_moved=sum(one.a != one.b for one in counters),
        lr=tuple(dict.fromkeys((r.value_a, r.value_b) for r in rates if r.subject == "lr" and r.value_a and r.value_b)),
        odd=odd,
        unsure=unsure,
    )


def _is_measured(row: TensorDifference) -> bool:
    """Whether the measures of a row are of all its elements: shards with equal checksums are not read."""
    if row.shape_a is None or row.change is None or holds_integers(row) or row.nonfinite_a or row.nonfinite_b:
        return False
    return row.compared >= prod(row.shape_a)


def _optimizer_steps(values: Iterable[tuple[SideValue | None, SideValue | None]]) -> Iterator[OptimizerStep]:
    for a, b in values:
        if a is None or b is None or a.subject != "optimizer steps":
            continue
        for rank in a.contents.keys() & b.contents.keys():
            with suppress(ValueError):  # the text of an unreadable step is no number
                yield OptimizerStep(a.identity[2], float(a.contents[rank].text), float(b.contents[rank].text))


class _Judged:
    """States what speaks against a training, in words."""

    def __init__(
        self,
        a: Contents,
        b: Contents,
        steps: int | None,
        tensors: Sequence[ComparedTensor],
        weights: Sequence[ComparedTensor],
        compared: Sequence[ComparedTensor],
        counters: Sequence[OptimizerStep],
    ) -> None:
        self.a, self.b, self.steps, self.weights, self.counters = a, b, steps, weights, counters
        self.compared = compared
        self.moments = [one for one in tensors if one.row.subject == "moments"]
        self.trained = {
            identity[2]
            for side in (a, b)
            for identity in (*side.tensors, *side.values)
            if identity[0] == "optimizer" and len(identity) > 3 and not identity[2].startswith("?")
        }
        # A model may be saved twice, such as with its moving average, which moves less often.
        self.moved = {_parameter(one) for one in compared if one.moved}
        self.still = [one for one in compared if not one.moved and _parameter(one) in self.trained - self.moved]
        running = any(one.a != one.b for one in counters)
        self.stopped = {one.parameter for one in counters if running and one.a == one.b}

    def odd(self) -> Iterator[str]:
        """State what does not look like training."""
        yield from self.other_model()
        for side, contents in (("A", self.a), ("B", self.b)):
            yield from (f"{side}: {one}" for one in contents.damage[:1])
        yield from self._not_finite()
        if self.steps == 0 and self.moved:
            yield SAME_STEP
        if self.steps:
            yield from self._still()
            yield from self._still_moments()
            yield from self._counters()
        yield from self._unrelated()

    def unsure(self) -> Iterator[str]:
        """State what may be training or not."""
        unread = [one.row.name for one in self.weights if one.row.verdict == "cannot be compared"]
        if unread:
            yield f"{plural(len(unread), 'tensor')} cannot be compared: {few(unread, MOST)}"
        dtypes = Counter((one.row.dtype_a, one.row.dtype_b) for one in self.weights if one.a and one.b)
        for (left, right), count in dtypes.items():
            if left != right:
                yield f"{plural(count, 'tensor')} in another dtype: {short(str(left))} → {short(str(right))}"
        if not self.steps:
            return
        yield from self._pace()
        still = [one for one in self.compared if not one.moved and not holds_integers(one.row)]
        if still and not self.trained:
            yield f"{self._did_not_move(still)} (no optimizer state tells which are trained)"
        frozen = [one for one in self.still if _parameter(one) in self.stopped]
        if frozen:
            yield f"{self._did_not_move(frozen)}, and neither did their optimizer steps (frozen?)"
        rounded = [one for one in self.still if one not in frozen and _is_rounded(one)]
        if rounded:
            dtype = short(str(rounded[0].row.dtype_a))
            yield f"{self._did_not_move(rounded)} ({dtype} rounds small changes off?)"

    def other_model(self) -> Iterator[str]:
        """Compare names and shapes."""
        alone = [one for one in self.weights if one.row.verdict in ("only in A", "only in B")]
        reshaped = [one for one in self.weights if one.a and one.b and one.row.shape_a != one.row.shape_b]
        words = [f"{plural(len(alone), 'name')} {'is' if len(alone) == 1 else 'are'} in one only"] if alone else []
        words += [f"{plural(len(reshaped), 'tensor')} of another shape"] if reshaped else []
        if len(alone) == len(self.weights) and any(one.a for one in alone) and any(one.b for one in alone):
            words = ["no name is in both"]
        if words:
            yield f"another model: {', '.join(words)}"

    def _not_finite(self) -> Iterator[str]:
        """Name tensors with NaN or infinities in B; constants, such as a mask, may hold infinities."""
        found = [
            one
            for one in (*self.weights, *self.moments)
            if one.row.nonfinite_b and (one.moved or one.row.subject == "moments" or _parameter(one) in self.trained)
        ]
        if found:
            where = "A and B" if all(one.row.nonfinite_a for one in found) else "B"
            names = few([one.row.name for one in found], MOST)
            yield f"NaN or infinity in {where}: {plural(len(found), 'tensor')}: {names}"

    def _still(self) -> Iterator[str]:
        """Name the trained weights that did not move."""
        found = [one for one in self.still if _parameter(one) not in self.stopped and not _is_rounded(one)]
        if found:
            yield self._did_not_move(found)
        elif self.compared and not self.moved and not self.still:
            yield f"none of {plural(len(self.compared), 'tensor')} moved"

    def _did_not_move(self, found: Sequence[ComparedTensor]) -> str:
        trained = sum(_parameter(one) in self.trained for one in self.compared)
        of = f"{len(found)} of {trained} trained tensors" if trained else plural(len(found), "tensor")
        by = " (by their stated CRC-32)" if any(one.row.verdict == "same checksum" for one in found) else ""
        who = few(list(_layers([one.row.name for one in found], {one.row.name for one in self.compared})), MOST)
        return f"{of} did not move{by}: {who}"

    def _still_moments(self) -> Iterator[str]:
        known = [one.moved for one in self.moments if one.moved is not None]
        if known and not any(known):
            yield f"none of {plural(len(known), 'optimizer state')} moved"

    def _counters(self) -> Iterator[str]:
        """Compare how far the optimizer steps went with how far the step went."""
        steps = self.steps or 0
        ahead = [(one, (one.b - one.a) * (1 if steps > 0 else -1)) for one in self.counters]
        back = [one for one, by in ahead if by < 0]
        if back:
            words = Counter(f"{one.a:g} → {one.b:g}" for one in back)
            yield f"{len(back)} of {plural(len(ahead), 'optimizer step')} went the other way: {few(list(words), 2)}"
        elif ahead and not any(by for _, by in ahead):
            yield f"optimizer steps stand still at {few(list(dict.fromkeys(f'{one.a:g}' for one, _ in ahead)), 2)}"
        else:
            odd = [one.parameter for one, by in ahead if not by and one.parameter in self.moved]
            if odd:
                yield f"{plural(len(odd), 'tensor')} moved, but not their optimizer step: {few(odd, MOST)}"

    def _pace(self) -> Iterator[str]:
        """State if optimizer steps and the step went on by different numbers; a step may count a part of a batch."""
        pace = Counter((one.b - one.a, one.a, one.b) for one in self.counters)
        if not pace:
            return
        (by, a, b), _ = pace.most_common(1)[0]
        before, after = self.a.facts.step or 0, self.b.facts.step or 0
        if by not in (0, self.steps) and a * after != b * before:
            yield f"optimizer steps {a:g} → {b:g}"

    def _unrelated(self) -> Iterator[str]:
        """Name matrices that are as unlike as two random starts."""
        judged = [one.row for one in self.compared if one.moved and _is_judged(one.row)]
        unrelated = [row for row in judged if abs(row.cosine or 0.0) < UNRELATED]
        middle = median(abs(row.cosine or 0.0) for row in judged) if judged else 1.0
        if judged and middle < UNRELATED:
            yield f"values are unrelated (median cosine {middle:.2f}): another seed, or another run?"
        elif unrelated and middle > RELATED:
            names = few([row.name for row in unrelated], MOST)
            yield f"{plural(len(unrelated), 'tensor')} unrelated to A's: {names} (exchanged, or made anew?)"


def _parameter(one: ComparedTensor) -> str:
    return one.identity[2]


def _is_rounded(one: ComparedTensor) -> bool:
    """Whether the dtype of a tensor is so coarse that it may round steps off."""
    return ITEMSIZE.get(one.row.dtype_a or "", 4) < 4 and not holds_integers(one.row)


def _is_judged(row: TensorDifference) -> bool:
    """Whether the cosine of a tensor tells whether A and B are related; vectors such as norms all point one way."""
    sizes = row.shape_a or ()
    return row.cosine is not None and len(sizes) > 1 and prod(sizes) >= FEWEST_ELEMENTS and _is_measured(row)


def _layers(names: Sequence[str], every: Collection[str]) -> Iterator[str]:
    """Join names that are all names of their layer: `layers.{0..3}`."""
    found, there = (Counter(map(_layer, some)) for some in (names, every))
    whole = [layer for layer in found if layer is not None and found[layer] == there[layer] > 1]
    numbers = {above: [number for _, number in layers] for above, layers in grouped(whole, lambda one: one[0]).items()}
    for name in names:
        layer = _layer(name)
        if layer is None or found[layer] < there[layer] or there[layer] == 1:
            yield name
        elif some := numbers.pop(layer[0], None):  # else these layers were named with the first of them
            yield f"{layer[0]}{{{spans(some)}}}" if len(some) > 1 else f"{layer[0]}{some[0]}"


def _layer(name: str) -> tuple[str, int] | None:
    found = LAYER.match(name)
    return (found[1], int(found[2])) if found else None
