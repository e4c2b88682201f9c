"""Answers as users hold them: the records that checks return, with pictures."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ckptools.model import difference as difference_data
from ckptools.model import run_folder as run_folder_data

if TYPE_CHECKING:
    from ckptools.api.plots import DifferencePlots, RunPlots


class Difference(difference_data.Difference):
    """What `diff` found; `.plot.heat()` draws it. Fields: those of the `Difference` of `ckptools.model`."""

    @property
    def plot(self) -> DifferencePlots:
        """Its pictures."""
        from ckptools.api.plots import DifferencePlots

        return DifferencePlots(self)


class RunFolder(run_folder_data.RunFolder):
    """The checkpoints of a run; `.plot.steps()` draws them. Fields: those of the `RunFolder` of `ckptools.model`."""

    @property
    def plot(self) -> RunPlots:
        """Its pictures."""
        from ckptools.api.plots import RunPlots

        return RunPlots(self)


def with_plots(found: difference_data.Difference) -> Difference:
    """A difference with its pictures."""
    return Difference(**_fields(found))


def run_with_plots(found: run_folder_data.RunFolder) -> RunFolder:
    """A run with its pictures."""
    return RunFolder(**_fields(found))


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record) if field.init}
