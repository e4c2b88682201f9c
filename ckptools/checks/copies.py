"""Are copies that ranks hold of one thing equal, byte for byte?"""

from __future__ import annotations

from collections.abc import Iterator

from ckptools.checkpoint import Checkpoint
from ckptools.consolidate.replicas import differing_boxes
from ckptools.files import OpenFiles
from ckptools.model import Problem, Tensor, fqn_of, tensors_in


def replicated(ck: Checkpoint) -> list[tuple[str, Tensor]]:
    """Tensors of model and optimizers of which a region is held more than once."""
    found = []
    for section in ck.sections:
        for path, tensor in tensors_in(section.value) if section.kind in ("model", "optimizer") else ():
            if len({s.box for s in tensor.found}) < len(tensor.found):
                found.append((fqn_of((*section.path, *path)), tensor))
    return found


def unequal(fqn: str, tensor: Tensor, files: OpenFiles) -> Iterator[Problem]:
    """The first region of a tensor whose copies differ.

    Raises:
        ReadError: a file cannot be read.
    """
    for box, (first, other) in list(differing_boxes(tensor.found, files).items())[:1]:
        yield Problem("CK105", "error", f"{box}: other bytes than rank {first} has", other, fqn)
