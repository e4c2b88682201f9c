"""What goes out: a command line to the clipboard, the page of `report`, a part of the checkpoint in one file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckptools.browse.row_reading import RowReading
from ckptools.browse.view import KEYS
from ckptools.text import printable

if TYPE_CHECKING:
    from ckptools.consolidate.record import Consolidated

WRITES = "writes"
"""The name of the job that writes: whoever ends the program waits until it has taken away what it began."""


class Writing(RowReading):
    """Copies, saves and consolidates; the only part of `browse` that writes."""

    def action_copy(self) -> None:
        """Copy the command line that shows the same, and show it."""
        command = self.page.command_of(self.left.cursor)
        self.copy_to_clipboard(command)
        self.say(command)

    def action_save(self) -> None:
        """Save the page of `report`."""
        if not self._can_write():
            return

        def typed(out: str | None) -> None:
            if out:
                self.begin(
                    WRITES, lambda job: self.session.write_report(job, out), lambda path: self.written(f"wrote {path}")
                )

        from ckptools.browse.dialogs import LineDialog

        self.push_screen(LineDialog("save the page of report as", f"{self._file_name()}.html"), typed)

    def end_writing(self) -> None:
        """Stop what is being written, and wait until what it began is taken away."""
        self.jobs.finish(WRITES)

    def _can_write(self) -> bool:
        if self.session.looked is None:
            self.say(self.why_unknown())
        return self.session.looked is not None and not self.is_writing()

    def is_writing(self) -> bool:
        """Whether something is being written, which `x` stops; it is said."""
        if self.jobs.is_busy(WRITES):
            self.say("something is being written; x stops it")
            return True
        return False

    def _file_name(self) -> str:
        assert self.session.looked is not None
        return re.sub(r"[^\w.-]+", "-", self.session.looked.report.name)[:80] or "checkpoint"

    def written(self, text: str) -> None:
        """Say what was written."""
        self.say(text)

    def action_consolidate(self) -> None:
        """Consolidate what is selected: ask for a name, show the plan, write."""
        if not self._can_write():
            return
        only: str | None = None
        if self.tab == KEYS and self.key_page is not None:
            only = self.key_page.part(self.left.cursor)
            if only is None:
                self.say("these are no part of the model that one glob names: choose the model, a module or one tensor")
                return
        what = only or "the model"
        suffix = "pt" if only in ("optimizer", "all") else "safetensors"

        def typed(out: str | None) -> None:
            if out:
                self.begin(
                    WRITES,
                    lambda job: self.session.consolidate(job, out, only, dry_run=True),
                    lambda plan: self._planned(plan, out, only),
                )

        from ckptools.browse.dialogs import LineDialog

        self.push_screen(LineDialog(f"consolidate {printable(what)} into", f"{self._file_name()}.{suffix}"), typed)

    def _planned(self, plan: Consolidated, out: str, only: str | None) -> None:
        from ckptools.browse.dialogs import PlanDialog
        from ckptools.consolidate.text import remarks, summary

        if plan.planned is not None and plan.planned.no_room is not None:
            self.say(f"error: {plan.planned.no_room}")
            return

        def agreed(answer: str | None) -> None:
            if answer:
                self.begin(
                    WRITES,
                    lambda job: self.session.consolidate(job, out, only, dry_run=False),
                    lambda done: self.written("; ".join(summary(done))),
                )

        lines = [*summary(plan), *(printable(line) for line in remarks(plan))]
        self.push_screen(PlanDialog("Enter writes it, Esc does not", lines), agreed)
