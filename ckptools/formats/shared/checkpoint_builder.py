"""The record of a checkpoint, put together from what a format finds while it opens one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.model.checkpoint import Checkpoint, Fact, GivenNames, ModuleOrder, RankFile, ReadCost
from ckptools.model.problems import Problem, worst_first
from ckptools.model.tensor import Rounded
from ckptools.model.tree import KeyPath
from ckptools.training_state.steps import by_majority

if TYPE_CHECKING:
    from ckptools.formats.shared.rank_checks import RankValues
    from ckptools.pickles.reader import Saved


class CheckpointBuilder:
    """What is found while a checkpoint is opened, and in the end the record of it.

    A format makes one before it reads anything, adds what it finds, and states what is its own in `checkpoint`.

    Attributes:
        format: name of the format.
        path: what was opened.
        problems: what is wrong, in the order in which it is found.
        names: dotted names that the files mention, each once.
        differing: key paths of values that may differ between the ranks, and do.
        per_rank: what each rank has at a key path.
        unequal: the same where all should have one value, or only some have any.
        files_read: files that were read in full.
        bytes_read: how much was read.
    """

    def __init__(self, format: str, path: Path) -> None:
        self.format, self.path = format, path
        self.problems: list[Problem] = []
        self.names: dict[str, None] = {}
        self.differing: list[KeyPath] = []
        self.per_rank: dict[KeyPath, Mapping[int, Any]] = {}
        self.unequal: dict[KeyPath, Mapping[int, Any]] = {}
        self.files_read = self.bytes_read = 0
        self._started = time.perf_counter()

    def add_read(self, files: int, nbytes: int, names: Iterable[str] = ()) -> None:
        """Count files that were read, their bytes that were, and the names that they mention."""
        self.files_read += files
        self.bytes_read += nbytes
        self.names |= dict.fromkeys(names)

    def add_saved(self, saved: Iterable[Saved]) -> None:
        """Count torch.save files that were read."""
        for one in saved:
            self.add_read(1, one.bytes_read, one.names)

    def add_rank_values(self, found: RankValues) -> None:
        """Note what ranks have for themselves, and what they should not."""
        self.problems += found.problems
        self.differing += found.differing
        self.per_rank |= found.per_rank
        self.unequal |= found.unequal

    def add(self, other: CheckpointBuilder) -> None:
        """Add everything that was found of another part, behind what was found here."""
        self.problems += other.problems
        self.differing += other.differing
        self.per_rank |= other.per_rank
        self.unequal |= other.unequal
        self.add_read(other.files_read, other.bytes_read, other.names)

    def checkpoint(
        self,
        *,
        name: str,
        saved_as: str,
        tree: Any,
        files: Iterable[RankFile],
        world_size: Fact,
        step: Fact,
        module_order: ModuleOrder,
        bytes_expected: int | None,
        all_ranks: bool = True,
        assumed_names: Iterable[str] = (),
        names_given: GivenNames | None = None,
        rounded: Iterable[Rounded] = (),
        in_parts: bool = False,
        text_keys: bool = False,
        stated_versions: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """The checkpoint, with what was found and what opening it cost; see `Checkpoint` for what is given."""
        return Checkpoint(
            path=self.path,
            name=name,
            format=self.format,
            saved_as=saved_as,
            tree=tree,
            files=tuple(files),
            world_size=world_size,
            step=by_majority(step, self.unequal),
            module_order=module_order,
            problems=worst_first(self.problems),
            names=tuple(self.names),
            all_ranks=all_ranks,
            differing=tuple(self.differing),
            per_rank=self.per_rank,
            unequal=self.unequal,
            bytes_expected=bytes_expected,
            cost=ReadCost(self.files_read, time.perf_counter() - self._started, self.bytes_read),
            assumed_names=frozenset(assumed_names),
            names_given=names_given,
            rounded=tuple(rounded),
            in_parts=in_parts,
            text_keys=text_keys,
            stated_versions=stated_versions or {},
        )


def in_form(saved_as: str, form: str) -> str:
    """Add to how something was saved what it is beside a zip archive."""
    return f"{saved_as} ({form})" if form else saved_as
