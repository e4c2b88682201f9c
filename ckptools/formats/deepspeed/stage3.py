"""ZeRO stage 3: every parameter is cut into W equal pieces, and a rank's pieces lie behind each other.

A piece has ceil(numel / W) elements; the last ones of a parameter are padding. A rank's pieces fill its sub-groups in
the order of `param_shapes`, which counts sub-groups too. Their borders need not be those of the parameters: a piece
may straddle two. Frozen parameters are cut alike, one tensor each, in `frozen_param_fragments` of the model files.
Source: runtime/zero/stage3.py (`_rigid_state_dict`), partition_parameters.py, utils/zero_to_fp32.py, versions 0.8 to
0.19.8; checked on real files of 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod

from ckptools.formats.deepspeed.runs import Run
from ckptools.model.regions import Ints, chunk


def row_length(shapes: Mapping[str, Ints], world: int) -> int:
    """Elements that every rank holds of these parameters, padding included."""
    return sum(-(-prod(shape) // world) for shape in shapes.values())


def runs(mp: int, shapes: Mapping[str, Ints], world: int, groups: Sequence[int], ranks: Iterable[int]) -> Iterator[Run]:
    """The runs of every parameter that `ranks` hold.

    Args:
        mp: model-parallel rank that they belong to.
        shapes: the parameters in their order.
        world: ranks that each is cut over.
        groups: lengths of a rank's sub-groups, which together are as long as the row of pieces.
        ranks: whose pieces.
    """
    borders = [0, *accumulate(groups)]
    listed = list(ranks)
    group = row = 0
    for fqn, shape in shapes.items():
        size = -(-prod(shape) // world)
        while group + 1 < len(borders) - 1 and borders[group + 1] <= row:
            group += 1
        for rank in listed:
            start, length = chunk(prod(shape), world, rank)
            yield from _cut(Run(fqn, start, length, (mp, rank, group), row), borders, group)
        row += size


def _cut(run: Run, borders: Sequence[int], group: int) -> Iterator[Run]:
    """Cut a piece, placed in the row of all sub-groups, at their borders; one without elements stays one."""
    mp, rank, _ = run.where
    if not run.length:
        yield Run(run.fqn, run.start, 0, run.where, 0)
    done = 0
    while done < run.length:
        at = run.at + done
        while borders[group + 1] <= at:
            group += 1
        length = min(run.length - done, borders[group + 1] - at)
        yield Run(run.fqn, run.start + done, length, (mp, rank, group), at - borders[group])
        done += length
