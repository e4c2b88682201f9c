"""The check of replicas: copies that several ranks hold of one thing are equal, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator

from ckptools.files.opening import OpenFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import fqn_of
from ckptools.tensor_io.fetch_ahead import copies_of, fetched_runs
from ckptools.tensor_io.replicas import differing_boxes
from ckptools.text import few
from ckptools.training_state.rank_own import Shared
from ckptools.training_state.rank_values import RankValues
from ckptools.training_state.sections import sections_of, tensors_of

MAX_NAMED = 5


def replicated(ck: Checkpoint) -> list[tuple[str, Tensor]]:
    """Tensors that ranks should share, and of which several hold the same region, with their names."""
    found, shared = [], Shared(sections_of(ck))
    for path, tensor in tensors_of(sections_of(ck)):
        if len({s.box for s in tensor.found}) < len(tensor.found) and shared.holds(path):
            found.append((fqn_of(path), tensor))
    return found


def fetch_copies(ck: Checkpoint) -> None:
    """Fetch from a store what comparing the copies of tensors reads, of as many as fit at once."""
    next(fetched_runs((tensor for _, tensor in tensors_of(sections_of(ck))), copies_of))


def own(ck: Checkpoint, files: OpenFiles) -> str:
    """The line that names what each rank has for itself, and differs in; empty where there is nothing.

    Raises:
        ReadError: a file cannot be read.
    """
    names = [fqn_of(path) for path in RankValues(ck, files).own()]
    return f"each rank has its own: {few(names, MAX_NAMED)}" if names else ""


def unequal(fqn: str, tensor: Tensor, files: OpenFiles) -> Iterator[Problem]:
    """The first region of a tensor whose copies differ.

    Raises:
        ReadError: a file cannot be read.
    """
    for found in list(differing_boxes(tensor.found, files).values())[:1]:
        yield Problem(Code.COPIES_DIFFER, found.text(files), found.rank, fqn, ranks=found.odd)
