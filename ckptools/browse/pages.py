"""The tabs of `browse`: their rows, and the details of a row; texts of other commands, cut to the screen width."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptools.browse.key_tree import KeyTree, TreeNode
from ckptools.browse.session import CheckpointReport, Session, command_line, glob_of
from ckptools.contents.record import Shown
from ckptools.contents.show import stated
from ckptools.contents.text import figures_line, shown_text
from ckptools.contents.tree import totals
from ckptools.diff.record import TensorDifference
from ckptools.display.next_command import quoted
from ckptools.display.screen import Screen
from ckptools.display.tables import table, wrapped
from ckptools.inspect.record import optimizer_lines, report_text, scheduler_words
from ckptools.model.facts import RankFile
from ckptools.model.incidents import consequences_of, incidents_of, problems_by_cause
from ckptools.model.problems import Problem
from ckptools.model.records import to_dict
from ckptools.model.tensor import Tensor
from ckptools.stats.record import Stats, histogram
from ckptools.text import KeyPath, clip_middle, count, fqn_of, moment, number, plural, printable, size

if TYPE_CHECKING:
    from ckptools.keys.entries import Entry
    from ckptools.ls.record import CheckpointRow, RunFolder
    from ckptools.pictures.rank_map import Grouping, RankCell


MARKS = {"error": "bad", "warning": "warn", "note": "dim"}


class Row(NamedTuple):
    """A row of a list: text, mark, target of Enter, and a name at the end, shortened in the middle to fit."""

    text: str
    mark: str = ""
    target: Any = None
    name: str = ""


class PageRows:
    """Rows that are all computed in advance; also the placeholder while there are none."""

    def __init__(self, rows: Iterable[Row | str] = ()) -> None:
        self.rows = [row if isinstance(row, Row) else Row(row) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def line(self, n: int, width: int) -> tuple[str, str]:
        """Return a row as text, and its mark."""
        row = self.rows[n]
        return row.text + clip_middle(printable(row.name), max(width - len(row.text), 8)), row.mark


# -- problems ----------------------------------------------------------------------------------------------------------


def problem_rows(looked: CheckpointReport) -> PageRows:
    """Make a row for each cause, the worst first, with its remedy below; Enter leads to its problems."""
    return PageRows(list(_cause_rows(looked.report.problems)) or [Row("no problem was found", "good")])


def _cause_rows(problems: Sequence[Problem]) -> Iterator[Row]:
    problems_of = dict(problems_by_cause(problems, ("error", "warning", "note")))
    for one in incidents_of(problems_of):
        for cause in one.causes:
            yield Row(printable(f"{cause.code}  {cause.words}"), MARKS[cause.severity], problems_of[cause])
        if one.remedy:
            yield Row(printable(f"       {one.remedy}"), "dim", problems_of[one.causes[0]])
    for following in consequences_of(problems):
        of_code = tuple(problem for problem in problems if problem.code == following.code)
        yield Row(printable(f"       -> {following.text}"), "dim", of_code)


# -- tabs --------------------------------------------------------------------------------------------------------------


@dataclass
class TextPage:
    """A tab with one text over the whole width; `text` renders it for a screen."""

    text: Callable[[Screen], str]
    command: str
    rows: PageRows = field(default_factory=PageRows)
    wide = True

    def fit(self, width: int) -> None:
        """Render the text for a width."""
        self.rows = PageRows(Row(line, "") for line in self.text(Screen(width)).split("\n"))

    def detail(self, _n: int, _width: int) -> Callable[[], PageRows]:
        """Nothing: the tab has no details."""
        return PageRows

    def command_of(self, _n: int) -> str:
        """The command that prints the text."""
        return self.command


@dataclass
class ListPage:
    """A tab with a list, and details of the row under the cursor."""

    rows: PageRows
    about: Callable[[Any, Screen], Iterable[str]]
    command: Callable[[Any], str]
    wide = False

    def fit(self, _width: int) -> None:
        """Nothing: rows are cut when they are drawn."""

    def detail(self, n: int, width: int) -> Callable[[], PageRows]:
        """Return a function that makes the details of a row."""
        target = self.rows.rows[n].target if n < len(self.rows) else None
        return lambda: PageRows(() if target is None else self.about(target, Screen(max(width, 20))))

    def command_of(self, n: int) -> str:
        """The command that prints the same data."""
        return self.command(self.rows.rows[n].target if n < len(self.rows) else None)


def overview(session: Session, looked: CheckpointReport) -> TextPage:
    """Make the tab with the text of `inspect`."""
    return TextPage(lambda screen: report_text(looked.report, screen), command_line("inspect", session.arguments))


def training(session: Session, looked: CheckpointReport) -> TextPage:
    """Make the tab of optimizers with their param groups, and of schedulers."""
    report = looked.report

    def text(screen: Screen) -> str:
        blocks = [optimizer_lines(optimizer, screen) for optimizer in report.optimizers]
        for scheduler in report.schedulers:
            blocks.append(
                wrapped(
                    f"{printable(scheduler.section)}: ", printable(scheduler_words(scheduler, private=True)), screen
                )
            )
        return "\n\n".join("\n".join(block) for block in blocks) or "it has neither optimizer nor scheduler"

    here = "optimizer" if report.optimizers else "scheduler" if report.schedulers else ""
    return TextPage(text, command_line("inspect", session.arguments, *(["--section", here] if here else [])))


def files(session: Session, looked: CheckpointReport) -> ListPage:
    """Make the tab of files; details are the problems of a file."""
    found = looked.checkpoint.files
    marks = {"missing": "bad", "cut": "bad", "bad": "bad", "seen": "dim", "listed": "dim"}
    rows = [
        Row(f"{file.status:8} {size(file.nbytes):>10}  ", marks.get(file.status, ""), file, file.path.name)
        for file in found
    ]

    def about(file: RankFile, screen: Screen) -> Iterable[str]:
        yield from wrapped("", printable(str(file.path)), screen)
        yield f"{file.status}, {size(file.nbytes)}" + ("" if file.rank is None else f", rank {file.rank}")
        if file.part:
            yield printable(f"holds {file.part}")
        if file.modified:
            yield f"saved {moment(file.modified)}"
        yield from _problems(looked.report.problems, screen, file.rank, file.path.name)

    return ListPage(
        PageRows(rows or [Row("it has no files")]), about, lambda _: command_line("verify", session.arguments)
    )


def _problems(problems: Sequence[Problem], screen: Screen, rank: int | None, name: str = "") -> Iterable[str]:
    """Render the problems of a rank or a file, by cause."""
    own = [p for p in problems if (rank is not None and rank in p.all_ranks) or (name and name in p.files)]
    for row in _cause_rows(own):
        yield from wrapped(row.text[:7], row.text[7:], screen)


def ranks(session: Session, looked: CheckpointReport) -> ListPage:
    """Make the tab of ranks; details are a map of all ranks by the device mesh, and the rank's problems."""
    from ckptools.pictures.rank_map import STATES, grouping, rank_cells

    cells = rank_cells(looked.checkpoint)
    how = grouping(looked.checkpoint, sum(cell.rank is not None for cell in cells))
    rows = [Row(_rank_text(cell), "bad" if cell.state in ("missing", "cut") else "", n) for n, cell in enumerate(cells)]

    def about(n: int, screen: Screen) -> Iterable[str]:
        yield from wrapped("", printable(cells[n].words), screen)
        yield from ([printable(how.words)] if how.words else [])
        yield from rank_grid(cells, how, n, screen.width or 80)
        for state in dict.fromkeys(cell.state for cell in cells):
            yield f"{STATES[state].letter or '.'}  {STATES[state].means}"
        yield ""
        yield from _problems(looked.report.problems, screen, cells[n].rank)

    return ListPage(
        PageRows(rows or [Row("it has no files")]),
        about,
        lambda _: command_line("inspect", session.arguments, "--all-ranks"),
    )


