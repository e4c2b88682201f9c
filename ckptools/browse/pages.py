"""The tabs of `browse`: their rows, and the details of a row; texts of other commands, cut to the screen width."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptools.browse.key_tree import KeyTree, TreeNode
from ckptools.browse.row_list import Line
from ckptools.browse.session import CheckpointReport, Session, command_line, glob_of
from ckptools.contents.record import KeyRow, Shown
from ckptools.contents.show import stated
from ckptools.contents.text import figures_line, shown_text
from ckptools.contents.tree import totals
from ckptools.diff.record import TensorDifference
from ckptools.display.next_command import quoted
from ckptools.display.screen import HEADLINES, SGR, Mark, Screen
from ckptools.display.tables import incident_lines, table, wrapped
from ckptools.inspect.record import facts_text, optimizer_lines, scheduler_words
from ckptools.model.facts import RankFile
from ckptools.model.incidents import consequences_of, incidents_of, problems_by_cause
from ckptools.model.problems import Problem, Severity
from ckptools.model.records import to_dict
from ckptools.model.tensor import Tensor
from ckptools.pictures.rank_map import Grouping, RankCell, grouping, rank_cells
from ckptools.stats.record import Stats, histogram
from ckptools.text import KeyPath, clip_middle, count, fqn_of, is_within, moment, number, plural, printable, size

if TYPE_CHECKING:
    from ckptools.keys.entries import Entry
    from ckptools.ls.record import CheckpointRow, RunFolder


MARKS: dict[Severity, Mark] = {"error": "bad", "warning": "warn", "note": "dim"}

_PAINTED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m")
_MARK_OF = {code: mark for mark, code in SGR.items()}


class Row(NamedTuple):
    """A row of a list: text, mark, target of Enter, and a name at the end, shortened in the middle to fit.

    The text may have the colours of a terminal, as `display` paints a printable text.
    """

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

    def line(self, n: int, width: int) -> Line:
        """Return a row with its mark."""
        row = self.rows[n]
        if row.name:
            return [(row.text + clip_middle(printable(row.name), max(width - len(row.text), 8)), row.mark)]
        return list(_parts(row))


def _parts(row: Row) -> Iterator[tuple[str, str]]:
    """Divide a row where its text changes colour."""
    before, *painted = _PAINTED.split(row.text)
    yield before, row.mark
    for code, text, after in zip(painted[::3], painted[1::3], painted[2::3], strict=True):
        yield text, _MARK_OF.get(code, "")
        yield after, row.mark


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
        self.rows = PageRows(self.text(Screen(width, color=True)).split("\n"))

    def detail(self, _n: int, _width: int) -> Callable[[], PageRows]:
        """Nothing: the tab has no details."""
        return PageRows

    def command_of(self, _n: int) -> str:
        """The command that prints the text."""
        return self.command


@dataclass
class ListPage:
    """A tab with a list, and details of the row under the cursor; `counted` says how many rows a filter leaves."""

    rows: PageRows
    about: Callable[[Any, Screen], Iterable[str]]
    command: Callable[[Any], str]
    counted: str = ""
    wide = False

    def fit(self, _width: int) -> None:
        """Nothing: rows are cut when they are drawn."""

    def detail(self, n: int, width: int) -> Callable[[], PageRows]:
        """Return a function that makes the details of a row."""
        target = self.rows.rows[n].target if n < len(self.rows) else None
        return lambda: PageRows(() if target is None else self.about(target, Screen(max(width, 20), color=True)))

    def command_of(self, n: int) -> str:
        """The command that prints the same data."""
        return self.command(self.rows.rows[n].target if n < len(self.rows) else None)


class Card(NamedTuple):
    """The target of an incident's rows: its problems, the worst first."""

    problems: tuple[Problem, ...]


