"""Reading the files of a tag folder: which ones, what became of each, and whether two are copies of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.formats.deepspeed.names import StateName
from ckptools.formats.deepspeed.states import ModelStates, OptimStates
from ckptools.formats.options import Options
from ckptools.formats.shared.copied_files import MIN_TELLING, is_constant, stated_checksum
from ckptools.formats.shared.file_status import Fault, looked_at, was_read
from ckptools.model.checkpoint import ModuleOrder, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import tensors_in
from ckptools.pickles.reader import Saved

GROUPED = ModuleOrder(False, "DeepSpeed lists parameters by group, which round robin may have reordered")
"""Its files name what is in the flat groups (`param_shapes`), so no order is needed."""


@dataclass
class Files:
    """The files of a tag folder.

    Attributes:
        folder: the tag folder.
        names: all of them.
        options: how they are opened.
        must: the file that a caller named; an error in it is the caller's.
        saved: those that were read.
        faults: what is wrong with those that could not be.
    """

    folder: Path
    names: list[StateName]
    options: Options
    must: Path
    saved: dict[Path, Saved] = field(default_factory=dict)
    faults: dict[Path, Fault] = field(default_factory=dict)

    def read(self, names: Iterable[StateName]) -> None:
        """Read files; what is wrong with one that cannot be read is kept.

        Raises:
            ReadError: the file that the caller named cannot be read.
        """
        for name in names:
            if name.path in self.saved or name.path in self.faults:
                continue
            try:
                self.saved[name.path] = self.options.read_file(name.path)
            except ReadError as error:
                if name.path == self.must:
                    raise
                self.faults[name.path] = Fault.of(error, name.path)

    def read_one_of_each(self, part: str) -> None:
        """Read the first readable file of each model-parallel rank; the others of its ZeRO group are like it."""
        by_rank: dict[int | None, list[StateName]] = {}
        for name in self.of(part):
            by_rank.setdefault(name.mp, []).append(name)
        for names in by_rank.values():
            for name in names:
                self.read([name])
                if name.path in self.saved:
                    break

    def of(self, part: str) -> list[StateName]:
        """The files of one part."""
        return [n for n in self.names if n.part == part]

    def tree(self, name: StateName) -> dict[Any, Any] | None:
        """The dict that a file holds; None when it was not read.

        Raises:
            ReadError: it is no dict.
        """
        if name.path not in self.saved:
            return None
        tree = self.saved[name.path].tree
        if not isinstance(tree, dict):
            raise ReadError(name.path, f"holds a {type(tree).__name__}, expected the dict that DeepSpeed saves")
        return tree

    def models(self) -> dict[tuple[int, int], ModelStates]:
        """The model states that were read, by `(mp, dp)`."""
        trees = ((n, self.tree(n)) for n in self.of("model"))
        read = [ModelStates(n.path, n.mp or 0, n.dp or 0, tree) for n, tree in trees if tree is not None]
        return {(m.mp, m.dp): m for m in reversed(read)}

    def optims(self) -> dict[tuple[int, int], OptimStates]:
        """The optimizer states that were read, by `(mp, dp)`.

        Raises:
            ReadError: one is no optimizer states file.
        """
        found = {}
        for name in reversed(self.of("optim")):
            tree = self.tree(name)
            state = tree.get("optimizer_state_dict") if tree is not None else None
            if tree is not None and not isinstance(state, dict):
                raise ReadError(name.path, "has no optimizer_state_dict; not written by ZeRO, or damaged")
            if isinstance(state, dict):
                found[name.mp or 0, name.dp or 0] = OptimStates(name.path, name.mp or 0, name.dp or 0, state)
        return dict(sorted(found.items()))

    def status(self, path: Path, rank: int | None, part: str) -> RankFile:
        """What became of a file that is there; one that was not read is looked at from its end."""
        if path in self.saved:
            return was_read(self.saved[path], rank, part)
        return looked_at(path, rank, part, self.faults, len(self.names))


def check_copied_ranks(
    optims: Mapping[tuple[int, int], OptimStates],
    held: Mapping[tuple[int, int], int],
    rank_of: Callable[[int, int], int],
) -> Iterator[Problem]:
    """Optimizer states of one rank under the names of two, told by equal checksums throughout.

    ZeRO-3 files do not say whose they are. A few elements may be equal by chance, padding is, and state that is all
    zeros proves nothing: nobody has trained.

    Args:
        optims: what was read, by `(mp, dp)`.
        held: elements of parameters that each of them holds.
        rank_of: the global rank.
    """
    seen: dict[tuple[Any, ...], tuple[int, int]] = {}
    for place, optim in sorted(optims.items()):
        sums = [stated_checksum(t) for _, t in tensors_in([optim.masters, optim.slots])]
        stated = tuple(s for s in sums if s is not None)
        trained = any(
            nbytes > 8 and not is_constant(dtype, crc, nbytes) for dtype, crc, nbytes in stated[len(optim.masters) :]
        )
        if len(stated) < len(sums) or held.get(place, 0) < MIN_TELLING or not trained:
            continue
        twin = seen.setdefault((place[0], *stated), place)
        if twin != place:
            text = f"{optim.path.name} holds the same bytes as {optims[twin].path.name}; the same rank twice"
            yield Problem(Code.STRAY_FILE, text, rank_of(*place))
