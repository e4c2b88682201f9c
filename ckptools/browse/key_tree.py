"""The keys of a checkpoint as a list that folds and unfolds: as a tree, filtered, or sorted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckptools.browse.row_list import Line, text_of
from ckptools.contents.record import KeyRow, Keys
from ckptools.contents.text import branches_of, joined, rows_in, values_text
from ckptools.contents.tree import totals
from ckptools.diff.record import Difference, TensorDifference, ValueDifference
from ckptools.diff.text import NOT_LISTED
from ckptools.display.screen import Mark
from ckptools.dtypes import short
from ckptools.keys.entries import Branch, is_glob, label_text, pattern
from ckptools.stats.record import Stats
from ckptools.text import clip, clip_middle, number, plural, printable, shape, size

Order = Literal["as saved", "size", "rms", "change"]

MAX_VALUE = 60
"""Longest value in a row, in characters."""

MAX_SHAPE = 20
"""Widest column of shapes, in characters."""


class Fault(NamedTuple):
    """The worst problem of a key: `NaN`, or its code; and its mark."""

    words: str
    mark: Mark


NO_FAULT = Fault("", "")

NAN = "NaN"
"""Words of the fault of a tensor with NaN or infinite elements."""

SIZE_WIDTH = 9
"""Columns of a size, such as `745.0 KiB`; a longer one moves what stands before it."""


@dataclass(slots=True)
class TreeNode:
    """A row of the list: a branch of the tree, or one key.

    Attributes:
        branch: the branch; None for a single key.
        row: the key; None for a branch.
        opened: whether the rows inside the branch are shown below it.
        total: size of the keys in the branch, in words, once computed.
        faults: faults of the keys in the row, once counted; None before.
    """

    depth: int
    name: str
    branch: Branch[KeyRow] | None = None
    row: KeyRow | None = None
    opened: bool = False
    total: str = ""
    faults: Fault | None = None

    @property
    def rows(self) -> list[KeyRow]:
        """All keys in the branch, or the single key."""
        return [self.row] if self.row is not None else rows_in(self.branch) if self.branch is not None else []

    @property
    def opens(self) -> bool:
        """Whether the row can be unfolded."""
        return self.branch is not None and bool(self.branch.children or len(self.branch.items) > 1)

    def inside(self) -> Iterator[TreeNode]:
        """Yield the rows of the next level."""
        if self.branch is None:
            return
        if len(self.branch.items) > 1:
            yield from (TreeNode(self.depth + 1, row.name, row=row) for row in self.branch.items)
        for child in self.branch.children:
            yield _node(self.depth + 1, *joined(child))


def _node(depth: int, name: str, branch: Branch[KeyRow]) -> TreeNode:
    alone = branch.items[0] if len(branch.items) == 1 and not branch.children else None
    return TreeNode(depth, name, branch, alone)


class KeyTree:
    """The list of keys; a filter or an order turns the tree into a flat list of full names."""

    def __init__(self, keys: Keys, expand: bool = False) -> None:
        self.keys = keys
        self.order: Order = "as saved"
        self.text = ""
        self.changes: dict[str, TensorDifference | ValueDifference] = {}
        self.figures: dict[str, Stats] = {}
        self.only = False
        self.faults: dict[str, Fault] = {}
        self._nodes: list[TreeNode] = []
        self._flat: Sequence[KeyRow] | None = None
        self._by_name = {row.name: row for row in keys.rows}
        kinds = {(row.shape or (), row.dtype) for row in keys.rows if row.type == "tensor"}
        self._shape_width = min(max((len(shape(sizes)) for sizes, _ in kinds), default=0), MAX_SHAPE)
        self._dtype_width = max((len(short(dtype)) for _, dtype in kinds), default=0)
        self.unfold(expand)

    # -- filter and order ---------------------------------------------------------------------------------------------

    def unfold(self, expand: bool) -> None:
        """Build the tree with repeated layers folded into one row, or with every layer."""
        self.expanded = expand
        self._nodes = [_node(0, label_text(one.labels), one) for one in branches_of(self.keys, expand)]
        if len(self._nodes) == 1:
            self.open(0)
        for node in self._nodes:  # slow, so compute it in this thread, not while drawing
            node.total = _total(node)

    def compared(self, difference: Difference) -> None:
        """Add the differences from the other checkpoint, and sort by change, the largest first."""
        self.changes = {}
        for row in difference.rows:
            if row.verdict not in NOT_LISTED:
                self.changes.setdefault(row.name, row)  # the first of several ranks
        self.arrange(self.text, "change")

    def arrange(self, text: str, order: Order) -> None:
        """Show the keys that contain a text or match a glob, in an order; if `only`, those with problems."""
        self.text, self.order = text, order
        if not text and order == "as saved" and not self.only:
            self._flat = None
            return
        rows: Sequence[KeyRow] = self.keys.rows
        if order == "change":
            rows = [self._by_name.get(name) or _only_in_b(change) for name, change in self.changes.items()]
        if self.only:
            rows = [row for row in rows if row.name in self.faults]
        if text:
            matches = pattern((text,)).fullmatch if is_glob(text) else lambda name: text.lower() in name.lower()
            rows = [row for row in rows if matches(row.name)]
        self._flat = self._sorted(rows)

    @property
    def counted(self) -> str:
        """How many keys the filter for problems leaves; "" without it."""
        return f"problems only: {len(self):,} of {len(self.keys.rows):,} keys" if self.only else ""

    def mark(self, faults: Mapping[str, Fault]) -> None:
        """Mark keys that have problems, and the branches above them."""
        self.faults = {**faults}
        for node in self._nodes:
            node.faults = None
        self.arrange(self.text, self.order)

    def faulty(self, rows: Iterable[KeyRow]) -> list[tuple[KeyRow, Fault]]:
        """The keys that have problems, each with its fault, NaN first."""
        found = [(row, self.faults[row.name]) for row in rows if row.name in self.faults] if self.faults else []
        return sorted(found, key=lambda one: (one[1].mark != "bad", one[1].words != NAN))

    def _sorted(self, rows: Sequence[KeyRow]) -> Sequence[KeyRow]:
        if self.order == "size":
            return sorted(rows, key=lambda row: -row.bytes)
        if self.order == "rms":
            known = [row for row in rows if row.name in self.figures]
            return sorted(known, key=lambda row: -(self.figures[row.name].rms or 0.0))
        if self.order == "change":
            return sorted(rows, key=lambda row: -_change(self.changes[row.name]))
        return rows

    def __len__(self) -> int:
        return len(self._nodes) if self._flat is None else len(self._flat)

    def node(self, n: int) -> TreeNode:
        """Return the node shown in a row."""
        return self._nodes[n] if self._flat is None else TreeNode(0, self._flat[n].name, row=self._flat[n])

    # -- folding and unfolding ----------------------------------------------------------------------------------------

    def open(self, n: int) -> bool:
        """Unfold a row; False if nothing is inside or it is already unfolded."""
        node = self.node(n) if n < len(self) else None
        if node is None or not node.opens or node.opened:
            return False
        node.opened = True
        self._nodes[n + 1 : n + 1] = node.inside()
        return True

    def close(self, n: int) -> int:
        """Fold a row, or its parent if it is not unfolded; return the row for the cursor."""
        if self._flat is not None or n >= len(self):
            return n
        if not self._nodes[n].opened:
            depth = self._nodes[n].depth
            n = next((at for at in range(n - 1, -1, -1) if self._nodes[at].depth < depth), n)
        end = n + 1
        while end < len(self._nodes) and self._nodes[end].depth > self._nodes[n].depth:
            end += 1
        del self._nodes[n + 1 : end]
        self._nodes[n].opened = False
        return n

    def reveal(self, name: str) -> int | None:
        """Unfold the tree down to a key; return its row, or None if the key does not exist."""
        wanted = self._by_name.get(name)
        if wanted is None:
            return None
        self.only = False
        self.arrange("", "as saved")
        n = 0
        while n < len(self):
            node = self.node(n)
            if not any(row is wanted for row in node.rows):
                n += 1
            elif node.row is wanted:
                return n
            else:
                self.open(n)
                n += 1
        return None

    # -- a row as text ------------------------------------------------------------------------------------------------

    def line(self, n: int, width: int) -> Line:
        """Render a row in a width: name, fault, shape and dtype, size.

        Where there is no room for all of it, the shape and dtype go first, then the size; the name is cut last.
        """
        node = self.node(n)
        sign = ("- " if node.opened else "+ ") if node.opens else "  "
        before = "  " * node.depth + sign
        name, behind = printable(node.name), self._behind(node)
        fault = self._fault_of(node)
        told = [(f"{fault.words}  ", fault.mark)] if fault.words else []
        changed = node.row is not None and node.row.name in self.changes
        described = (self._described(node), "dim")
        short_end: Line = [*told, (behind, "")]
        ends: tuple[Line, ...] = ([*told, described, (f"{behind:>{SIZE_WIDTH}}", "")], short_end, told)
        room = width - len(before) - 1
        end = next((end for end in ends if len(name) + len(text_of(end)) <= room), short_end)
        room = max(room - len(text_of(end)), 8)
        return [(f"{before}{clip_middle(name, room):{room}} ", fault.mark or ("warn" if changed else "")), *end]

    def _described(self, node: TreeNode) -> str:
        """Shape and dtype that all keys in a row share, in columns; spaces if they share none."""
        rows = [node.row] if node.row is not None else node.branch.items if node.branch is not None else []
        inner = node.branch.children if node.branch is not None else ()
        kinds = {(row.shape if row.type == "tensor" else None, row.dtype) for row in rows} if not inner else set()
        sizes, dtype = kinds.pop() if len(kinds) == 1 else (None, "")
        texts = (clip(shape(sizes), MAX_SHAPE), short(dtype)) if sizes is not None else ("", "")
        return f"{texts[0]:{self._shape_width}} {texts[1]:{self._dtype_width}} "

    def _fault_of(self, node: TreeNode) -> Fault:
        """The worst fault in a row; of a branch, with the number of its keys that have one."""
        if node.faults is None:
            found = [fault for _, fault in self.faulty(node.rows)]
            worst = found[0] if found else NO_FAULT
            many = f" in {found.count(worst):,}" if node.row is None and found else ""
            node.faults = Fault(f"{worst.words}{many}", worst.mark)
        return node.faults

    def _behind(self, node: TreeNode) -> str:
        """Return the text after the name: size or value, or the value by which the list is sorted."""
        row = node.row
        if row is None:
            node.total = node.total or _total(node)
            return node.total
        if self.order == "change" and row.name in self.changes:
            return change_text(self.changes[row.name])
        if self.order == "rms" and row.name in self.figures:
            return f"rms {number(self.figures[row.name].rms or 0.0)}"
        return size(row.bytes) if row.type == "tensor" else clip(values_text([row]), MAX_VALUE)


def _total(node: TreeNode) -> str:
    """Total size of a branch, or its number of values, after the number of layers folded into it: `x12 3.1 GiB`."""
    rows = node.rows
    found = totals(rows)
    times = f"x{len(node.branch.items)} " if node.branch is not None and len(node.branch.items) > 1 else ""
    return times + (size(found.bytes) if found.tensors else plural(len(rows), "value"))


def _only_in_b(change: TensorDifference | ValueDifference) -> KeyRow:
    """Make a row for a key that only the other checkpoint has."""
    shape = getattr(change, "shape_b", None)
    kind = "tensor" if isinstance(change, TensorDifference) else "value"
    return KeyRow(change.name, "", "other", kind, shape, "", 0, 0, "", None, "", change.verdict)


def _change(change: TensorDifference | ValueDifference) -> float:
    """Sort key of a change: a tensor without measures, such as a reshaped one, comes first, a plain value last."""
    if not isinstance(change, TensorDifference):
        return -1.0
    return float("inf") if change.change is None else change.change


def change_text(change: TensorDifference | ValueDifference) -> str:
    """Describe how a key differs in a few characters: `|dW|/|W| 1.2e-03`, `0.1 -> 0.2`, `only in A`."""
    if isinstance(change, TensorDifference):
        return f"|dW|/|W| {change.change:.1e}" if change.change is not None else change.verdict
    if change.value_a is None or change.value_b is None:
        return change.verdict
    return clip(printable(f"{change.value_a} -> {change.value_b}"), MAX_VALUE // 2)