@dataclass
class HomePage:
    """The first tab: a card for each incident, the next command, then the facts of `inspect`."""

    looked: CheckpointReport
    arguments: str
    rows: PageRows = field(default_factory=PageRows)
    wide = True

    def fit(self, width: int) -> None:
        """Wrap the texts for a width."""
        self.rows = PageRows(self._rows(Screen(width, MANY_ROWS, color=True)))

    def _rows(self, screen: Screen) -> Iterator[Row]:
        report = self.looked.report
        for text in (report.verdict.remark, "" if report.verdict.causes else report.verdict.headline):
            if text:
                mark = HEADLINES[report.verdict.level] if text == report.verdict.headline else ""
                yield from map(Row, wrapped("", printable(text), screen, mark=mark))
                yield Row("")
        for card, lines in cards(report.problems, screen):
            yield from (Row(line, "", card) for line in lines)
            yield Row("")
        if report.next:
            next_lines = wrapped("next: ", report.next, screen, label="heading", mark="change")
            yield from (Row(line, "", report.next) for line in next_lines)
            yield Row("")
        yield from map(Row, facts_text(report, screen._replace(rows=None)).split("\n"))

    def detail(self, _n: int, _width: int) -> Callable[[], PageRows]:
        """Nothing: the tab has no details."""
        return PageRows

    def command_of(self, n: int) -> str:
        """The next command on its own row; else the command that prints the page."""
        target = self.rows.rows[n].target if n < len(self.rows) else None
        return target if isinstance(target, str) else command_line("inspect", self.arguments)


MANY_ROWS = 1000
"""Rows of a screen on which the evidence of an incident is cut, as on a terminal; the page scrolls."""


def cards(problems: Sequence[Problem], screen: Screen) -> Iterator[tuple[Card, list[str]]]:
    """Yield each incident, the worst first, with its lines: culprit, evidence, remedy, and what follows from it."""
    problems_of = dict(problems_by_cause(problems))
    incidents, following = incidents_of(problems_of), consequences_of(problems)
    lost = following[0].causes if following else ()
    leading = [one for one in incidents if any(cause.code in lost for cause in one.causes)]
    for one in incidents:
        lines = incident_lines(one.causes, following if one in leading[-1:] else (), screen)
        yield Card(tuple(problem for cause in one.causes for problem in problems_of[cause])), lines


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


def files(session: Session, looked: CheckpointReport, only: bool) -> ListPage:
    """Make the tab of files, or `only` of files with problems; details are the problems of a file."""
    problems = looked.report.problems
    marks = {"missing": "bad", "cut": "bad", "bad": "bad", "seen": "dim", "listed": "dim"}
    every = looked.checkpoint.files
    kept = [file for file in every if not only or marks.get(file.status) == "bad" or _own(problems, file)]
    rows = [
        Row(f"{file.status:8} {size(file.nbytes):>10}  ", marks.get(file.status, ""), file, file.path.name)
        for file in kept
    ]

    def about(file: RankFile, screen: Screen) -> Iterable[str]:
        yield from wrapped("", printable(str(file.path)), screen)
        yield f"{file.status}, {size(file.nbytes)}" + ("" if file.rank is None else f", rank {file.rank}")
        if file.part:
            yield printable(f"holds {file.part}")
        if file.modified:
            yield f"saved {moment(file.modified)}"
        yield from _incidents(_own(problems, file), screen)

    counted = f"problems only: {len(kept):,} of {len(every):,} files" if only else ""
    rows = rows or [Row("it has no files" if not every else "")]
    return ListPage(PageRows(rows), about, lambda _: command_line("verify", session.arguments), counted)


def _own(problems: Iterable[Problem], file: RankFile) -> list[Problem]:
    """The problems of a file, or of its rank."""
    of_rank = (p for p in problems if file.rank is not None and file.rank in p.all_ranks)
    named = (p for p in problems if file.rank not in p.all_ranks and any(map(file.is_called, p.files)))
    return [*of_rank, *named]


def _incidents(problems: Sequence[Problem], screen: Screen) -> Iterator[str]:
    for _, lines in cards(problems, screen):
        yield ""
        yield from lines


