"""The program `browse`: what its keys do, beside moving about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from textual.binding import Binding, BindingType
from textual.widgets import Input

from ckptools.browse.dialogs import HelpDialog, LineDialog, PlanDialog
from ckptools.browse.key_page import KeyPage
from ckptools.browse.key_tree import KeyTree, Order
from ckptools.browse.pages import ListPage
from ckptools.browse.row_list import RowList
from ckptools.browse.session import Session
from ckptools.browse.view import KEYS, OVERVIEW, RANKS, RUN, VALUES, View
from ckptools.contents.record import Shown
from ckptools.model.problems import Problem
from ckptools.stats.record import Statistics, Stats
from ckptools.text import plural, printable

if TYPE_CHECKING:
    from ckptools.consolidate.record import Consolidated

WRITES = "writes"
"""The name of the job that writes: leaving waits until it has taken away what it began."""

ORDERS: tuple[Order, ...] = ("as saved", "size", "rms", "change")


class Browser(View):
    """Looks around in a checkpoint, and reads, copies, saves or consolidates what its keys ask for."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", show=False),
        Binding("o", "order", "order", show=False),
        Binding("u", "unfold", "unfold", show=False),
        Binding("f", "figures", "figures", show=False),
        Binding("e", "elements", "elements", show=False),
        Binding("c", "compare", "compare", show=False),
        Binding("r", "every_rank", "every rank", show=False),
        Binding("x,escape", "stop", "stop", show=False),
        Binding("y", "copy", "copy", show=False),
        Binding("s", "save", "save", show=False),
        Binding("w", "consolidate", "consolidate", show=False),
        Binding("t", "light", "light", show=False),
        Binding("question_mark", "help", "help", show=False),
        Binding("q", "leave", "leave", show=False),
        Binding("ctrl+c,ctrl+q", "leave", "leave", show=False, priority=True),
    ]

    _nth = 0
    _leaves = False

    # -- leaving, stopping, help --------------------------------------------------------------------------------------

    def action_help(self) -> None:
        """List the keys."""
        self.push_screen(HelpDialog("keys"))

    def action_light(self) -> None:
        """Change between light and dark."""
        self.theme = "textual-dark" if self.theme == "textual-light" else "textual-light"

    def action_stop(self) -> None:
        """Stop what is read or written; without any, end the filter."""
        typed = self.query_one("#filter", Input)
        if self.jobs.stop_all(but="looks up"):
            self.say("stopped")
        elif typed.value:
            typed.value = ""
        typed.remove_class("typing")
        self.left.focus()

    def action_leave(self) -> None:
        """Leave; what is being written is stopped first, and taken away."""
        writing = self.jobs.running.get(WRITES)
        if writing is None:
            self.exit()
            return
        self.say("stops writing, and takes away what it began")
        self._leaves = True
        writing.stopped.set()

    # -- keys ---------------------------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        """Type a filter of the keys."""
        self.action_tab(KEYS)
        typed = self.query_one("#filter", Input)
        typed.add_class("typing")
        typed.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter the keys while the user types."""
        if event.input.id == "filter" and self.key_page is not None:
            self.key_page.tree.arrange(event.value, self.key_page.tree.order)
            self._show_keys(0)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go to the keys that are left."""
        if event.input.id == "filter":
            self.left.focus()

    def _show_keys(self, cursor: int) -> None:
        self.at[KEYS] = cursor
        if self.tab == KEYS and self.key_page is not None:
            self.left.show(self.key_page.tree, cursor)

    def action_order(self) -> None:
        """Go on to the next order of the keys."""
        if self.key_page is None:
            return
        tree = self.key_page.tree
        known: dict[Order, object] = {"rms": tree.figures, "change": tree.changes}
        usable = [order for order in ORDERS if known.get(order, True)]
        following = usable[(usable.index(tree.order) + 1) % len(usable)] if tree.order in usable else usable[0]
        tree.arrange(tree.text, following)
        without = "" if tree.figures else "; f reads the values that rms needs"
        self.say(f"order: {following}{without}")
        self.action_tab(KEYS)
        self._show_keys(0)

    def action_unfold(self) -> None:
        """Show each layer, or fold those that are the same."""
        page = self.key_page
        if page is None:
            return
        expand = not page.tree.expanded

        def then(tree: KeyTree) -> None:
            tree.changes, tree.figures = page.tree.changes, page.tree.figures
            page.tree = tree
            self.say("each layer" if expand else "the same layers in one row")
            self.action_tab(KEYS)
            self._show_keys(0)

        self.begin("folds", lambda _: KeyTree(page.tree.keys, expand), then)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def on_row_list_pressed(self, event: RowList.Pressed) -> None:
        """Do what a key asks for of a row."""
        if event.rows.id == "problems" and event.what == "choose":
            self._go_to_problem()
        elif event.rows.id == "right" and event.what == "left":
            self.left.focus()
        elif event.rows.id == "left" and self.tab == KEYS:
            self._in_tree(event.what)
        elif event.rows.id == "left" and event.what in ("choose", "right"):
            self._choose()

    def _in_tree(self, what: str) -> None:
        if self.key_page is None:
            return
        tree, n = self.key_page.tree, self.left.cursor
        if what == "left":
            n = tree.close(n)
            self.left.refit()
            self.left.go(n)
        elif tree.open(n):
            self.left.refit()
        elif what == "choose":
            self._read_in_full()

    def _read_in_full(self) -> None:
        """Read what `show` says of the key under the cursor."""
        assert self.key_page is not None
        page, node = self.key_page, self.key_page.node(self.left.cursor)
        if node is None or node.row is None:
            return
        name = node.row.name
        if name in self.session.entries:
            self.begin(
                "reads", lambda job: self.session.show(job, [name]), lambda found: self._shown(page, name, found)
            )

    def _ask(self, page: KeyPage, name: str) -> None:
        self.begin("reads", lambda job: self.session.show(job, [name]), lambda found: self._shown(page, name, found))

    def _shown(self, page: KeyPage, name: str, found: Shown) -> None:
        page.full[name] = found
        page.elements.pop(name, None)
        self.look_up(keep=True)

    def _choose(self) -> None:
        page = self.page
        if not isinstance(page, ListPage) or self.left.cursor >= len(page.rows):
            return
        target = page.rows.rows[self.left.cursor].target
        if self.tab == VALUES and target and self.key_page is not None:
            keys, name = self.key_page, str(target)
            self.begin(
                "reads", lambda job: self.session.show(job, [name]), lambda found: self._shown(keys, name, found)
            )
        elif self.tab == RUN and target is not None:
            self._open_other(target.path)

    def _open_other(self, path: str) -> None:
        """Look at another checkpoint of the run."""
        self.jobs.stop_all()
        before, run = self.session, self.pages.get(RUN)
        self.session = Session(path, "", before.how, before.nbytes, before.seconds)
        self.open()
        self.pages = {RUN: run} if run is not None else {}
        self.action_tab(OVERVIEW)

    def _go_to_problem(self) -> None:
        """Go to the tensor or the rank of a cause; once more, to that of its next problem."""
        rows = self.problems.source
        target = getattr(rows, "rows", [])[self.problems.cursor].target if len(rows) else None
        found: Sequence[Problem] = target or ()
        if not found:
            return
        problem = found[self._nth % len(found)]
        self._nth += 1
        if problem.tensor is not None and self._reveal(problem.tensor):
            return
        ranks = problem.all_ranks
        if ranks and self.session.looked is not None:
            self.action_tab(RANKS)
            self.left.go(min(ranks))
            self.left.focus()
        else:
            self.say(problem.message)

    def _reveal(self, tensor: str) -> bool:
        """Go to a key that a problem names, if it is here."""
        names = (entry.name for entry in self.session.entries.values() if tensor in entry.names)
        name = next(names, None)
        n = self.key_page.tree.reveal(name) if name is not None and self.key_page is not None else None
        if n is None:
            return False
        self.action_tab(KEYS)
        self._show_keys(n)
        self.left.focus()
        return True

    # -- reading ------------------------------------------------------------------------------------------------------

    def action_figures(self) -> None:
        """Read the values of the tensors of a row."""
        names = self._tensors()
        if names:
            words = f"reads {plural(len(names), 'tensor')}"
            self.begin("reads values", lambda job: self.session.figures(job, names), self._measured)
            self.say(words)

    def _tensors(self) -> list[str]:
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
        from ckptools.stats.text import summary

        tree = self.key_page.tree
        tree.figures.update({row.name: row for row in found.rows})
        tree.arrange(tree.text, tree.order)
        self.left.refit()
        self.say("; ".join(summary(found)))
        self.look_up()

    def action_elements(self) -> None:
        """Read the elements of a slice."""
        page = self.key_page
        node = page.node(self.left.cursor) if page is not None and self.tab == KEYS else None
        row = node.row if node is not None else None
        if page is None or row is None or row.type != "tensor" or row.name not in self.session.entries:
            self.say("choose one tensor in the tab of keys first")
            return
        name = row.name
        every = ",".join(["0:4", ":8"][: len(row.shape or ())] or [":"])

        def typed(text: str | None) -> None:
            if text:
                self.begin("reads", lambda job: self.session.show(job, [name], text), read)

        def read(found: Shown) -> None:
            page.elements[name] = found
            self.look_up()

        self.push_screen(LineDialog(f"elements of {printable(name)}", every), typed)

    def action_compare(self) -> None:
        """Compare the values of the row's tensors with those of the other checkpoint."""
        if not self.session.other:
            self.say("there is no other checkpoint: ckptools browse PATH OTHER")
            return
        names = self._tensors()
        if names:
            from ckptools.browse.command_lines import escaped

            globs = [escaped(name) for name in names]
            self.begin("compares", lambda job: self.session.compare(job, True, globs), self._values_compared)

    def _values_compared(self, found: Any) -> None:
        """Take over what the values of some tensors say; what was known of others stays."""
        from ckptools.diff.text import NOT_LISTED, verdict_line

        assert self.key_page is not None
        tree = self.key_page.tree
        known = {name: row for name, row in tree.changes.items() if name not in {r.name for r in found.tensors}}
        tree.changes = {**known, **{row.name: row for row in found.tensors if row.verdict not in NOT_LISTED}}
        tree.arrange(tree.text, tree.order)
        self.left.refit()
        self.say(verdict_line(found))
        self.look_up()

    # -- what goes out ------------------------------------------------------------------------------------------------

    def action_copy(self) -> None:
        """Copy the command line that shows the same, and show it."""
        command = self.page.command_of(self.left.cursor)
        self.copy_to_clipboard(command)
        self.say(command)

    def action_save(self) -> None:
        """Save the page of `report`."""

        def typed(out: str | None) -> None:
            if out:
                self.begin(
                    WRITES, lambda job: self.session.write_report(job, out), lambda path: self.written(f"wrote {path}")
                )

        if self.session.looked is not None:
            self.push_screen(LineDialog("save the page of report as", f"{self._file_name()}.html"), typed)

    def _file_name(self) -> str:
        assert self.session.looked is not None
        return re.sub(r"[^\w.-]+", "-", self.session.looked.report.name)[:80] or "checkpoint"

    def written(self, text: str) -> None:
        """Say what was written."""
        self.say(text)

    def action_consolidate(self) -> None:
        """Consolidate what is selected: ask for a name, show the plan, write."""
        if self.session.looked is None:
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

        self.push_screen(LineDialog(f"consolidate {printable(what)} into", f"{self._file_name()}.{suffix}"), typed)

    def _planned(self, plan: Consolidated, out: str, only: str | None) -> None:
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
