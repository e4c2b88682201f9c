"""The record of `inspect` as text: whether the checkpoint is whole, its step and its contents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckptools.display.lines import cause_lines, key_name, value_text
from ckptools.display.palette import HEADLINES, painted
from ckptools.display.tables import PIPE, Column, Screen, broken, table, wrapped
from ckptools.inspect.record import Report, SectionRow
from ckptools.inspect.section_summary import GroupRow, OptimizerRow, SchedulerRow
from ckptools.keys.sharding import ShardingRow
from ckptools.model.causes import causes_of, consequences_of
from ckptools.model.problems import Severity
from ckptools.text import clip_name, count, duration, few, period, plural, printable, size
from ckptools.training_state.sections import is_private_name
from ckptools.training_state.steps import RANKS_DIFFER

MAX_PROBLEMS = 20
"""At most this many causes on a terminal."""

WIDEST_VALUE = 52
"""Characters of a fact for which the column of facts is wide enough."""

WIDEST_NAME = 30
"""Characters of a section's name before what it holds."""

SHOWN_FIRST = ("lr", "betas", "momentum", "weight_decay", "eps")
TITLES = {"weight_decay": "wd"}
"""Hyperparameters with a column of their own, and its title."""


def report_text(report: Report, screen: Screen = PIPE, private: bool = False) -> str:
    """Render the whole report; private values of schedulers only on request."""
    names = printable(few(report.differing, 20))
    differing = wrapped("differs between ranks, as it may: ", names, screen) if names else []
    title = f"{printable(report.name)} in {printable(str(report.folder))}   {printable(report.saved_as)}"
    with_tensors = [s for s in report.sections if s.size.tensors]
    blocks = [
        wrapped("", title, screen, mark="heading"),
        [*headline(report, screen), *problem_lines(report, ("error", "warning"), screen)],
        list(_fact_lines(report, screen)),
        table(SECTION_COLUMNS[:-1], [cells[:-1] for cells in section_cells(with_tensors)], screen),
        list(_holds_lines(report, private, screen)),
        *(optimizer_lines(optimizer, screen) for optimizer in report.optimizers),
        [*differing, *problem_lines(report, ("note",), screen)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def headline(report: Report, screen: Screen = PIPE) -> list[str]:
    """The verdict; continuation lines are indented, so that none begins with a name."""
    said, mark = report.verdict.headline, HEADLINES[report.verdict.level]
    first, behind, rest = said.partition(": ")
    if screen.width is None or len(said) <= screen.width or not rest:
        return wrapped("", said, screen, mark=mark)
    return [painted(f"{first}{behind}".rstrip(), mark, screen.color), *wrapped("  ", rest, screen, mark=mark)]


def problem_lines(report: Report, severities: Sequence[Severity], screen: Screen) -> list[str]:
    """The causes behind problems of given severities, and what follows from lost files."""
    following = consequences_of(report.problems) if "error" in severities else ()
    most = None if screen.rows is None else MAX_PROBLEMS
    return cause_lines(causes_of(report.problems, severities), following, screen, most)


def size_expected(report: Report) -> str:
    """How large all files together should be, where they are smaller than that: `of 2.8 MiB`."""
    found, expected = report.bytes_found, report.bytes_expected
    return f"of {size(expected)}" if expected and found < expected and size(found) != size(expected) else ""


def facts(report: Report) -> Iterator[tuple[str, str, str]]:
    """Facts about the whole checkpoint: `(name, value, source)` of each."""
    step, world = report.checkpoint.step, report.world_size
    disagree = "" if step.agree or RANKS_DIFFER in step.sources else "; the name says another one"
    yield "step", _known(step.value, "not found"), ", ".join(step.sources) + disagree
    if world.value is not None or len(report.checkpoint.files) > 1:
        yield "world size", "not recorded" if world.value is None else world.words, ", ".join(world.sources)
    for n, layout in enumerate(report.layout):
        yield "" if n else "layout", *layout_words(layout, report)
    for n, scheme in enumerate(report.checkpoint.quantized):
        beside = f"{plural(scheme.weights, 'weight')}, with {few(scheme.known_by, 3)}"
        yield "" if n else "quantized", scheme.words, f"{beside}; {scheme.stated_by or 'by their names and dtypes'}"
    expected = size_expected(report)
    yield "size", size(report.bytes_found), f"{expected} expected" if expected else ""
    if report.saved:
        yield "saved", period(*report.saved), "file times" if report.ranks.files > 1 else "file time"
    if report.provenance is not None:
        yield "from", str(report.provenance.sources[0]), report.provenance.by
    yield "torch", _known(report.torch.value, "not recorded in the file"), ", ".join(report.torch.sources)
    for name, version in report.writers:
        yield name.rpartition(".")[2].removesuffix("_version"), version, name


def _known(value: object, otherwise: str) -> str:
    return otherwise if value is None else str(value)


def layout_words(layout: ShardingRow, report: Report) -> tuple[str, str]:
    """How tensors are sharded, and the number of tensors sharded so."""
    total = plural(layout.tensors, "tensor")
    if not layout.sharded:
        return _whole_words(report) if layout.how == "whole" else layout.how, total
    if not layout.how.startswith("pieces"):
        total += ", even" if not layout.uneven else ", uneven" if layout.uneven == layout.tensors else (
            f", {layout.uneven} of them uneven"
        )  # fmt: skip
    leave = "leaves" if layout.empty == 1 else "leave"
    return layout.how, total + (f", {layout.empty} {leave} ranks empty" if layout.empty else "")


def _whole_words(report: Report) -> str:
    """Tensors that are not sharded: on every rank if there is more than one, as FSDP leaves buffers."""
    if not any(one.sharded for one in report.layout):
        return "every tensor whole"
    if "dcp-chunks" in report.sharding:
        return "whole, one copy kept"
    # A rank may have all or nothing of a flattened parameter, so one rank says nothing about the others.
    pieces = any(one.how.startswith("pieces") for one in report.layout) and not report.checkpoint.all_ranks
    return "whole on this rank, others not read" if pieces else "whole on every rank"


def _fact_lines(report: Report, screen: Screen) -> Iterator[str]:
    rows = [(name, printable(value), printable(source)) for name, value, source in facts(report)]
    name_width = max(len(name) for name, _, _ in rows) + 2
    # A longer value, such as the placements on a mesh of three dimensions, stands out of its column.
    most = WIDEST_VALUE if screen.width is None else min(WIDEST_VALUE, (screen.width - name_width) // 2)
    value_width = max((len(value) for _, value, _ in rows if len(value) <= most), default=0)
    for name, value, source in rows:
        first = f"  {printable(name).ljust(name_width)}{value.ljust(value_width)}  "
        if len(value) > value_width and screen.width is not None and len(first) + len(source) > screen.width:
            yield from broken(first.rstrip(), screen.width)
            first = " " * (name_width + 4)
        yield from wrapped(first, source, screen, mark="dim")


def _holds_lines(report: Report, private: bool, screen: Screen) -> Iterator[str]:
    """What each section holds beside its numbers: `timestamp  batch 5, epoch 0`."""
    schedulers = {s.section: scheduler_words(s, private) for s in report.schedulers}
    rows = [(name, schedulers.get(name, holds)) for name, *_, holds in section_cells(report.sections)]
    width = min(max((len(printable(name)) for name, _ in rows), default=0), WIDEST_NAME)
    for name, holds in rows:
        if holds:
            label = printable(name) if screen.width is None else clip_name(printable(name), width)
            yield from wrapped(f"{label:{width}}  ", printable(holds), screen, label="heading")


SECTION_COLUMNS = (
    Column("section", "name"),
    Column("tensors", "number"),
    Column("params", "number"),
    Column("dtype"),
    Column("size", "number"),
    Column("holds"),
)


def section_cells(sections: Sequence[SectionRow]) -> list[list[str]]:
    """The rows of the table of sections; sections that are a single value share one row."""
    cells = [_section_cells(s) for s in sections if not s.plain]
    plain = [s for s in sections if s.plain]
    values = [f"{s.name} {s.holds}" for s in plain if s.holds not in ("{}", "[]", "()", "None")]
    values += [f"{len(plain) - len(values)} empty"] if len(values) < len(plain) else []
    return [*cells, ["other", "-", "-", "-", "-", ", ".join(values)]] if plain else cells


def _section_cells(row: SectionRow) -> list[str]:
    measured = row.size
    if not measured.tensors:
        return [row.name, "-", "-", "-", "-", row.holds]
    numbers = [str(measured.tensors), count(measured.params)]
    return [row.name, *numbers, measured.dtype_words, size(measured.nbytes), row.holds]


def optimizer_lines(optimizer: OptimizerRow, screen: Screen = PIPE) -> list[str]:
    """The param groups of one optimizer: hyperparameters that differ between them as columns, the others in a line."""
    title = f"{printable(optimizer.section)}: {plural(len(optimizer.groups), 'param group')}"
    lines = wrapped("", "; ".join(part for part in (title, printable(optimizer.note)) if part), screen, mark="heading")
    keys = group_columns(optimizer.groups)
    columns = [Column("group"), *(Column(TITLES.get(k, k), "name") for k in keys)]
    columns += [Column("params", "number"), Column("tensors", "number")]
    cells = [group_cells(n, g, keys) for n, g in enumerate(optimizer.groups)]
    lines += _group_table(columns, cells, screen)
    same = in_all_groups(optimizer.groups)
    return lines + (wrapped("all groups: ", printable(same), screen) if same else [])


def _group_table(columns: Sequence[Column], cells: Sequence[Sequence[str]], screen: Screen) -> list[str]:
    """The table of param groups; a sentence for each where there are too many columns for the screen."""
    lines = table(columns, cells, screen._replace(color=False))
    if screen.width is None or max(map(len, lines), default=0) <= screen.width:
        return table(columns, cells, screen)
    said = []
    for row in cells:
        words = ", ".join(f"{c.title} {text}" for c, text in zip(columns[1:], row[1:], strict=True))
        said += wrapped(f"group {row[0]}: ", printable(words), screen, label="heading")
    return said


def in_all_groups(groups: Sequence[GroupRow]) -> str:
    """Hyperparameters without a column, the same in all groups: `amsgrad False, maximize False`."""
    keys, first = group_columns(groups), groups[0].values if groups else {}
    return ", ".join(f"{key_name(k)} {value_text(v, 40)}" for k, v in first.items() if key_name(k) not in keys)


def group_columns(groups: Sequence[GroupRow]) -> list[str]:
    """Hyperparameters with a column: the common ones, and those that differ between groups."""
    names = dict.fromkeys(key_name(k) for g in groups for k in g.values)
    values = [{key_name(k): value_text(v) for k, v in g.values.items()} for g in groups]
    differ = [n for n in names if len({v.get(n) for v in values}) > 1]
    return [n for n in SHOWN_FIRST if n in names] + [n for n in differ if n not in SHOWN_FIRST]


def group_cells(number: int, group: GroupRow, keys: Iterable[str]) -> list[str]:
    """The cells of a param group: its number, the hyperparameters with a column, elements, parameters."""
    values = {key_name(k): v for k, v in group.values.items()}
    cells = [value_text(values[k], 40).strip("()[]") if k in values else "-" for k in keys]
    params = "-" if group.params is None else count(group.params)
    return [str(number), *cells, params, "-" if group.tensors is None else str(group.tensors)]


def scheduler_words(scheduler: SchedulerRow, private: bool = False) -> str:
    """The state of a scheduler, and whether its learning rates are those of the param groups."""
    items = scheduler.state.items() if isinstance(scheduler.state, dict) else ()
    named = [(key_name(k), v) for k, v in items]
    shown = [(k, v) for k, v in named if private or not is_private_name(k)]
    hidden = len(named) - len(shown)
    state = ", ".join(f"{k} {value_text(v, 60)}" for k, v in shown)
    agrees = {True: "; lr as in the param groups", False: "; LR IS NOT THAT OF THE PARAM GROUPS", None: ""}
    return state + agrees[scheduler.agrees] + (f"; {plural(hidden, 'private value')}: --private" if hidden else "")


# -- what goes to stderr -----------------------------------------------------------------------------------------


def read_line(report: Report) -> str:
    """The files read for the report, and those not read, in one line."""
    what = plural(report.ranks.read, "rank") if report.ranks.here else plural(report.checkpoint.cost.files, "file")
    read = f"read the metadata of {what} in {duration(report.checkpoint.cost.seconds)}"
    if len(report.checkpoint.files) == 1 and not report.ranks.expected:
        return f"read the metadata of one file in {duration(report.checkpoint.cost.seconds)}; no tensor values"
    others = report.ranks.here - report.ranks.read
    if others > 0:
        listed = any(f.status == "listed" for f in report.checkpoint.files)
        what = "the file's name and size" if listed else "that the file is there and ends well"
        return f"{read}, of {plural(others, 'other')} only {what} (--all-ranks: all of them)"
    return f"{read}; no tensor values"


def next_line(report: Report) -> str:
    """The next command that users want; "" if none would work."""
    return f"next: {report.next}" if report.next else ""
