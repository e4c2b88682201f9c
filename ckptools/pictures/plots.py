"""Pictures of checkpoints, differences and runs for users: `ck.plot.ranks()`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ckptools.contents.show import entries_at, shard_rows
from ckptools.diff.record import Difference
from ckptools.errors import UsageError
from ckptools.keys.entries import tensor_entries
from ckptools.ls.record import RunFolder
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Problem
from ckptools.model.tensor import Tensor
from ckptools.pictures.heat_map import change_cells, heat_map, moment_cells, rms_cells
from ckptools.pictures.rank_map import bytes_by_section, rank_map
from ckptools.pictures.run_steps import run_steps
from ckptools.pictures.tensor_layout import tensor_layout
from ckptools.pictures.value_bars import norm_bars, value_histogram
from ckptools.stats.figures import tensor_stats
from ckptools.text import clip_middle, few, plural

if TYPE_CHECKING:
    from ckptools.display.drawing import Picture
    from ckptools.keys.entries import Entry
    from ckptools.tensor_io.fetch_ahead import Progress

Figure = Literal["rms", "update", "ratio"]
FIGURES: Mapping[Figure, str] = {
    "rms": "rms of weights",
    "update": "rms of Adam's next update",
    "ratio": "lr * update / weight",
}


class CheckpointPlots:
    """Pictures of a checkpoint. Each displays itself in a notebook, has `.text`, and `.save("x.svg")`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def ranks(self, problems: Iterable[Problem] | None = None) -> Picture:
        """Draw a cell for each rank: whole, missing, cut, odd one out, of another step. Reads nothing more.

        Args:
            problems: problems to draw, such as `ck.verify().problems`, which come from reading every file; None for the
                problems found when the checkpoint was opened.
        """
        return rank_map(self._checkpoint, problems)

    def layout(self, key: str) -> Picture:
        """Draw which rank holds which part of a tensor, to scale, with every copy; holes are dashed outlines.

        Raises:
            UsageError: no tensor has this name, as listed by `ck.records()`.
        """
        entry = self._tensor(key)
        return tensor_layout(entry.value, entry.name, shard_rows(entry.value))

    def bytes(self) -> Picture:
        """Draw the bytes of each section by dtype, of global tensors."""
        return bytes_by_section(self._read if self._checkpoint.in_parts else self._checkpoint)

    def heat(
        self,
        figure: Figure = "rms",
        *,
        absolute: bool = False,
        filter: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        jobs: int | None = None,
        progress: Progress | None = None,
    ) -> Picture:
        """Draw a value of every tensor as a colour, layers across and their tensors down. Reads the values.

        `figure` is `rms` of the weights; `update`, the size of Adam's next step for each parameter, without lr; or
        `ratio`, that step relative to the parameter: lr * update / weight. Colours are relative to the median of each
        row, or with `absolute` on one scale for all. The other arguments are those of `Checkpoint.stats`.

        Raises:
            UsageError: there is no such figure, or no optimizer has such moments.
        """
        if figure not in FIGURES:
            raise UsageError(None, f"{figure!r} is no figure of a heat map; there are {', '.join(FIGURES)}")
        asked: dict[str, Any] = {"filter": filter, "exclude": exclude, "jobs": jobs, "progress": progress}
        if figure == "rms":
            cells = rms_cells(self._checkpoint.stats(**asked))
        else:
            cells = moment_cells(self._checkpoint.moments(**asked), figure)
        return heat_map(f"{FIGURES[figure]} of {self._checkpoint.name}", cells, absolute)

    def histogram(self, key: str) -> Picture:
        """Draw the distribution of a tensor's values from the smallest to the largest. Reads them twice.

        Raises:
            UsageError: no tensor has this name, as listed by `ck.records()`.
        """
        entry = self._tensor(key)
        return value_histogram(tensor_stats(entry.value, entry.name, histogram=True))

    def norms(
        self,
        *,
        filter: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        section: str | None = None,
        jobs: int | None = None,
        progress: Progress | None = None,
    ) -> Picture:
        """Draw the largest and the smallest l2 norms of tensors, by name. Reads the values.

        The arguments are those of `Checkpoint.stats`.

        Raises:
            UsageError: the selected section does not exist.
        """
        found = self._checkpoint.stats(filter=filter, exclude=exclude, section=section, jobs=jobs, progress=progress)
        return norm_bars(f"l2 norms of tensors of {self._checkpoint.name}", found)

    @property
    def _read(self) -> Checkpoint:
        return self._checkpoint.with_all_ranks()

    def _tensor(self, key: str) -> Entry:
        entries = tensor_entries(self._read)
        found = next((entry for entry in entries if entry.name == key), None)
        if found is not None:
            return found
        meant = [entry for entry in entries_at(self._read, key) if isinstance(entry.value, Tensor)]
        if len(meant) == 1:
            return meant[0]
        names = [clip_middle(entry.name, 80) for entry in meant]
        meaning = f"{key!r} means {plural(len(names), 'tensor')}: {few(names)}" if names else f"{key!r} is no tensor"
        raise UsageError(self._read.path, f"{meaning}; name one")

    def __repr__(self) -> str:
        return "<plots: ranks(), layout(key), bytes(), heat(figure), histogram(key), norms()>"


class DifferencePlots:
    """Pictures of the difference between two checkpoints."""

    def __init__(self, difference: Difference) -> None:
        self._difference = difference

    def heat(self) -> Picture:
        """Draw the change of each weight, relative to its norm, as a colour: layers across, their weights down.

        Raises:
            UsageError: values were not compared.
        """
        found = self._difference
        if not found.values_compared:
            raise UsageError(None, "values were not compared, so no change is known: diff(a, b, values=True)")
        names = (clip_middle(side.name, 60) for side in (found.a, found.b))
        return heat_map(f"change of weights from {' to '.join(names)}", change_cells(found), absolute=True)

    def __repr__(self) -> str:
        return "<plots: heat()>"


class RunPlots:
    """Pictures of a run."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def steps(self) -> Picture:
        """Draw learning rate by step, and step by time, of every checkpoint: a bad resume is a break in the line."""
        return run_steps(self._run)

    def __repr__(self) -> str:
        return "<plots: steps()>"
