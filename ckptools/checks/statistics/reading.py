"""Which bytes are read for figures of a tensor: each region once, whichever ranks hold replicas of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ckptools.dtypes import ITEMSIZE, NO_NUMBERS, short
from ckptools.errors import ReadError, original_of
from ckptools.model.problems import Code
from ckptools.model.regions import Box
from ckptools.model.tensor import Shard, Source, Tensor
from ckptools.tensor_io.coverage import cover_problem
from ckptools.tensor_io.dcp_items import with_source


class Part(NamedTuple):
    """What figures are taken of: a tensor, or one rank's part of it.

    Attributes:
        name: of the tensor.
        section: of the checkpoint that it is in.
        tensor: the tensor; of a rank's part it has that rank's shards alone.
        rank: None for all of it.
    """

    name: str
    section: str
    tensor: Tensor
    rank: int | None = None

    @property
    def numel(self) -> int:
        """Elements that there should be."""
        return self.tensor.numel if self.rank is None else sum(s.box.numel for s in self.tensor.shards)

    @property
    def nbytes(self) -> int:
        """Bytes of them."""
        return self.numel * ITEMSIZE[self.tensor.dtype]


def of_rank(whole: Part, rank: int, shards: Iterable[Shard]) -> Part:
    """The part of a tensor that a rank holds in some shards."""
    return whole._replace(tensor=replace(whole.tensor, shards=tuple(shards)), rank=rank)


class Readable(NamedTuple):
    """What can be read of a part.

    Attributes:
        sources: where, each region once.
        numel: elements that there should be.
        problem: why that is nothing, or not all of it; empty where it is all.
    """

    sources: tuple[Source, ...]
    numel: int
    problem: str = ""


def readable(part: Part) -> Readable:
    """Find where the elements of a part lie, and what is in the way."""
    tensor = part.tensor
    shards, numel = _one_per_box(tensor.shards), part.numel
    reason = no_numbers(tensor) or (tensor.note if part.rank is None or tensor.encoded_as else "")
    if reason:
        return Readable((), numel, reason)
    try:
        shards = [with_source(shard) for shard in shards]
    except ReadError as error:
        return Readable((), numel, said(error))
    found = tuple(shard.source for shard in shards if shard.source is not None)
    if part.rank is not None:
        return Readable(found, numel, "" if len(found) == len(shards) else "no file here holds it")
    wrong = cover_problem(replace(tensor, shards=tuple(shards)), part.name)
    if wrong is None:
        return Readable(found, numel)
    return Readable(found if wrong.kind is Code.TENSOR_GAP else (), numel, wrong.message)


def located(tensor: Tensor) -> Tensor:
    """The tensor with a source for every shard whose bytes are here.

    Raises:
        ReadError: an item is damaged.
    """
    return replace(tensor, shards=tuple(map(with_source, tensor.shards)))


def no_numbers(tensor: Tensor) -> str:
    """Why the bytes of a tensor are no numbers, if they are none."""
    if tensor.kind == "meta":
        return "was saved without values (meta)"
    return f"{short(tensor.dtype)} is not decoded" if tensor.dtype in NO_NUMBERS else ""


def _one_per_box(shards: Iterable[Shard]) -> list[Shard]:
    """A shard for each region, one whose bytes are here if there is one."""
    found: dict[Box, Shard] = {}
    for shard in shards:
        known = found.setdefault(shard.box, shard)
        if not known.is_here:
            found[shard.box] = shard
    return list(found.values())


def together(problems: Iterable[tuple[str, str]]) -> str:
    """What is wrong with several things, each with its name; what several have in common is said once."""
    names: dict[str, list[str]] = {}
    for name, problem in problems:
        if problem:
            names.setdefault(problem, []).append(name)
    return "; ".join(f"{', '.join(own)}: {problem}" for problem, own in names.items())


def said(error: ReadError) -> str:
    """An error in the words of a row: the file's name without its folder, and what is wrong."""
    return f"{original_of(error.path).name}: {error.reason}" if error.path else error.reason
