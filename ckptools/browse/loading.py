"""What is opened, and what goes on loading behind the first screen: keys, the other ranks, what differs, the run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckptools.browse import pages
from ckptools.browse.session import Looked
from ckptools.browse.view import KEYS, OPENS, OVERVIEW, RUN, SEVERAL, STOPPED, VALUES, View
from ckptools.display.tables import wrapped
from ckptools.errors import CkptoolsError, ReadError, SeveralError
from ckptools.text import printable

if TYPE_CHECKING:
    from ckptools.browse.key_tree import KeyTree
    from ckptools.contents.record import Keys
    from ckptools.diff.record import Difference
    from ckptools.doctor.record import Diagnosis
    from ckptools.keys.entries import Entry


class Loading(View):
    """Opens a checkpoint; what the first screen does not need is read, and imported, after it."""

    def on_mount(self) -> None:
        """Begin to open the checkpoint; the view has an `on_mount` of its own, which textual calls too."""
        self.open()

    def open(self) -> None:
        """Open the checkpoint, or say why that cannot be."""
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
            if isinstance(error, ReadError):  # of what is not there, doctor has nothing to say either
                self.jobs.start("asks doctor", self.session.diagnose, self._diagnosed, lambda _: self.exit())
            else:
                self.exit()
        else:
            self.failed(error)

    def _diagnosed(self, found: Diagnosis) -> None:
        from ckptools.doctor.text import diagnosis_text

        words = printable(f"cannot be opened: {self.error}")
        command = f"ckptools doctor {self.session.arguments}"
        self.pages[OVERVIEW] = pages.TextPage(
            lambda screen: "\n".join([*wrapped("", words, screen), "", diagnosis_text(found, screen)]), command
        )
        self.action_tab(OVERVIEW)

    def looked(self, looked: Looked) -> None:
        """Show a checkpoint that was opened, and go on with what takes longer."""
        self.session.looked = looked
        self.pages = {RUN: self.pages[RUN]} if RUN in self.pages else {}
        if self.key_page is not None:
            self.pages[KEYS] = self.key_page
        self.problems.show(pages.problem_rows(looked))
        self.show_tab()
        self.call_after_refresh(self._go_on, looked)

    def _go_on(self, looked: Looked) -> None:
        self.first_screen = self.first_screen or time.perf_counter()
        self.begin("lists keys", lambda _: self._listed(looked), lambda found: self._keys(looked, *found), shown=False)

    def _listed(self, looked: Looked) -> tuple[Keys, dict[str, Entry], KeyTree | None]:
        """List the keys, and the tree of them if they are others than before."""
        from ckptools.browse.key_tree import KeyTree

        keys, entries = self.session.list_keys(looked)
        known = self.session.keys is not None and self.key_page is not None and self.session.keys.rows == keys.rows
        return keys, entries, None if known else KeyTree(keys)

    def _keys(self, looked: Looked, keys: Keys, entries: dict[str, Entry], tree: KeyTree | None) -> None:
        from ckptools.browse.key_page import KeyPage

        self.session.keys, self.session.entries = keys, entries
        if tree is not None:
            self.key_page = self.pages[KEYS] = KeyPage(self.session, tree)
        self.pages.pop(VALUES, None)
        if self.tab in (KEYS, VALUES):
            self.show_tab()
        if self.session.other and self.session.difference is None:
            self.begin("compares", lambda job: self.session.compare(job, False), self.compared)
        elif not looked.checkpoint.all_ranks and not self.session.is_far:
            self.action_every_rank()

    def action_every_rank(self) -> None:
        """Read the structure of every rank; where opening was stopped, open it."""
        looked = self.session.looked
        if looked is None and self.waits == STOPPED:
            self.open()
        reads = "reads every rank" in self.jobs.running
        if looked is not None and not looked.checkpoint.all_ranks and not reads:
            self.begin("reads every rank", self.session.every_rank, self.looked)

    def compared(self, difference: Difference) -> None:
        """Show what differs, the largest change first."""
        from ckptools.diff.text import verdict_line

        self.session.difference = difference
        self.say(verdict_line(difference))
        if self.key_page is not None:
            self.key_page.tree.compared(difference)
            self.action_tab(KEYS)
