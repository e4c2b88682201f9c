"""The record of `inspect`, rendered as text, JSON and in notebooks.

The record holds names as they are in the file, neither escaped nor cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptools.display.next_command import command_arguments, next_command
from ckptools.display.screen import PIPE, Screen
from ckptools.display.tables import Column, broken, incident_lines, key_name, table, value_text, verdict_lines, wrapped
from ckptools.files.opening import common_folder
from ckptools.keys.sharding import ShardingRow, sharding_name, sharding_rows
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact
from ckptools.model.incidents import causes_of, consequences_of
from ckptools.model.problems import Problem, Severity, worst_first
from ckptools.model.provenance import Provenance
from ckptools.model.records import grouped
from ckptools.model.tensor import Tensor
from ckptools.model.tree import NumpyArray, nodes_in, scalar, tensors_in, walk
from ckptools.model.verdict import Verdict
from ckptools.option import spelled
from ckptools.pickles.foreign_names import foreign_classes, foreign_problems, suspicious_names
from ckptools.rules.verdict import verdict_of
from ckptools.text import KeyPath, count, duration, few, fqn_of, period, plural, printable, size
from ckptools.training_state.adapters import adapter_lines
from ckptools.training_state.models import listed_sections, models_of, role_of_model, role_words, trained_or_all
from ckptools.training_state.modules import module_problems
from ckptools.training_state.optimizers import Optimizer, ParamGroup, group_ids, moments_of, nested, optimizers_of
from ckptools.training_state.sections import (
    Section,
    SectionKind,
    SectionSize,
    generator_of,
    is_gathered,
    is_private_name,
    measure,
    schedulers_of,
    sections_of_kind,
    storage_identity,
    stream_of,
)
from ckptools.training_state.steps import COUNTERS, EPOCH_COUNTERS, RANKS_DIFFER, learning_rates
from ckptools.training_state.wrappers import wrapper_words

if TYPE_CHECKING:
    from ckptools.display.html import Page

# -- a summary of each section in a few words, and rows for optimizers and schedulers ---------------------------------


MAX_WORDS = 8
"""At most this many names or values in a cell."""


def section_summary(ck: Checkpoint, section: Section, size: SectionSize) -> str:
    """Summarize a section in a few words that depend on its kind."""
    summary = {"model": _model, "optimizer": _optimizer, "scheduler": _scheduler, "rng": _rng}.get(section.kind)
    words = summary(ck, section) if summary else _values(section.value)
    foreign = f"foreign: {_some(size.opaque)}" if size.opaque and section.value.__class__.__name__ != "Opaque" else ""
    return "; ".join(part for part in (words, *_quantized(ck, size), foreign) if part)


def _some(words: Iterable[Any]) -> str:
    every = list(words)
    more = [f"{len(every) - MAX_WORDS} more"] if len(every) > MAX_WORDS else []
    return ", ".join([*map(str, every[:MAX_WORDS]), *more])


def _model(ck: Checkpoint, section: Section) -> str:
    tensors = [t for _, t in tensors_in(section.value)]
    sharded = sum(t.sharded for t in tensors)
    identities = [i for i in map(storage_identity, tensors) if i is not None]
    tied = len(identities) - len(set(identities))
    role = role_words(ck, section)
    parts = [role] if role else []
    parts += [f"{sharded} sharded, {len(tensors) - sharded} whole"] if sharded else []
    parts += [f"{tied} tied to another"] if tied else []
    others = len(section.value) - len(tensors) if isinstance(section.value, Mapping) else 0
    parts += [f"{plural(others, 'value')} beside the tensors"] if others > 0 else []
    given = any(model.note for model in models_of(ck) if model.section.path == section.path)  # names not of the file
    parts += wrapper_words(list(map(str, section.value))) if isinstance(section.value, Mapping) and not given else []
    return ", ".join(parts) + _pieces_of_one_rank(ck, section)


def _quantized(ck: Checkpoint, size: SectionSize) -> list[str]:
    """Count quantized weights by scheme; say which can be dequantized, and which parameters are not counted."""
    way = f": {spelled('dequantize', True)} writes their values"
    known = {scheme.words: way * scheme.dequantized for scheme in ck.quantized}
    parts = [
        f"{plural(count, 'weight')} in codes of {words}{known[words]}"
        for words, count in size.quantized.items()
        if words in known  # tensor subclasses are shown with the layout
    ]
    return parts + ([f"params without {plural(size.uncounted, 'weight')} in packed codes"] if size.uncounted else [])


def _optimizer(ck: Checkpoint, section: Section) -> str:
    state = nested(section.value)["state"]
    words = f"{_some(_slots(state))} of {plural(len(state), 'parameter')}" if state else "no state yet"
    return words + _pieces_of_one_rank(ck, section)


def _slots(state: Mapping[Any, Any]) -> Iterable[Any]:
    """Collect the state names of all parameters, such as `exp_avg`, in the order of the file."""
    return dict.fromkeys(slot for entry in state.values() if isinstance(entry, Mapping) for slot in entry)


def _pieces_of_one_rank(ck: Checkpoint, section: Section) -> str:
    """Add that shards of flattened parameters are known for one rank only, if one rank was read."""
    pieces = any(t.kind == "flat_pieces" for _, t in tensors_in(section.value))
    ranks = sorted({f.rank for f in ck.files if f.status == "read" and f.rank is not None})
    return f"; pieces of rank {ranks[0]} only" if pieces and not ck.all_ranks and len(ranks) == 1 else ""


def _scheduler(ck: Checkpoint, section: Section) -> str:
    value = section.value
    epoch = [f"last_epoch {value_text(value['last_epoch'])}"] if "last_epoch" in value else []
    last = value.get("_last_lr")
    rates = [f"lr {', '.join(map(value_text, last[:4]))}"] if isinstance(last, (list, tuple)) and last else []
    return ", ".join(epoch + rates) or _values(value)


def _rng(ck: Checkpoint, section: Section) -> str:
    streams = _some(dict.fromkeys(_streams(section)))
    if is_gathered(section.value):
        return f"{plural(len(section.value), 'rank')}: {streams}"
    ranks = {s.rank for _, t in tensors_in(section.value) for s in t.shards if s.rank is not None}
    if len(ck.files) == 1 or not ranks:
        return streams
    if len(ranks) > 1:
        return f"{plural(len(ranks), 'rank')}: {streams}"
    return f"rank {min(ranks)} only, others not read: {streams}"


def _streams(section: Section) -> Iterable[str]:
    """Yield the random generators in a section (python, numpy, torch, ...), by the form of their state or its key."""
    seen: set[KeyPath] = set()
    for path, node in nodes_in(section.value, (Tensor, NumpyArray, Mapping, list, tuple)):
        if any(path[:n] in seen for n in range(len(path))):
            continue
        if stream := generator_of(node):
            seen.add(path)
            yield stream
        elif isinstance(node, (Tensor, NumpyArray)) or (
            not isinstance(node, Mapping) and any(isinstance(v, int) for v in node[:2])
        ):
            known = stream_of((*path, *section.path[-1:])) or ("torch" if isinstance(node, Tensor) else "")
            yield from [known] if known else []


def _values(value: Any) -> str:
    """Summarize a few plain values, counters first: `batch 5, epoch 0`; of deeper trees list the keys."""
    if not isinstance(value, (Mapping, list, tuple)) or not value:
        return value_text(value, 60)
    found: dict[str, str] = {}
    for path, leaf in islice(walk(value), 2000):
        leaf = scalar(leaf)
        if 0 < len(path) <= 2 and isinstance(leaf, (int, float, str, timedelta)) and not isinstance(path[-1], int):
            found.setdefault(key_name(path[-1]), f"{key_name(path[-1])} {value_text(leaf, 24)}")
    order = {name: n for n, name in enumerate((*COUNTERS, *EPOCH_COUNTERS))}
    names = sorted(found, key=lambda name: order.get(name, len(order)))
    if names:
        return ", ".join([found[n] for n in names[:4]] + ([f"{len(names) - 4} more"] if len(names) > 4 else []))
    return _some(map(key_name, value)) if isinstance(value, Mapping) else plural(len(value), "item")


class GroupRow(NamedTuple):
    """One param group with its hyperparameters.

    Attributes:
        tensors: number of parameters in the group; None if the file does not list them.
        params: total number of elements; None if unknown for one of the parameters.
        names: fqns of the parameters; `?3` stands for parameter 3 if its fqn is unknown.
    """

    values: Mapping[str, Any]
    tensors: int | None
    params: int | None
    names: tuple[str, ...]


class OptimizerRow(NamedTuple):
    """One optimizer.

    Attributes:
        name: class name, or the key of the optimizer if the file has no class name.
        parameters: number of parameters with state.
        slots: names of the state per parameter, such as `exp_avg`.
        named_by: how parameters got their names: `fqn`, `order`, `shape` or `none`.
        assumed: number of names that are right only if the groups list parameters in the order of the module.
        note: a line about the naming; empty if the file has the names.
    """

    name: str
    section: str
    parameters: int
    slots: tuple[str, ...]
    named_by: str
    assumed: int
    unnamed: int
    note: str
    groups: tuple[GroupRow, ...]


class SchedulerRow(NamedTuple):
    """One scheduler; `agrees` tells whether its learning rates equal the param groups', None if unknown."""

    name: str
    section: str
    state: Any
    agrees: bool | None


