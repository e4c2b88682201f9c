"""Open the checkpoint, then load further data in the background: keys, other ranks, differences, the run."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from ckptools.browse import pages
from ckptools.browse.key_tree import NAN, Fault, KeyTree
from ckptools.browse.session import CheckpointReport, escaped, faulty_keys
from ckptools.browse.view import KEYS, OPENS, OVERVIEW, READS, RUN, SEVERAL, STOPPED, VALUES, View
from ckptools.display.tables import wrapped
from ckptools.errors import CkptoolsError, ReadError, SeveralError
from ckptools.text import plural, printable

if TYPE_CHECKING:
    from ckptools.browse.pages import KeyPage
    from ckptools.consolidate.record import Consolidated
    from ckptools.contents.record import Keys, Shown
    from ckptools.diff.record import Difference
    from ckptools.doctor.answers import Diagnosis
    from ckptools.keys.entries import Entry
    from ckptools.stats.record import Statistics, Stats


class LoadingView(View):
    """Opens a checkpoint, shows the first screen, and reads and imports the rest afterwards."""

    def on_mount(self) -> None:
        """Start opening the checkpoint; textual also calls `on_mount` of `View`."""
        self.open()

    def open(self) -> None:
        """Open the checkpoint, or show why that fails."""
        self.session.looked = self.error = self.key_page = None
        self.pages, self.at = {}, {}
        self.waits = OPENS
        self._tell_title()
        self.jobs.start("opens", self.session.open, self.looked, self._not_opened)

    def _not_opened(self, error: Exception) -> None:
        if isinstance(error, SeveralError):
            self.waits = SEVERAL
            self.action_tab(RUN)
        elif isinstance(error, CkptoolsError):
            self.error = error
            self._tell_title()
            if isinstance(error, ReadError):  # other errors, such as a missing file, are not for doctor
                self.jobs.start("asks doctor", self.session.diagnose, self._diagnosed, lambda _: self.exit())
            else:
                self.exit()
        else:
            self.failed(error)

    def _diagnosed(self, found: Diagnosis) -> None:
        from ckptools.display.page import page_text

        words = printable(f"cannot be opened: {self.error}")
        command = f"ckptools doctor {self.session.arguments}"
        self.pages[OVERVIEW] = pages.TextPage(
            lambda screen: "\n".join([*wrapped("", words, screen), "", page_text(found, screen)]), command
        )
        self.action_tab(OVERVIEW)

    def looked(self, looked: CheckpointReport) -> None:
        """Show an opened checkpoint, and start loading the rest."""
        self.session.looked = looked
        self.call_after_refresh(self._go_on, self._show_anew())

    def _show_anew(self) -> CheckpointReport:
        """Make the tabs again, of what is known by now."""
        looked = self.session.looked = self.session.judged()
        self.pages = {RUN: self.pages[RUN]} if RUN in self.pages else {}
        if self.key_page is not None:
            self.pages[KEYS] = self.key_page
        self.at[self.tab] = self.left.cursor
        self.show_tab()
        return looked

    def _judge(self) -> None:
        """Judge the checkpoint again if values that were read are NaN or infinite, and mark their keys."""
        looked, page = self.session.looked, self.key_page
        if looked is None or all(problem in looked.report.problems for problem in self.session.found):
            return
        if page is not None:
            page.tree.mark({**page.tree.faults, **dict.fromkeys(self.session.not_finite, Fault(NAN, "bad"))})
        self._show_anew()

    def _go_on(self, looked: CheckpointReport) -> None:
        self.first_screen = self.first_screen or time.perf_counter()
        self.begin("lists keys", lambda _: self._listed(looked), lambda found: self._keys(looked, *found), shown=False)

    def _listed(self, looked: CheckpointReport) -> tuple[Keys, dict[str, Entry], dict[str, Fault], KeyTree | None]:
        """List the keys, find those with problems, and build the tree if the keys have changed."""
        keys, entries = self.session.list_keys(looked)
        known = self.session.keys is not None and self.key_page is not None and self.session.keys.rows == keys.rows
        faults = faulty_keys(looked.report.problems, entries.values())
        return keys, entries, faults, None if known else KeyTree(keys)

    def _keys(
        self,
        looked: CheckpointReport,
        keys: Keys,
        entries: dict[str, Entry],
        faults: dict[str, Fault],
        tree: KeyTree | None,
    ) -> None:
        self.session.keys, self.session.entries = keys, entries
        if tree is not None:
            tree.only = self.only
            self.key_page = self.pages[KEYS] = pages.KeyPage(self.session, tree)
        if self.key_page is not None:
            self.key_page.tree.mark(faults)
        self.pages.pop(VALUES, None)
        if self.tab in (KEYS, VALUES):
            self.show_tab()
        if self.session.other and self.session.difference is None:
            self.begin("compares", lambda job: self.session.compare(job, False), self.compared)
        elif not looked.checkpoint.all_ranks and not self.session.is_far:
            self.action_every_rank()

    def action_every_rank(self) -> None:
        """Read the structure of every rank; open the checkpoint again if the user stopped that."""
        looked = self.session.looked
        if looked is None and self.waits == STOPPED:
            self.open()
        if looked is not None and not looked.checkpoint.all_ranks and READS not in self.jobs.running:
            self.begin(READS, self.session.every_rank, self.looked)

    def compared(self, difference: Difference) -> None:
        """Show the differences, the largest change first."""
        from ckptools.diff.text import verdict_line

        self.session.difference = difference
        self.say(verdict_line(difference))
        if self.key_page is not None:
            self.key_page.tree.compared(difference)
            self.action_tab(KEYS)


# -- read on a key press: shards by file, statistics, elements, values of both checkpoints -----------------------------


class RowReading(LoadingView):
    """Reads further data about the row under the cursor."""

    def show_key(self, page: KeyPage, name: str) -> None:
        """Read a key as `ckptools show` does."""
        self.begin("reads", lambda job: self.session.show(job, [name]), lambda found: self._shown(page, name, found))

    def _shown(self, page: KeyPage, name: str, found: Shown) -> None:
        page.full[name] = found
        page.elements.pop(name, None)
        self._judge()
        self.look_up(keep=True)

    def action_figures(self) -> None:
        """Compute statistics of the tensors in a row."""
        names = self.tensors()
        if names:
            words = f"reads values of {plural(len(names), 'tensor')}"
            self.begin(words, lambda job: self.session.figures(job, names), self._measured)

    def tensors(self) -> list[str]:
        """Names of the tensors in the row under the cursor; if there are none, say why."""
        if self.tab != KEYS or self.key_page is None:
            self.say("choose a tensor in the tab of keys first")
            return []
        names = self.key_page.tensors(self.left.cursor)
        if not names:
            self.say("no tensor is in this row")
        return names

    def _measured(self, found: Statistics[Stats]) -> None:
        if self.key_page is None:
            return
        from ckptools.stats.record import summary

        tree = self.key_page.tree
        tree.figures.update({row.name: row for row in found.rows})
        tree.arrange(tree.text, tree.order)
        self._judge()
        self.left.refit()
        self.say(summary(found)[0])
        self.look_up()

    def action_elements(self) -> None:
        """Ask for a slice, and read its elements."""
        page = self.key_page
        node = page.node(self.left.cursor) if page is not None and self.tab == KEYS else None
        row = node.row if node is not None else None
        if page is None or row is None or row.type != "tensor" or row.name not in self.session.entries:
            self.say("choose one tensor in the tab of keys first")
            return
        name = row.name
        every = ",".join(["0:4", ":8"][: len(row.shape or ())]) or "..."

        def typed(text: str | None) -> None:
            if text:
                self.begin("reads", lambda job: self.session.show(job, [name], text), read)

        def read(found: Shown) -> None:
            page.elements[name] = found
            self._judge()
            self.look_up()

        from ckptools.browse.dialogs import LineDialog

        self.push_screen(LineDialog(f"elements of {printable(name)}", every), typed)

    def action_compare(self) -> None:
        """Compare the values of the row's tensors in both checkpoints."""
        if not self.session.other:
            self.say("there is no other checkpoint: ckptools browse PATH OTHER")
            return
        names = self.tensors()
        if names:
            globs = [escaped(name) for name in names]
            self.begin("compares", lambda job: self.session.compare(job, True, globs), self._values_compared)

    def _values_compared(self, found: Difference) -> None:
        """Add the comparison of some tensors to the differences known so far."""
        from ckptools.diff.text import NOT_LISTED, verdict_line

        assert self.key_page is not None
        tree = self.key_page.tree
        compared = {row.name for row in found.tensors}
        known = {name: row for name, row in tree.changes.items() if name not in compared}
        tree.changes = {**known, **{row.name: row for row in found.tensors if row.verdict not in NOT_LISTED}}
        tree.arrange(tree.text, tree.order)
        self._judge()
        self.left.refit()
        self.say(verdict_line(found))
        self.look_up()


