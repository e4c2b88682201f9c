"""What is kept of a rank file that is like another; `patterns` finds out whether one is."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ckptools.model.tensor import Tensor
    from ckptools.pickles.classes.device_mesh import Mesh


class Own(NamedTuple):
    """What a file has for itself, of those that are like another.

    Attributes:
        values: by number the values in which its pickle differs.
        starts: byte offsets of its records, 8 bytes each, in the order of the pattern's.
        crcs: their CRC-32s, 4 bytes each.
        like: the number of the pattern among those of its checkpoint.
    """

    values: dict[int, Any]
    starts: bytearray
    crcs: bytearray
    like: int = 0


class Alike:
    """The content of a file that is like the first one: its tree is made when somebody looks at it.

    Attributes:
        pattern: the `patterns.Pattern` that it is like.
        path: the file.
        values: in which it differs, and the pattern's for other slots.
        starts: byte offsets of its records, in the order of the pattern's.
        crcs: their CRC-32s.
    """

    __slots__ = ("crcs", "own", "path", "pattern", "starts")

    def __init__(self, pattern: Any, path: Path, own: Own) -> None:
        self.pattern, self.path, self.own = pattern, path, own
        self.starts, self.crcs = array("Q", own.starts), array("I", own.crcs)

    @property
    def values(self) -> Mapping[int, Any]:
        """What is in each slot."""
        return {**self.pattern.machine.values, **self.own.values}

    @property
    def meshes(self) -> dict[int, Mesh]:
        """Its meshes, by their keys in `CutKind`."""
        meshes: dict[int, Mesh] = self.pattern.meshes_of(self.values)
        return meshes

    def tree(self) -> Any:
        """Its tree, made anew."""
        return self.at(self.pattern.tree)

    def at(self, node: Any) -> Any:
        """What it has where the pattern's tree has a node."""
        from ckptools.pickles.slot_trees import remade

        values, meshes = self.values, self.meshes

        def own(tensor: Tensor) -> Tensor:
            placed: Tensor = self.pattern.placed(tensor, self, meshes)
            return placed

        return remade(node, own, values)