def optimizer_rows(ck: Checkpoint) -> tuple[OptimizerRow, ...]:
    """A row for each optimizer."""
    return tuple(_optimizer_row(ck, optimizer) for optimizer in optimizers_of(ck).values())


def _optimizer_row(ck: Checkpoint, optimizer: Optimizer) -> OptimizerRow:
    section = next(s for s in sections_of_kind(ck, "optimizer") if s.path == optimizer.path)
    listed = [bool(ids) or not optimizer.state for ids in group_ids(nested(section.value))]
    sizes = _sizes(ck, optimizer)
    rows = tuple(_group_row(g, sizes, known) for g, known in zip(optimizer.param_groups, listed, strict=False))
    naming = optimizer.naming
    return OptimizerRow(
        name=optimizer.name,
        section=section.name,
        parameters=len(optimizer.state),
        slots=tuple(map(str, _slots(optimizer.state))),
        named_by=naming.by,
        assumed=len(naming.assumed),
        unnamed=len(naming.unnamed),
        note=naming.note,
        groups=rows,
    )


def _group_row(group: ParamGroup, sizes: Mapping[str, int], listed: bool) -> GroupRow:
    values = {key: value for key, value in group.items() if key != "params"}
    if not listed:
        return GroupRow(values, None, None, ())
    known = [sizes[name] for name in group.names if name in sizes]
    params = sum(known) if len(known) == len(group.names) else None
    return GroupRow(values, len(group.names), params, group.names)


