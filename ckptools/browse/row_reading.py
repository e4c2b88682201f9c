"""What is read when a key asks for it: shards by file, figures, elements, values of both checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptools.browse.loading import Loading
from ckptools.browse.view import KEYS
from ckptools.text import plural, printable

if TYPE_CHECKING:
    from ckptools.browse.key_page import KeyPage
    from ckptools.contents.record import Shown
    from ckptools.diff.record import Difference
    from ckptools.stats.record import Statistics, Stats


class RowReading(Loading):
    """Reads what belongs to the row under the cursor."""

    def show_key(self, page: KeyPage, name: str) -> None:
        """Read what `show` says of a key."""
        self.begin("reads", lambda job: self.session.show(job, [name]), lambda found: self._shown(page, name, found))

    def _shown(self, page: KeyPage, name: str, found: Shown) -> None:
        page.full[name] = found
        page.elements.pop(name, None)
        self.look_up(keep=True)

    def action_figures(self) -> None:
        """Read the values of the tensors of a row."""
        names = self.tensors()
        if names:
            words = f"reads {plural(len(names), 'tensor')}"
            self.begin("reads values", lambda job: self.session.figures(job, names), self._measured)
            self.say(words)

    def tensors(self) -> list[str]:
        """The tensors of the row under the cursor; none, and a word why, where there are none."""
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
        every = ",".join(["0:4", ":8"][: len(row.shape or ())]) or "..."

        def typed(text: str | None) -> None:
            if text:
                self.begin("reads", lambda job: self.session.show(job, [name], text), read)

        def read(found: Shown) -> None:
            page.elements[name] = found
            self.look_up()

        from ckptools.browse.dialogs import LineDialog

        self.push_screen(LineDialog(f"elements of {printable(name)}", every), typed)

    def action_compare(self) -> None:
        """Compare the values of the row's tensors with those of the other checkpoint."""
        if not self.session.other:
            self.say("there is no other checkpoint: ckptools browse PATH OTHER")
            return
        names = self.tensors()
        if names:
            from ckptools.browse.command_lines import escaped

            globs = [escaped(name) for name in names]
            self.begin("compares", lambda job: self.session.compare(job, True, globs), self._values_compared)

    def _values_compared(self, found: Difference) -> None:
        """Take over what the values of some tensors say; what was known of others stays."""
        from ckptools.diff.text import NOT_LISTED, verdict_line

        assert self.key_page is not None
        tree = self.key_page.tree
        compared = {row.name for row in found.tensors}
        known = {name: row for name, row in tree.changes.items() if name not in compared}
        tree.changes = {**known, **{row.name: row for row in found.tensors if row.verdict not in NOT_LISTED}}
        tree.arrange(tree.text, tree.order)
        self.left.refit()
        self.say(verdict_line(found))
        self.look_up()
