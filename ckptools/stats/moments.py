"""An optimizer's moments compared with the model: their size, and the resulting step.

The update is that of torch.optim.Adam and AdamW (`_single_tensor_adam`), without the learning rate and weight decay:
`exp_avg / (sqrt(exp_avg_sq) + eps)`, both moments first divided by `1 - beta**step` if step and betas are known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ckptools.errors import CkptoolsError, UsageError
from ckptools.keys.entries import ALL, Selection, tensor_entries
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.model.values import scalar
from ckptools.stats.figures import statistics
from ckptools.stats.passes import PassResult, Values, over_regions, shared_regions
from ckptools.stats.reading import MeasuredPart, by_parameter, located, readable, together
from ckptools.stats.record import Moments, Statistics, Stats, with_totals
from ckptools.tensor_io import read
from ckptools.tensor_io.threads import Progress
from ckptools.text import shape
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.sections import sections_of_kind

FIRST, SECOND, LARGEST = "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
"""Slots of Adam's moments; the last is the divisor of AMSGrad."""


class Pair(NamedTuple):
    """The moments of one parameter, and what else determines the size of its update; None for what is unknown.

    Attributes:
        second: the divisor; with AMSGrad the largest second moment so far.
        eps: added to the root of the second moment.
        corrections: divisors of the moments.
    """

    name: str
    optimizer: str
    first: Tensor | None
    second: Tensor | None
    lr: float | None
    eps: float | None
    step: float | None
    corrections: tuple[float, ...] | None

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(tensor.nbytes for tensor in (self.first, self.second) if tensor is not None)


def moments(
    ck: Checkpoint, pairs: Sequence[Pair], jobs: int | None = None, progress: Progress | None = None
) -> Statistics[Moments]:
    """Compare the moments of some parameters with the parameters; each row says what cannot be read.

    Every rank's structure of the checkpoint is read, and `pairs_of` found the pairs. `progress` is called with bytes
    read and the parameter they are of.
    """
    started = time.perf_counter()
    weights = statistics(ck.path, _weights(ck, {pair.name for pair in pairs}), False, jobs, progress)
    of_weight = {row.name: row for row in weights.rows}
    sides = [_sides(pair) for pair in pairs]
    regions = [shared_regions(tensors) if tensors else [] for tensors, _ in sides]
    names = [pair.name for pair in pairs]
    found = over_regions(regions, names, lambda n, _, bands: _sums_of(bands, pairs[n]), jobs, progress)
    rows = [
        _row(pair, problems, one, of_weight.get(pair.name))
        for pair, (_, problems), one in zip(pairs, sides, found, strict=True)
    ]
    nbytes = weights.bytes_read + sum(one.nbytes for one in found)
    elements = weights.elements + 2 * sum(row.elements for row in rows)
    nonfinite = weights.nonfinite + sum(row.nonfinite for row in rows)
    return with_totals(ck.path, "moments", rows, started, nbytes, elements, nonfinite)


def pairs_of(ck: Checkpoint, selection: Selection) -> list[Pair]:
    """The selected moments of a checkpoint with every rank's structure read; a section is that of an optimizer.

    Raises:
        UsageError: no optimizer has such moments, or no section of that name is one.
    """
    if selection.section not in ("", ALL, "optimizer", *(s.name for s in sections_of_kind(ck, "optimizer"))):
        raise UsageError(None, f"--moments shows optimizers: --section {selection.section} is none")
    found = [pair for pair in _all_pairs(ck) if selection.section in ("", ALL, "optimizer", pair.optimizer)]
    if not found:
        raise UsageError(ck.path, f"no optimizer in it has {FIRST} and {SECOND}; see --section optimizer")
    return [pair for pair in found if selection.takes(pair.name)]


def _all_pairs(ck: Checkpoint) -> Iterator[Pair]:
    sections = {section.path: section.name for section in sections_of_kind(ck, "optimizer")}
    for optimizer in optimizers_of(ck).values() if sections else ():
        groups = {name: group for group in optimizer.param_groups for name in group.names}
        for key, slots in optimizer.state.items():
            name = key if isinstance(key, str) else f"?{key}"
            if isinstance(slots, Mapping) and (FIRST in slots or SECOND in slots):
                yield _pair(name, sections[optimizer.path], slots, groups.get(name) or {})


def _pair(name: str, optimizer: str, slots: Mapping[Any, Any], group: Mapping[str, Any]) -> Pair:
    second = LARGEST if group.get("amsgrad") is True and LARGEST in slots else SECOND
    pair = [slots.get(slot) if isinstance(slots.get(slot), Tensor) else None for slot in (FIRST, second)]
    step, betas = _number(slots.get("step", group.get("step"))), group.get("betas")
    two = [_number(beta) for beta in betas] if isinstance(betas, (list, tuple)) and len(betas) == 2 else []
    corrections = tuple(1 - beta**step for beta in two if beta is not None) if step else ()
    known = corrections if len(corrections) == 2 and all(corrections) else None
    return Pair(name, optimizer, pair[0], pair[1], _number(group.get("lr")), _number(group.get("eps")), step, known)