def _sizes(ck: Checkpoint, optimizer: Optimizer) -> dict[str, int]:
    """Number of elements of each parameter by its name in the groups: of the model's tensor, else of its moments.

    Flattened parameters are left out: the shard on one rank does not tell their size.
    """
    sizes: dict[str, int] = {}
    for key, entry in optimizer.state.items():
        moments = moments_of(entry)
        if moments and moments[0].kind != "flat_pieces":
            sizes[key if isinstance(key, str) else f"?{key}"] = moments[0].numel
    for section in trained_or_all(ck):
        pairs = section.value.items() if isinstance(section.value, Mapping) else ()
        sizes.update({k: t.numel for k, t in pairs if isinstance(t, Tensor) and t.kind != "flat_pieces"})
    return sizes


def scheduler_rows(ck: Checkpoint) -> tuple[SchedulerRow, ...]:
    """A row for each scheduler."""
    rows = zip(sections_of_kind(ck, "scheduler"), schedulers_of(ck), learning_rates(ck), strict=True)
    return tuple(SchedulerRow(name, s.name, s.value, rates.agree if rates else None) for s, name, rates in rows)


# -- the record --------------------------------------------------------------------------------------------------------


TORCH_KEYS = ("torch_version", "pytorch_version", "torch")
WRITER_KEYS = (
    "composer_version", "pytorch-lightning_version", "lightning_version", "deepspeed_version", "ds_version",
    "megatron_version", "transformers_version", "accelerate_version", "checkpoint_version",
)  # fmt: skip


class RankCount(NamedTuple):
    """Numbers of ranks that saved (None if unknown), of ranks with complete files, of ranks read, and of files."""

    expected: int | None
    here: int
    read: int
    files: int


class SectionRow(NamedTuple):
    """One section of the tree, summarized in `holds`; `plain` if it is a single value or an empty container.

    `role` is that of a model among several: `trained`, `ema`, `teacher` …; "" if none is proven.
    """

    kind: SectionKind
    name: str
    path: tuple[Any, ...]
    size: SectionSize
    holds: str
    plain: bool
    role: str = ""


