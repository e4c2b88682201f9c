"""The tab of keys: the tree, and what is known of the key under the cursor, read or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckptools.browse.command_lines import glob_of
from ckptools.browse.command_lines import line as command_line
from ckptools.browse.key_tree import KeyTree, TreeNode
from ckptools.browse.pages import PageRows
from ckptools.browse.session import Session
from ckptools.contents.record import Shown
from ckptools.contents.show import stated
from ckptools.contents.show_text import figures_line, shown_text
from ckptools.contents.tree import totals
from ckptools.diff.record import TensorDifference
from ckptools.display.tables import Screen, wrapped
from ckptools.model.records import to_dict
from ckptools.stats.record import Stats
from ckptools.stats.text import histogram
from ckptools.text import count, number, plural, printable, size

MOST = 200
"""Names of what is in a branch."""


@dataclass
class KeyPage:
    """The tree of keys with what was read of them.

    Attributes:
        tree: what the list shows.
        full: what `show` read of a key, by its name.
        elements: the same with the elements of a slice.
    """

    session: Session
    tree: KeyTree
    full: dict[str, Shown] = field(default_factory=dict)
    elements: dict[str, Shown] = field(default_factory=dict)
    wide = False

    @property
    def rows(self) -> KeyTree:
        """What the list shows."""
        return self.tree

    def fit(self, _width: int) -> None:
        """A row is cut when it is drawn."""

    def node(self, n: int) -> TreeNode | None:
        """The node of a row; None where the list is empty."""
        return self.tree.node(n) if n < len(self.tree) else None

    def detail(self, n: int, width: int) -> Callable[[], PageRows]:
        """What finds out what is known of a row, without opening a file."""
        node = self.node(n)
        return lambda: PageRows(self._about(node, Screen(max(width, 20))) if node is not None else ())

    def _about(self, node: TreeNode, screen: Screen) -> Iterator[str]:
        row = node.row
        if row is None:
            yield from self._branch(node, screen)
            return
        change = self.tree.changes.get(row.name)
        if change is not None:
            for name, value in to_dict(change).items():
                if value not in (None, "") and name != "name":
                    yield from wrapped(f"{name:10} ", printable(str(value)), screen)
            yield ""
        known = self.elements.get(row.name) or self.full.get(row.name)
        values = self.session.values_of([row])
        if row.name in self.tree.figures:
            yield from figures(self.tree.figures[row.name], screen)
        if known is None and values and self.session.looked is not None:
            known = stated(self.session.looked.checkpoint, values)
        if known is not None:
            yield from shown_text(known, screen).split("\n")

    def _branch(self, node: TreeNode, screen: Screen) -> Iterator[str]:
        """Totals of a branch, and the first of its keys."""
        rows = node.rows
        found = totals(rows)
        yield from wrapped("", printable(node.name), screen)
        if found.tensors:
            yield f"{plural(found.tensors, 'tensor')}, {count(found.params)} params, {size(found.bytes)}"
        if len(rows) > found.tensors:
            yield plural(len(rows) - found.tensors, "other value")
        yield ""
        yield from (printable(row.name) for row in rows[:MOST])
        if len(rows) > MOST:
            yield f"{len(rows) - MOST} more"

    def tensors(self, n: int) -> list[str]:
        """The names of the tensors of a row."""
        node = self.node(n)
        return [row.name for row in node.rows if row.type == "tensor"] if node is not None else []

    def command_of(self, n: int) -> str:
        """`show` for a key, `stats` and slices where these were read, `diff` where two are compared, else `tree`."""
        node, arguments = self.node(n), self.session.arguments
        chosen = glob_of(node.rows, self.tree.keys.rows) if node is not None else None
        row = node.row if node is not None else None
        if self.session.other:
            words = ["--filter", chosen] if chosen else []
            found = (self.tree.changes.get(row.name) for row in (node.rows if node is not None else []))
            valued = any(isinstance(one, TensorDifference) and one.change is not None for one in found)
            return command_line("diff", arguments, self.session.other, *(["--values"] if valued else []), *words)
        if row is not None and row.name in self.elements:
            return command_line("show", arguments, row.name, "--values", self.elements[row.name].rows[0].slice)
        if row is not None and row.name in self.tree.figures:
            every = ["--section", "all", "--filter", chosen or row.name, "--hist"]
            return command_line("stats", arguments, *every)
        if row is not None:
            return command_line("show", arguments, row.name)
        return command_line("tree", arguments, *(["--filter", chosen] if chosen else []))

    def part(self, n: int) -> str | None:
        """What of the checkpoint `consolidate` writes of a row: a kind of section, or a glob of names of the model.

        None for what no glob of the model means alone.
        """
        node = self.node(n)
        rows = node.rows if node is not None else []
        kinds = {row.kind for row in rows}
        every = [row for row in self.tree.keys.rows if row.kind in kinds]
        if len(kinds) == 1 and kinds <= {"model", "optimizer"} and len(rows) == len(every):
            return kinds.pop()
        return glob_of(rows, every) if kinds == {"model"} else None


def figures(row: Stats, screen: Screen) -> Iterator[str]:
    """Figures of a tensor whose values were read, and its histogram between its smallest and largest element."""
    yield from wrapped("", figures_line(to_dict(row)), screen)
    if row.histogram is not None and row.min is not None and row.max is not None:
        yield histogram(row.histogram)
        yield f"{number(row.min)} .. {number(row.max)}"
    if row.problem:
        yield from wrapped("", printable(row.problem), screen)
    yield ""
