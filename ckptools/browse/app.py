"""The application `browse`: the actions of its keys, other than moving the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.widgets import Input

from ckptools.browse.loading import Writing
from ckptools.browse.pages import ListPage
from ckptools.browse.row_list import RowList
from ckptools.browse.session import Session
from ckptools.browse.view import HINT, KEYS, OVERVIEW, RANKS, RUN, STOPPED, VALUES
from ckptools.model.problems import Problem

if TYPE_CHECKING:
    from ckptools.browse.key_tree import KeyTree, Order

ORDERS: tuple[Order, ...] = ("as saved", "size", "rms", "change")


class Browser(Writing):
    """The complete application: shows a checkpoint, and reads, copies, saves or consolidates on a key press."""

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

    # -- leaving, stopping, help --------------------------------------------------------------------------------------

    def action_help(self) -> None:
        """Show the help on keys."""
        from ckptools.browse.dialogs import HelpDialog

        self.push_screen(HelpDialog("keys"))

    def action_light(self) -> None:
        """Switch between light and dark."""
        self.theme = "textual-dark" if self.theme == "textual-light" else "textual-light"

    def action_stop(self) -> None:
        """Stop the running jobs; if there are none, clear the filter."""
        typed = self.query_one("#filter", Input)
        if "opens" in self.jobs.running:
            self.waits = STOPPED
        if self.jobs.stop_shown():
            self.say("stopped")
            self._tell_title()
        elif typed.value:
            typed.value = ""
        typed.remove_class("typing")
        self.left.focus()

    def action_leave(self) -> None:
        """Leave; an unfinished output is removed before the program ends."""
        self.jobs.stop_all()
        self.exit()

    # -- keys ---------------------------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        """Start typing a filter for the keys."""
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
        """Move to the filtered keys."""
        if event.input.id == "filter":
            self.left.focus()

    def _show_keys(self, cursor: int) -> None:
        self.at[KEYS] = cursor
        if self.tab == KEYS and self.key_page is not None:
            self.left.show(self.key_page.tree, cursor)

    def action_order(self) -> None:
        """Switch to the next order of the keys."""
        if self.key_page is None:
            self.say(self.why_unknown())
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
        """Show each layer, or fold repeated layers."""
        page = self.key_page
        if page is None:
            self.say(self.why_unknown())
            return
        from ckptools.browse.key_tree import KeyTree

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
        """Run the action for a key pressed on a row."""
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
            node = self.key_page.node(n)
            if node is not None and node.row is not None and node.row.name in self.session.entries:
                self.show_key(self.key_page, node.row.name)

    def _choose(self) -> None:
        page = self.page
        if not isinstance(page, ListPage) or self.left.cursor >= len(page.rows):
            return
        target = page.rows.rows[self.left.cursor].target
        if self.tab == VALUES and target and self.key_page is not None:
            self.show_key(self.key_page, str(target))
        elif self.tab == RUN and target is not None and not self.is_writing():
            self.jobs.stop_all()
            before, run = self.session, self.pages.get(RUN)
            self.session = Session(target.path, "", before.how, before.elsewhere, before.seconds, before.before)
            self.open()
            self.say(HINT)
            self.pages = {RUN: run} if run is not None else {}
            self.action_tab(OVERVIEW)

    def _go_to_problem(self) -> None:
        """Go to the tensor or rank of a problem of the selected cause; when repeated, of its next problem."""
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
        """Go to the key that a problem names, if the checkpoint has it."""
        names = (entry.name for entry in self.session.entries.values() if tensor in entry.names)
        name = next(names, None)
        n = self.key_page.tree.reveal(name) if name is not None and self.key_page is not None else None
        if n is None:
            return False
        self.action_tab(KEYS)
        self._show_keys(n)
        self.left.focus()
        return True