# -- output: a command line to the clipboard, the page of `report`, a part of the checkpoint in one file ---------------


WRITES = "writes"
"""Name of the writing job; before the program ends, it waits until that job has removed its unfinished output."""


class Writing(RowReading):
    """Copies, saves and consolidates; only this class of `browse` writes files."""

    def action_copy(self) -> None:
        """Copy the command line that prints the same data, and show it."""
        command = self.page.command_of(self.left.cursor)
        self.copy_to_clipboard(command)
        self.say(command)

    def action_save(self) -> None:
        """Ask for a name, and save the page of `report`."""
        if not self._can_write():
            return

        def typed(out: str | None) -> None:
            if out:
                self.begin(
                    WRITES, lambda job: self.session.write_report(job, out), lambda path: self.say(f"wrote {path}")
                )

        from ckptools.browse.dialogs import LineDialog

        self.push_screen(LineDialog("save the page of report as", f"{self._file_name()}.html"), typed)

    def end_writing(self) -> None:
        """Stop writing, and wait until the unfinished output is removed."""
        self.jobs.finish(WRITES)

    def _can_write(self) -> bool:
        if self.session.looked is None:
            self.say(self.why_unknown())
        return self.session.looked is not None and not self.is_writing()

    def is_writing(self) -> bool:
        """Whether a writing job is running; if so, tell the user how to stop it."""
        if self.jobs.is_busy(WRITES):
            self.say("something is being written; x stops it")
            return True
        return False

    def _file_name(self) -> str:
        assert self.session.looked is not None
        return re.sub(r"[^\w.-]+", "-", self.session.looked.report.name)[:80] or "checkpoint"

    def action_consolidate(self) -> None:
        """Consolidate the selected part: ask for a name, show the plan, write."""
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
        from ckptools.consolidate.record import remarks, summary

        if plan.planned is not None and plan.planned.no_room is not None:
            self.say(f"error: {plan.planned.no_room}")
            return

        def agreed(answer: str | None) -> None:
            if answer:
                self.begin(
                    WRITES,
                    lambda job: self.session.consolidate(job, out, only, dry_run=False),
                    lambda done: self.say("; ".join(summary(done))),
                )

        lines = [*summary(plan), *(printable(line) for line in remarks(plan))]
        self.push_screen(PlanDialog("Enter writes it, Esc does not", lines), agreed)