class Report(NamedTuple):
    """Everything that `inspect` shows.

    Attributes:
        saved_as: how the checkpoint was saved, in words.
        sharding: how tensors are sharded, as a name for programs.
        world_size: number of ranks that saved; without a value if a single file does not record it.
        bytes_expected: size of all files if complete; None if unknown.
        saved: first and last file time, in seconds since 1970; None without files.
        foreign: names of classes of other libraries in the pickles.
        suspicious: names in the pickles that could run code.
        differing: names of values that differ between ranks by design.
        provenance: source of the checkpoint, if `consolidate` wrote it.
        arguments: command-line arguments that open the checkpoint again, with the same options.
        next: command proposed to the user next; "" if none would work.
    """

    checkpoint: Checkpoint
    name: str
    folder: Path
    saved_as: str
    sharding: str
    verdict: Verdict
    problems: tuple[Problem, ...]
    world_size: Fact
    ranks: RankCount
    layout: tuple[ShardingRow, ...]
    bytes_found: int
    bytes_expected: int | None
    saved: tuple[float, float] | None
    torch: Fact
    writers: tuple[tuple[str, str], ...]
    sections: tuple[SectionRow, ...]
    optimizers: tuple[OptimizerRow, ...]
    schedulers: tuple[SchedulerRow, ...]
    foreign: tuple[str, ...]
    suspicious: tuple[str, ...]
    differing: tuple[str, ...]
    provenance: Provenance | None
    arguments: str
    next: str


def inspect_report(ck: Checkpoint) -> Report:
    """Make the report of an opened checkpoint, without reading files."""
    foreign = foreign_classes(ck.tree)
    suspicious = suspicious_names(ck.names, foreign)
    alone = ck.world_size.value in (None, 1)
    named = [*foreign_problems(foreign, suspicious), *module_problems(ck.tree)]
    versions = dict(_versions(ck))
    times = [f.modified for f in ck.files if f.modified]
    return Report(
        checkpoint=ck,
        name=ck.name,
        # Megatron saves each rank in a folder of its own.
        folder=common_folder([f.path.parent for f in ck.files]) if ck.files else ck.path,
        saved_as=ck.saved_as,
        sharding=sharding_name(ck),
        verdict=verdict_of(ck),
        problems=worst_first(dict.fromkeys([*ck.problems, *named])),
        world_size=Fact(None, ck.world_size.sources) if len(ck.files) == 1 and alone else ck.world_size,
        ranks=_rank_count(ck),
        layout=sharding_rows(ck),
        bytes_found=sum(f.nbytes for f in ck.files),
        bytes_expected=ck.bytes_expected,
        saved=(min(times), max(times)) if times else None,
        torch=_torch_version(versions),
        writers=tuple((fqn, v) for fqn, v in versions.items() if fqn.rpartition(".")[2] in WRITER_KEYS),
        sections=tuple(_section_row(ck, s) for s in listed_sections(ck)),
        optimizers=optimizer_rows(ck),
        schedulers=scheduler_rows(ck),
        foreign=tuple(foreign),
        suspicious=suspicious,
        differing=tuple(map(fqn_of, ck.differing)),
        provenance=ck.provenance if ck.provenance and ck.provenance.sources else None,
        arguments=command_arguments(ck),
        next=str(next_command(ck) or ""),
    )


def _rank_count(ck: Checkpoint) -> RankCount:
    read = {f.rank for f in ck.files if f.status == "read" and (f.rank is not None or not ck.ranks)}
    files = sum(f.status != "missing" for f in ck.files)
    if len(ck.files) == 1 and verdict_of(ck).whole:
        return RankCount(None, 1, 1, files)
    return RankCount(ck.world_size.value, len(ck.ranks), len(read), files)


def _section_row(ck: Checkpoint, section: Section) -> SectionRow:
    size = measure(section.value)
    plain = section.kind == "other" and (not isinstance(section.value, (Mapping, list, tuple)) or not section.value)
    holds, role = section_summary(ck, section, size), role_of_model(ck, section)
    return SectionRow(section.kind, section.name, section.path, size, holds, plain, role)