@dataclass
class RankPage:
    """The tab of ranks: a map of all of them by the device mesh; details are of the rank under the cursor.

    Attributes:
        kept: numbers of the cells that are shown: all, or those of ranks with problems.
    """

    looked: CheckpointReport
    cells: Sequence[RankCell]
    how: Grouping
    kept: Sequence[int]
    command: str
    counted: str
    wide = False

    def fit(self, _width: int) -> None:
        """Nothing: the map arranges its cells."""

    def detail(self, n: int, width: int) -> Callable[[], PageRows]:
        """Return a function that makes the details of a rank."""
        return lambda: PageRows(self._about(n, Screen(max(width, 20), color=True)) if self.kept else ())

    def _about(self, n: int, screen: Screen) -> Iterator[str]:
        rank = self.cells[n].rank
        yield from wrapped("", printable(self.cells[n].words), screen, mark="heading")
        if self.how.words:
            yield from wrapped("", printable(self.how.words), screen)
        if rank is not None:
            yield from _incidents([p for p in self.looked.report.problems if rank in p.all_ranks], screen)

    def command_of(self, _n: int) -> str:
        """The command that prints the same data."""
        return self.command


def ranks(session: Session, looked: CheckpointReport, only: bool) -> RankPage:
    """Make the tab of ranks, or `only` of ranks with problems."""
    cells = rank_cells(looked.checkpoint, [*looked.checkpoint.problems, *session.found] if session.found else None)
    ranked = sum(cell.rank is not None for cell in cells)
    how = grouping(looked.checkpoint, ranked)
    kept = [n for n, cell in enumerate(cells) if not only or cell.state not in ("fine", "looked at")]
    noun = "ranks" if ranked == len(cells) else "ranks and files of no rank" if ranked else "files"
    counted = f"problems only: {len(kept):,} of {len(cells):,} {noun}" if only else ""
    return RankPage(looked, cells, how, kept, command_line("inspect", session.arguments, "--all-ranks"), counted)


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
        saved = f", saved {moment(seconds_of(row.saved))}" if row.saved else ""
        yield from wrapped("", size(row.bytes) + saved, screen)
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
    def counted(self) -> str:
        """How many keys the filter for problems leaves; "" without it."""
        return self.tree.counted

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
        return lambda: PageRows(self._about(node, Screen(max(width, 20), color=True)) if node is not None else ())

    def _about(self, node: TreeNode, screen: Screen) -> Iterator[str]:
        row = node.row
        if row is None:
            rows = node.rows
            found = totals(rows)
            yield from wrapped("", printable(node.name), screen)
            if found.tensors:
                counted = f"{plural(found.tensors, 'tensor')}, {count(found.params)} params, {size(found.bytes)}"
                yield from wrapped("", counted, screen)
            if len(rows) > found.tensors:
                yield plural(len(rows) - found.tensors, "other value")
            yield ""
            for row, fault in self.tree.faulty(rows)[:MOST]:
                yield from wrapped(f"{fault.words}  ", printable(row.name), screen, label=fault.mark, mark=fault.mark)
            yield from (printable(row.name) for row in rows[:MOST])
            if len(rows) > MOST:
                yield f"{len(rows) - MOST} more"
            return
        yield from self._problem_lines(row, screen)
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

    def _problem_lines(self, row: KeyRow, screen: Screen) -> Iterator[str]:
        entry, looked = self.session.entries.get(row.name), self.session.looked
        problems = looked.report.problems if looked is not None and entry is not None else ()
        named = [p for p in problems if p.tensor is not None and p.severity != "note"]
        own = [p for p in named if entry is not None and any(is_within(name, p.tensor or "") for name in entry.names)]
        for problem in own[:MOST]:
            rank = "" if problem.rank is None else f"rank {problem.rank}: "
            mark = MARKS[problem.severity]
            yield from wrapped(f"{problem.code}  ", printable(rank + problem.message), screen, label=mark, mark=mark)
        yield from [""] * bool(own)

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
    """Render the statistics of a tensor, and its histogram from the smallest to the largest element.

    On a narrow screen, the histogram has half as many bins.
    """
    yield from wrapped("", figures_line(to_dict(row)), screen)
    if row.histogram is not None and row.min is not None and row.max is not None:
        bins = row.histogram
        if screen.width is not None and len(bins) > screen.width:
            bins = tuple(map(sum, zip(bins[::2], bins[1::2], strict=True)))
        yield histogram(bins)
        yield f"{number(row.min)} .. {number(row.max)}"
    if row.problem:
        yield from wrapped("", printable(row.problem), screen)
    yield ""
