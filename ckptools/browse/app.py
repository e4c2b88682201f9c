"""The application `browse`: the actions of its keys, other than moving the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widgets import Input

from ckptools.browse.key_tree import KeyTree, Order
from ckptools.browse.loading import Writing
from ckptools.browse.pages import Card, HomePage, ListPage, RankPage
from ckptools.browse.row_list import RowList
from ckptools.browse.session import Session
from ckptools.browse.view import FILES, KEYS, OVERVIEW, RANKS, RUN, STOPPED, VALUES
from ckptools.model.problems import Code, Problem

ORDERS: tuple[Order, ...] = ("as saved", "size", "rms", "change")


class Browser(Writing):
    """The complete application: shows a checkpoint, and reads, copies, saves or consolidates on a key press."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", show=False),
        Binding("p", "only", "only problems", show=False),
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

    # -- leaving, stopping, help --------------------------------------------------------------------------------------

    def action_help(self) -> None:
        """Show the help on keys."""
        from ckptools.browse.dialogs import HelpDialog

        self.push_screen(HelpDialog("keys"))

    def action_light(self) -> None:
        """Switch between light and dark."""
        self.theme = "textual-dark" if self.theme == "textual-light" else "textual-light"

    def action_stop(self) -> None:
        """Stop the running jobs; if there are none, end the filters."""
        typed = self.query_one("#filter", Input)
        if "opens" in self.jobs.running:
            self.waits = STOPPED
        if self.jobs.stop_shown():
            self.say("stopped")
            self._tell_title()
        elif typed.value:
            typed.value = ""
        elif self.only:
            self.action_only()
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

    def action_only(self) -> None:
        """Show only keys, ranks and files with problems, or all of them again."""
        self.only = not self.only
        if self.key_page is not None:
            tree = self.key_page.tree
            tree.only = self.only
            tree.arrange(tree.text, tree.order)
        for tab in (KEYS, RANKS, FILES):
            self.at.pop(tab, None)
        for tab in (RANKS, FILES):
            self.pages.pop(tab, None)
        if self.tab in (KEYS, RANKS, FILES):
            self.show_tab()
        else:
            self.action_tab(KEYS)

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
        if event.rows.id == "right" and event.what == "left":
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
        if not isinstance(page, ListPage | HomePage) or self.left.cursor >= len(page.rows):
            return
        target = page.rows.rows[self.left.cursor].target
        if isinstance(target, Card):
            self._go_to(target.problems)
        elif self.tab == OVERVIEW and target:
            self.action_copy()
        elif self.tab == VALUES and target and self.key_page is not None:
            self.show_key(self.key_page, str(target))
        elif self.tab == RUN and target is not None and not self.is_writing():
            self.jobs.stop_all()
            before, run = self.session, self.pages.get(RUN)
            self.session = Session(target.path, "", before.how, before.elsewhere, before.seconds, before.before)
            self.open()
            self.say("")
            self.pages = {RUN: run} if run is not None else {}
            self.action_tab(OVERVIEW)

    def _go_to(self, problems: Sequence[Problem]) -> None:
        """Go to the rank, the tensor or the file of an incident; if it has none, say what it is."""
        first = problems[0]
        looked = self.session.looked
        files = looked.checkpoint.files if looked is not None else ()
        names = [name for problem in problems for name in problem.files]
        named = [n for name in names for n, file in enumerate(files) if file.is_called(name)]
        tensors = (problem.tensor for problem in problems if problem.tensor is not None)
        if self.only:
            self.action_only()
        if first.all_ranks and first.kind is not Code.NOT_FINITE:
            self._show_rank(min(first.all_ranks))
        elif any(map(self._reveal, tensors)):
            pass
        elif named:
            self._show(FILES, named[0])
        else:
            self.say(first.message)

    def _show_rank(self, rank: int) -> None:
        self.action_tab(RANKS)
        page = self.page
        cells = page.cells if isinstance(page, RankPage) else ()
        self._show(RANKS, next((n for n, cell in enumerate(cells) if cell.rank == rank), 0))

    def _show(self, tab: int, n: int) -> None:
        """Go to a row of a tab."""
        self.action_tab(tab)
        self.left.go(n)
        self.left.focus()

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