def _number(value: Any) -> float | None:
    """A finite number, also from a tensor; None for other values, or if it cannot be read."""
    value = scalar(value)
    if isinstance(value, Tensor):
        try:
            value = read.to_numpy(value).reshape(-1)[0].item() if value.numel == 1 else None
        except CkptoolsError:
            return None
    plain = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if plain else None


def _weights(ck: Checkpoint, names: set[str]) -> list[MeasuredPart]:
    """The model's tensors with given names, without names that several models have."""
    found = by_parameter(e for e in tensor_entries(ck) if e.kind == "model" and e.parameter in names)
    return [MeasuredPart(name, entry.section, entry.value) for name, entry in found.items()]


def _sides(pair: Pair) -> tuple[list[Tensor], list[tuple[str, str]]]:
    """Both moments with their shards located, if they can be read together, and their problems."""
    if pair.first is None or pair.second is None:
        return [], [("optimizer", f"has no {FIRST if pair.first is None else SECOND} for it")]
    if pair.first.shape != pair.second.shape:
        return [], [("shapes", f"{FIRST} is {shape(pair.first.shape)}, {SECOND} {shape(pair.second.shape)}")]
    parts = [MeasuredPart(slot, "", tensor) for slot, tensor in ((FIRST, pair.first), (SECOND, pair.second))]
    found = [readable(part) for part in parts]
    problems = [(part.name, one.problem) for part, one in zip(parts, found, strict=True)]
    can = all(one.sources or not part.numel for one, part in zip(found, parts, strict=True))
    return [located(part.tensor) for part in parts] if can else [], problems


def _sums_of(bands: Iterable[tuple[Box, list[Values]]], pair: Pair) -> UpdateSums:
    """Sum a parameter's moments and the resulting update, band after band of both moments."""
    sums = np.zeros(len(UpdateSums._fields))
    for _, values in bands:
        first, second = (one.astype("f8").reshape(-1) for one in values)
        finite = np.isfinite(first) & np.isfinite(second)
        negative = finite & (second < 0)
        usable = finite & ~negative
        first, second = first[usable], second[usable]
        update = _update(first, second, pair)
        sums += UpdateSums(
            len(finite), len(first), float(first @ first), float(second.sum()), len(update), float(update @ update),
            int(negative.sum()), int((~finite).sum()),
        )  # fmt: skip
    return UpdateSums(*sums.tolist())


def _update(first: Values, second: Values, pair: Pair) -> Values:
    """The finite updates; none if eps is unknown."""
    if pair.eps is None:
        return np.empty(0)
    one, two = pair.corrections or (1.0, 1.0)
    with np.errstate(all="ignore"):
        found: Values = (first / one) / (np.sqrt(second / two) + pair.eps)
    return found[np.isfinite(found)]


class UpdateSums(NamedTuple):
    """Sums over the elements of both moments, and numbers of elements.

    Attributes:
        usable: elements that are finite in both, with a second moment of at least 0; the sums are over them.
        first: sum of the squares of the first moment; `update` is that of the update.
        updated: elements with a finite update.
        nonfinite: elements that are not finite in one of both.
    """

    elements: float = 0
    usable: float = 0
    first: float = 0
    second: float = 0
    updated: float = 0
    update: float = 0
    negative: float = 0
    nonfinite: float = 0


def _row(
    pair: Pair, problems: Sequence[tuple[str, str]], found: PassResult[UpdateSums], weight: Stats | None
) -> Moments:
    sums = UpdateSums(*map(math.fsum, zip(*found.results, strict=True))) if found.results else UpdateSums()
    tensor = pair.second if pair.first is None else pair.first
    assert tensor is not None
    update = _rms(sums.update, sums.updated)
    size = weight.rms if weight else None
    ratio = update * pair.lr / size if update is not None and pair.lr is not None and size else None
    return Moments(
        pair.name,
        pair.optimizer,
        tensor.shape,
        tensor.numel,
        int(sums.elements),
        size,
        _rms(sums.first, sums.usable),
        _rms(sums.second, sums.usable),
        update,
        ratio,
        pair.lr,
        pair.eps,
        pair.step,
        pair.corrections is not None,
        int(sums.negative),
        int(sums.nonfinite),
        together([("parameter", weight.problem if weight else ""), *problems, ("moments", found.problem)]),
    )


def _rms(total: float, count: float) -> float | None:
    return math.sqrt(total / count) if count else None