def _rank_text(cell: RankCell) -> str:
    """Render a rank as a row: `rank 2    cut        1 file, 7.3 KiB; CK002`."""
    whose, _, rest = cell.words.partition(": ")
    return printable(f"{whose:9} {'' if cell.state == 'fine' else cell.state:9} {rest.partition('; ')[2]}")


def rank_grid(cells: Sequence[RankCell], how: Grouping, at: int, width: int) -> list[str]:
    """Draw a map of ranks, a letter for each rank that is not fine, with gaps between groups of the device mesh.

    `at` is the marked rank: with `>` before it, or `@` in its place if two columns for each rank are too wide.
    """
    from ckptools.pictures.rank_map import STATES

    wide = 2 if 2 * how.group + 6 <= width else 1
    fitting = max((width - 6) // (wide * how.group + 1), 1)
    across = min(how.across, fitting * how.group, max(len(cells), 1))
    lines = []
    for start in range(0, len(cells), across):
        row = [f"{cells[start].rank if cells[start].rank is not None else '':>4} "]
        for n in range(start, min(start + across, len(cells))):
            letter = STATES[cells[n].state].letter or "."
            gap = " " if n > start and (n - start) % how.group == 0 else ""
            row.append(gap + (letter if n != at else "@") if wide == 1 else f"{gap}{'>' if n == at else ' '}{letter}")
        lines += [""] if start and start % how.block == 0 else []
        lines.append("".join(row))
    return lines


def unshared(session: Session, looked: CheckpointReport, full: dict[str, Shown]) -> ListPage | TextPage:
    """Make the tab of values that differ between ranks; Enter reads the value of each rank."""
    ck = looked.checkpoint
    own = {**ck.unequal, **ck.per_rank}
    if not own:
        unread = "" if ck.structure_read else "; not every rank was read"
        words = f"no value was found that a rank has for itself, or that ranks should share and do not{unread}"
        command = command_line("inspect", session.arguments, "--all-ranks")
        return TextPage(lambda screen: "\n".join(wrapped("", words, screen)), command)
    below, differing = _entries_below(session, own), set(ck.differing)
    rows, what_enter_reads = [], {}
    for path, by_rank in own.items():
        name, entry = below.get(path, (fqn_of(path), None))
        word = "should be equal" if path in ck.unequal else "differs" if path in differing else "own"
        rows.append(Row(f"{word:15} ", "warn" if path in ck.unequal else "", name, name))
        one = entry is not None and isinstance(entry.value, Tensor) and entry.kind != "rng"
        what = f"that of rank {min(by_rank)}" if one else "what each has"
        what_enter_reads[name] = f"{word}, on {plural(len(by_rank), 'rank')}; Enter reads {what}"

    def about(name: str, screen: Screen) -> Iterable[str]:
        if name in full:
            yield from shown_text(full[name], screen).split("\n")
        else:
            yield from wrapped("", printable(name), screen)
            yield from wrapped("", what_enter_reads[name], screen)

    return ListPage(PageRows(rows), about, lambda name: command_line("show", session.arguments, name))


def _entries_below(session: Session, paths: Container[KeyPath]) -> dict[KeyPath, tuple[str, Entry]]:
    """Map each path to its name, as `show` takes it, and to the first key at or below the path."""
    found: dict[KeyPath, tuple[str, Entry]] = {}
    for entry in session.entries.values():
        n = next((n for n in range(len(entry.path) + 1) if entry.path[:n] in paths), None)
        if n is not None:
            inside = fqn_of(entry.path[n:])
            found.setdefault(entry.path[:n], (entry.name.removesuffix(f".{inside}") if inside else entry.name, entry))
    return found


def checkpoints(session: Session, run: RunFolder) -> ListPage:
    """Make the tab of the run's checkpoints, the newest first; Enter opens one."""
    from ckptools.ls.record import COLUMN_OF, all_cells, headline, seconds_of

    cells = [(row.step, row.ranks, row.whole.partition(":")[0]) for row in all_cells(run)]
    lines = table([COLUMN_OF[name] for name in ("step", "ranks", "whole")], cells, Screen(200))
    marks = ["good" if row.newest_whole else "bad" if row.whole is False else "" for row in run.rows]
    rows = [Row(f"{line}  ", mark, row, row.name) for line, mark, row in zip(lines[2:], marks, run.rows, strict=False)]

    def about(row: CheckpointRow, screen: Screen) -> Iterable[str]:
        yield from wrapped("", headline(run), screen)
        for text in (row.path, row.verdict, row.why, row.remedy, f"looked into by {row.looked_into}", *row.notes):
            yield from wrapped("", printable(text), screen) if text else []
        yield size(row.bytes) + (f", saved {moment(seconds_of(row.saved))}" if row.saved else "")
        yield "<- newest whole" if row.newest_whole else ""

    return ListPage(
        PageRows(rows or [Row("no checkpoint is in it")]), about, lambda _: command_line("ls", quoted([str(run.path)]))
    )


# -- the tab of keys: the tree, and details of the key under the cursor ------------------------------------------------


MOST = 200
"""At most this many keys of a branch are listed in its details."""


@dataclass
class KeyPage:
    """The tab of keys: their tree, and data read about them so far.

    Attributes:
        tree: rows of the list.
        full: record of `show` for a key, by name.
        elements: record of `show` with a slice of elements, by name.
    """

    session: Session
    tree: KeyTree
    full: dict[str, Shown] = field(default_factory=dict)
    elements: dict[str, Shown] = field(default_factory=dict)
    wide = False

    @property
    def rows(self) -> KeyTree:
        """The rows of the list."""
        return self.tree

    def fit(self, _width: int) -> None:
        """Nothing: rows are cut when they are drawn."""

    def node(self, n: int) -> TreeNode | None:
        """Return the node in a row; None if the list is empty."""
        return self.tree.node(n) if n < len(self.tree) else None

    def detail(self, n: int, width: int) -> Callable[[], PageRows]:
        """Return a function that makes the details of a row, without opening files."""
        node = self.node(n)
        return lambda: PageRows(self._about(node, Screen(max(width, 20))) if node is not None else ())

    def _about(self, node: TreeNode, screen: Screen) -> Iterator[str]:
        row = node.row
        if row is None:
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

    def tensors(self, n: int) -> list[str]:
        """Names of the tensors in a row."""
        node = self.node(n)
        return [row.name for row in node.rows if row.type == "tensor"] if node is not None else []

    def command_of(self, n: int) -> str:
        """Command that prints the same data: `diff` with two checkpoints, else `show`, `stats` or `tree`."""
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
        """Value of `consolidate --only` that writes a row: a kind of section, or a glob of names in the model.

        None if no glob matches exactly the keys of the row.
        """
        node = self.node(n)
        rows = node.rows if node is not None else []
        kinds = {row.kind for row in rows}
        every = [row for row in self.tree.keys.rows if row.kind in kinds]
        if len(kinds) == 1 and kinds <= {"model", "optimizer"} and len(rows) == len(every):
            return kinds.pop()
        return glob_of(rows, every) if kinds == {"model"} else None


def figures(row: Stats, screen: Screen) -> Iterator[str]:
    """Render the statistics of a tensor, and its histogram from the smallest to the largest element."""
    yield from wrapped("", figures_line(to_dict(row)), screen)
    if row.histogram is not None and row.min is not None and row.max is not None:
        yield histogram(row.histogram)
        yield f"{number(row.min)} .. {number(row.max)}"
    if row.problem:
        yield from wrapped("", printable(row.problem), screen)
    yield ""