def _versions(ck: Checkpoint) -> Mapping[str, str]:
    """Collect versions of torch and other libraries that the files record, by key: `metadata.torch_version`."""
    found = dict(ck.stated_versions)
    for section in sections_of_kind(ck, "other"):
        for path, leaf in walk(section.value):
            key = path[-1] if path else section.path[-1] if section.path else None
            if isinstance(leaf, (str, int, float)) and key in (*TORCH_KEYS, *WRITER_KEYS) and len(str(leaf)) < 60:
                found[".".join([section.name, *map(str, path)])] = str(leaf)
    return found


def _torch_version(versions: Mapping[str, str]) -> Fact:
    for fqn, version in versions.items():
        if fqn.rpartition(".")[2] in TORCH_KEYS and version[:1].isdigit():
            return Fact(version, (fqn,))
    return Fact(None)


# -- the record of `inspect` as text: whether the checkpoint is whole, its step and its contents -----------------------


MAX_PROBLEMS = 20
"""At most this many incidents on a terminal, and `FEW_PROBLEMS` if the rest of the report is brief."""

FEW_PROBLEMS = 3

WIDEST_VALUE = 52
"""Widest value, in characters, for which the column of values is widened."""

WIDEST_NAME = 30
"""Widest section name, in characters, before its summary."""

SHOWN_FIRST = ("lr", "betas", "momentum", "weight_decay", "eps")
TITLES = {"weight_decay": "wd"}
"""Titles of the hyperparameter columns that differ from the hyperparameter's name."""


def report_text(report: Report, screen: Screen = PIPE, private: bool = False, everything: bool = True) -> str:
    """Render the report; scheduler values that begin with `_` only on request.

    Without `everything`, a broken checkpoint on a terminal is its incidents, its facts in short and its sections: what
    fits a screen of 24 lines.
    """
    brief = report.verdict.level == "bad" and screen.rows is not None and not everything
    most = FEW_PROBLEMS if brief else None if screen.rows is None else MAX_PROBLEMS
    verdict = [*verdict_lines(report.verdict, screen), *problem_lines(report, ("error", "warning"), screen, most)]
    blocks = [title_lines(report, screen), verdict]
    if brief:
        blocks.append(wrapped("", printable(" · ".join(_facts_in_short(report))), screen))
        more = wrapped("", "-v adds where each fact is from, the layout, the optimizer and the rest", screen)
        blocks.append([*_section_lines(report, screen), *more])
    else:
        blocks += _fact_blocks(report, screen, private, everything)
    return "\n\n".join("\n".join(block) for block in blocks if block)


def facts_text(report: Report, screen: Screen = PIPE) -> str:
    """Render what `report_text` has besides the verdict: facts, sections, optimizers, notes."""
    blocks = [title_lines(report, screen), *_fact_blocks(report, screen)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def title_lines(report: Report, screen: Screen) -> list[str]:
    """Render the name of the checkpoint, its folder, and how it was saved."""
    title = f"{printable(report.name)} in {printable(str(report.folder))}   {printable(report.saved_as)}"
    return wrapped("", title, screen, mark="heading")


def _fact_blocks(report: Report, screen: Screen, private: bool = False, everything: bool = True) -> list[list[str]]:
    """Render facts about the whole checkpoint, sections, optimizers and notes."""
    shown = report.differing if screen.width is None else _with_common_parents(report.differing)
    named = printable(few(shown, 20))
    if named and not everything and screen.rows is not None:
        named = f"{plural(len(report.differing), 'value')} (-v names them)"
    differing = wrapped("differs between ranks, as it may: ", named, screen) if named else []
    most = None if screen.rows is None else MAX_PROBLEMS
    return [
        list(_fact_lines(report, screen)),
        _section_lines(report, screen),
        list(_holds_lines(report, private, screen)),
        *(optimizer_lines(optimizer, screen) for optimizer in report.optimizers),
        [*differing, *problem_lines(report, ("note",), screen, most)],
    ]


def _section_lines(report: Report, screen: Screen) -> list[str]:
    return table(SECTION_COLUMNS, section_cells([s for s in report.sections if s.size.tensors]), screen)


def _with_common_parents(names: Sequence[str]) -> list[str]:
    """Join names with one parent as the shell spells them: `timestamp.{batch,epoch,token}`."""
    found = list[str]()
    for parent, inside in grouped(names, lambda name: name.rpartition(".")[0]).items():
        ends = ",".join(name.rpartition(".")[2] for name in inside)
        found += [f"{parent}.{{{ends}}}"] if parent and len(inside) > 2 else inside
    return found


def _facts_in_short(report: Report) -> Iterator[str]:
    """Yield facts about the whole checkpoint for one line: `step 6`, `2.1 MiB of 2.8 MiB expected`."""
    for name, value, source in facts(report):
        if name == "size":
            yield f"{value} {source}".rstrip()
        elif name in ("adapter", "step", "world size", "saved"):
            yield f"{name} {value}"


def problem_lines(report: Report, severities: Sequence[Severity], screen: Screen, most: int | None) -> list[str]:
    """Render at most `most` incidents with problems of the given severities, and the consequences of missing files."""
    following = consequences_of(report.problems) if "error" in severities else ()
    return incident_lines(causes_of(report.problems, severities), following, screen, most)


def size_expected(report: Report) -> str:
    """State the expected size of all files if they are smaller: `of 2.8 MiB`."""
    found, expected = report.bytes_found, report.bytes_expected
    return f"of {size(expected)}" if expected and found < expected and size(found) != size(expected) else ""


def facts(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield `(name, value, source)` for each fact about the whole checkpoint, such as step and world size."""
    step, world = report.checkpoint.step, report.world_size
    for n, (words, where) in enumerate(adapter_lines(report.checkpoint)):
        yield "" if n else "adapter", words, where
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
    """Describe one way of sharding, and count the tensors sharded that way."""
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
    """Describe unsharded tensors; FSDP keeps buffers whole on every rank."""
    if not any(one.sharded for one in report.layout):
        return "every tensor whole"
    if "dcp-chunks" in report.sharding:
        return "whole, one copy kept"
    # A rank may hold a flattened parameter wholly or not at all, so one rank alone does not show which are sharded.
    pieces = any(one.how.startswith("pieces") for one in report.layout) and not report.checkpoint.all_ranks
    return "whole on this rank, others not read" if pieces else "whole on every rank"


def _fact_lines(report: Report, screen: Screen) -> Iterator[str]:
    rows = [(name, printable(value), printable(source)) for name, value, source in facts(report)]
    name_width = max(len(name) for name, _, _ in rows) + 2
    # A longer value, such as the placements on a mesh of three dimensions, may be wider than its column.
    most = WIDEST_VALUE if screen.width is None else min(WIDEST_VALUE, (screen.width - name_width) // 2)
    value_width = max((len(value) for _, value, _ in rows if len(value) <= most), default=0)
    for name, value, source in rows:
        first = f"  {printable(name).ljust(name_width)}{value.ljust(value_width)}  "
        if len(value) > value_width and screen.width is not None and len(first) + len(source) > screen.width:
            yield from broken(first.rstrip(), screen.width)
            first = " " * (name_width + 4)
        yield from wrapped(first, source, screen, mark="dim")


def _holds_lines(report: Report, private: bool, screen: Screen) -> Iterator[str]:
    """Render a line of contents for each section without tensors: `timestamp  batch 5, epoch 0`."""
    schedulers = {s.section: scheduler_words(s, private) for s in report.schedulers}
    others = [section for section in report.sections if not section.size.tensors]
    rows = [(name, schedulers.get(name, holds)) for name, *_, holds in section_cells(others)]
    width = min(max((len(printable(name)) for name, _ in rows), default=0), WIDEST_NAME)
    for name, holds in rows:
        if holds:
            yield from wrapped(f"{printable(name):{width}}  ", printable(holds), screen, "heading", "values")


SECTION_COLUMNS = (
    Column("section", "name"),
    Column("tensors", "number"),
    Column("params", "number"),
    Column("dtype"),
    Column("size", "number"),
    Column("holds", keep=1),
)


def section_cells(sections: Sequence[SectionRow]) -> list[list[str]]:
    """Make the rows of the table of sections; sections that are a single value share one row."""
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
    """Render the param groups: hyperparameters that differ between groups as columns, the others in one line."""
    title = f"{printable(optimizer.section)}: {plural(len(optimizer.groups), 'param group')}"
    lines = wrapped("", "; ".join(part for part in (title, printable(optimizer.note)) if part), screen, mark="heading")
    keys = group_columns(optimizer.groups)
    columns = [Column("group"), *(Column(TITLES.get(k, k), "value") for k in keys)]
    columns += [Column("params", "number"), Column("tensors", "number")]
    cells = [group_cells(n, g, keys) for n, g in enumerate(optimizer.groups)]
    lines += _group_table(columns, cells, screen)
    same = in_all_groups(optimizer.groups)
    return lines + (wrapped("all groups: ", printable(same), screen, mark="values") if same else [])


def _group_table(columns: Sequence[Column], cells: Sequence[Sequence[str]], screen: Screen) -> list[str]:
    """Render the table of param groups; a sentence for each group if the columns are too wide for the screen."""
    lines = table(columns, cells, screen._replace(color=False))
    if screen.width is None or max(map(len, lines), default=0) <= screen.width:
        return table(columns, cells, screen)
    said = []
    for row in cells:
        words = ", ".join(f"{c.title} {text}" for c, text in zip(columns[1:], row[1:], strict=True))
        said += wrapped(f"group {row[0]}: ", printable(words), screen, "heading", "values")
    return said


def in_all_groups(groups: Sequence[GroupRow]) -> str:
    """List hyperparameters that have no column and are equal in all groups: `amsgrad False, maximize False`."""
    keys, first = group_columns(groups), groups[0].values if groups else {}
    return ", ".join(f"{key_name(k)} {value_text(v, 40)}" for k, v in first.items() if key_name(k) not in keys)


def group_columns(groups: Sequence[GroupRow]) -> list[str]:
    """Choose the hyperparameters that get a column: the most common, and any that differ between groups."""
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
    """Describe the state of a scheduler, and whether its learning rates equal the param groups'."""
    items = scheduler.state.items() if isinstance(scheduler.state, dict) else ()
    named = [(key_name(k), v) for k, v in items]
    shown = [(k, v) for k, v in named if private or not is_private_name(k)]
    hidden = len(named) - len(shown)
    state = ", ".join(f"{k} {value_text(v, 60)}" for k, v in shown)
    agrees = {True: "; lr as in the param groups", False: "; LR IS NOT THAT OF THE PARAM GROUPS", None: ""}
    more = f"; {plural(hidden, 'private value')}: {spelled('private', True)}" if hidden else ""
    return state + agrees[scheduler.agrees] + more


# -- lines that `inspect` prints to stderr ----------------------------------------------------------------------------


def read_line(report: Report) -> str:
    """Name the files read for the report, and the files not read, in one line."""
    what = plural(report.ranks.read, "rank") if report.ranks.here else plural(report.checkpoint.cost.files, "file")
    read = f"read the metadata of {what} in {duration(report.checkpoint.cost.seconds)}"
    if len(report.checkpoint.files) == 1 and not report.ranks.expected:
        return f"read the metadata of one file in {duration(report.checkpoint.cost.seconds)}; no tensor values"
    others = report.ranks.here - report.ranks.read
    if others > 0:
        listed = any(f.status == "listed" for f in report.checkpoint.files)
        what = "the file's name and size" if listed else "that the file is there and ends well"
        return f"{read}, of {plural(others, 'other')} only {what} ({spelled('all-ranks', True)}: all of them)"
    return f"{read}; no tensor values"


# -- param groups and facts as tables of a page ------------------------------------------------------------------------


FACT_COLUMNS = (Column(""), Column(""), Column("from"))


def group_rows(groups: Sequence[ParamGroup]) -> list[GroupRow]:
    """Make rows of param groups without the number of elements, which only the model tells."""
    return [
        GroupRow({k: v for k, v in group.items() if k != "params"}, len(group.names), None, group.names)
        for group in groups
    ]


def group_table(page: Page, title: str, groups: Sequence[GroupRow], opened: bool = False) -> None:
    """Add a table of param groups: hyperparameters that differ as columns, the others in a line below."""
    names = group_columns(groups)
    columns = [Column("group", "number"), *(Column(TITLES.get(name, name)) for name in names)]
    columns += [Column("params", "number"), Column("tensors", "number")]
    cells = [group_cells(n, group, names) for n, group in enumerate(groups)]
    if all(group.params is None for group in groups):
        del columns[-2]
        cells = [[*row[:-2], row[-1]] for row in cells]
    page.table(title, columns, cells, opened=opened)
    if same := in_all_groups(groups):
        page.line(f"all groups: {same}", "dim")
