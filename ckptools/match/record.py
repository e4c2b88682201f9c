"""The record of `match`: names and shapes that a model expects, compared with a checkpoint, and helpful renames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from ckptools.display.next_command import quoted
from ckptools.display.page import PagedRecord, ScreenPage
from ckptools.display.screen import mark_of
from ckptools.display.tables import Column
from ckptools.keys.renames import Rename, rename_words
from ckptools.model.records import Rows, displayed
from ckptools.model.regions import Ints
from ckptools.text import clip_middle, plural, printable

MatchStatus = Literal["same", "renamed", "converted", "tied", "shape", "unknown", "missing", "unexpected", "ignored"]


@displayed
class MatchRow(NamedTuple):
    """One name of the model, or of the checkpoint if the model has no counterpart.

    Attributes:
        status: `same` (name and shape), `renamed` (the same after the renames), `converted` (transformers makes it from
            other names while loading), `tied` (absent, but its values come with another name), `shape` (differs),
            `unknown` (unknown shape, or it cannot be loaded), `missing` (in the model only), `unexpected` (in the
            checkpoint only), `ignored` (in the checkpoint only; transformers leaves it out).
        checkpoint_name: None for `missing`, `tied`, and `converted` from several names. Likewise `name`, in the model,
            is None for `unexpected` and `ignored`.
        model_shape: sizes in the model; None if unknown, as in the checkpoint.
        model_dtype: dtype in the model; "" if unknown.
        reason: `padded`, `slices`, `transposed`, `reshaped`, `tied` or `quantized`: cause of the difference; "" if
            unknown.
    """

    status: MatchStatus
    name: str | None
    checkpoint_name: str | None
    model_shape: Ints | None
    checkpoint_shape: Ints | None
    model_dtype: str
    checkpoint_dtype: str
    reason: str = ""
    note: str = ""

    @property
    def dtype_differs(self) -> bool:
        """Whether both dtypes are known and differ."""
        both = self.model_dtype and self.checkpoint_dtype and self.reason != "quantized"
        return bool(both and self.model_dtype != self.checkpoint_dtype)


@displayed
class MatchGroup(NamedTuple):
    """Rows of one status whose names differ in numbers, or only at their ends.

    Attributes:
        status: of the rows; `dtype` for rows whose dtypes differ, which may be in a second group too.
        names: their common pattern: `blocks.{0..11}.attn.*`.
        checkpoint: their shape or dtype in the checkpoint, if the same for all; `model` likewise.
    """

    status: str
    names: str
    keys: int
    checkpoint: str
    model: str
    note: str


ResumeVerdict = Literal["fits", "DOES NOT FIT", "worth a look", "not known"]


@displayed
class ResumeRow(NamedTuple):
    """The answer to one question about resuming the run.

    Attributes:
        what: `dtypes`, `optimizer groups`, `optimizer state`, `ranks`, `rng torch`, `torch` and the like.
        verdict: `worth a look` if it loads, but differs from the saved run.
        next: a command, without its checkpoint, or an option that helps; "" for none.
    """

    what: str
    verdict: ResumeVerdict
    detail: str
    next: str = ""


@displayed
@dataclass(frozen=True)
class Match(PagedRecord):
    """Whether a checkpoint's model loads into another model, and why not.

    Attributes:
        to: source of the expected names and shapes.
        loads: True if all names of the model exist with their shapes and there are no others, as strict loading
            demands, without renames; and the checkpoint is not known to be broken. Dtypes do not count: loading
            converts them.
        whole: whether the checkpoint is whole; None if not every file was compared.
        same: number of names of the model found with their shape.
        renamed: number of names found in addition after the renames.
        renames: the rename that fixes most, then further ones. `match` never applies them.
        alternatives: renames that fix equally many names, so that none was chosen.
        fix: new name by old name for every name that the renames change, for `consolidate(map=...)`, without `assumed`.
        assumed: new name by old name for every name that an assumed rename changes.
        resume: what else a run needs; empty if the user did not ask, and torch can read the files.
        converted: number of names of the model that transformers makes from other names while loading.
        while_loading: how transformers does that; "" if it takes the tensors unchanged, or the names were compared as
            `load_state_dict` takes them and `from_pretrained` would not load them either.
        apart: how tensors that only `from_pretrained` can convert differ from those `load_state_dict` expects.
        like: config for `consolidate --like`, which writes the tensors as `load_state_dict` expects them.
        not_compared: names, shapes or dtypes that were not compared, a sentence each.
        chosen: which of several models was compared, and how to choose another; "" if there is one.
    """

    path: str
    to: str
    loads: bool
    whole: bool | None
    model_names: int
    checkpoint_names: int
    same: int
    renamed: int
    renames: tuple[Rename, ...]
    alternatives: tuple[Rename, ...]
    groups: Rows[MatchGroup]
    rows: Rows[MatchRow] = field(repr=False)
    fix: Mapping[str, str] = field(default_factory=dict, repr=False)
    assumed: Mapping[str, str] = field(default_factory=dict, repr=False)
    resume: Rows[ResumeRow] = field(default_factory=Rows)
    converted: int = 0
    while_loading: str = ""
    apart: str = ""
    like: str = ""
    not_compared: tuple[str, ...] = ()
    chosen: str = ""

    @property
    def resumes(self) -> bool:
        """Whether the model loads, and nothing else that the user asked about prevents resuming."""
        return self.loads and all(row.verdict in ("fits", "worth a look") for row in self.resume)

    @property
    def found(self) -> str:
        """State how many names were found, and how transformers makes the others."""
        facts = [f"{self.same} of {self.model_names} names of the model are there with their shape"]
        if self.apart:
            way = "from_pretrained converts them, Trainer's resume does not"
            return f"with load_state_dict: {facts[0]}; {self.apart}; {way}"
        return "; ".join([*facts, *([self.while_loading] if self.while_loading else [])])

    def _fill(self, page: ScreenPage) -> None:
        for label, text in match_facts(self):
            page.line(text, label=label.ljust(LABEL), label_mark=mark_of(label) or "heading")
        if self.resume:
            page.gap()
            page.table("will it resume?", RESUME_COLUMNS, [list(row[:3]) for row in self.resume], opened=True)
        if self.groups:
            page.gap()
            if self.renames:
                page.line("what is left then:", "heading")
            title = plural(len(self.groups), "group of names", "groups of names")
            page.table(title, COLUMNS, list(map(group_cells, self.groups)), opened=True)
        if self.fix:
            page.table(f"{plural(len(self.fix), 'name')} that the renames change", FIX_COLUMNS, list(self.fix.items()))

    def _summary(self) -> str:
        renamed = f", {self.renamed} more after a rename" if self.renamed else ""
        return f"{'loads' if self.loads else 'DOES NOT LOAD'}: {self.same} of {self.model_names} names{renamed}"


# -- the parts of its page: whether it loads, helpful renames, and the remaining differences ---------------------------


COLUMNS = (
    Column("what", "verdict"),
    Column("names", "name"),
    Column("keys", "number"),
    Column("checkpoint"),
    Column("model"),
    Column("note"),
)
RESUME_COLUMNS = (Column("will it resume?"), Column("verdict", "verdict"), Column("detail"))
FIX_COLUMNS = (Column("key", "name"), Column("value"))
FINE = ("same", "converted", "ignored")
"""Statuses of names that load unchanged."""

LABEL = 22
"""Width of the column of labels."""


def match_facts(found: Match) -> Iterator[tuple[str, str]]:
    """Yield labelled lines: whether the model loads, and the renames that make it load."""
    yield "checkpoint", found.path
    yield "model", found.to
    if found.whole is False:
        yield "NOT WHOLE", "ckptools verify says what is wrong; names that only missing files have are not known here"
    facts = [found.found]
    absent = found.model_names - found.same - found.converted
    if found.loads and absent:
        facts.append(f"{plural(absent, 'name')} tied to another one")
    if more := sum(row.status == "unexpected" for row in found.rows) if not absent else 0:
        facts.append(f"{plural(more, 'name')} of the checkpoint too many")
    yield _verdict_label(found), "; ".join(facts)
    if found.not_compared:
        yield "not compared", "; ".join(found.not_compared)
    for n, rename in enumerate(found.renames):
        old, new = rename.example
        left = any(group.status not in ("dtype", *FINE) for group in found.groups)
        then = "" if left or found.whole is False or n + 1 < len(found.renames) else "; then it loads"
        assumed = ": assumed" if rename.assumed else ""
        yield (
            ("after this rename" if n == 0 else "and after this one"),
            f"{rename.fit} of {found.model_names}: {rename_words(rename)} ({old} becomes {new}){assumed}{then}",
        )
    for rename in found.alternatives:
        yield "not chosen", f"{rename_words(rename)} would fix {rename.fixes}, and another rename as many"


def _verdict_label(found: Match) -> str:
    if found.loads:
        return "loads"
    return "DOES NOT LOAD" if found.apart or any(row.status not in FINE for row in found.rows) else "names fit"


def group_cells(group: MatchGroup) -> list[str]:
    """Make the cells of a group for `COLUMNS`."""
    return [group.status, group.names, str(group.keys), group.checkpoint, group.model, group.note]


def next_lines(found: Match, arguments: str, written: Path | None) -> Iterator[str]:
    """Yield the command that writes the checkpoint under the names of the model.

    `arguments` open the checkpoint again; `written` is the file with the map of names, if one was written.
    """
    if found.apart:
        if found.like:
            yield f"use it: ckptools consolidate {arguments} -o converted.pt --like {quoted([found.like])}"
        else:
            yield "load it with from_pretrained, and save that model's state_dict()"
    if found.fix:
        options = _options(found.renames) or ["--map", str(written or "map.json")]
        if options[0] == "--map" and written is None:
            yield "keep the names: --write-map map.json"
        yield f"use it: ckptools consolidate {arguments} -o renamed.pt --only model {quoted(options)}"
    for command in dict.fromkeys(row.next for row in found.resume if row.next):
        verb, _, rest = command.partition(" ")
        yield f"try: ckptools {verb} {arguments} {rest}" if verb == "consolidate" else f"try: {command}"
    if found.assumed:
        old, new = next(iter(found.assumed.items()))
        pair = f"{printable(clip_middle(old, 60))} becomes {printable(clip_middle(new, 60))}"
        yield f"assumed, and in no map: {plural(len(found.assumed), 'name')} ({pair}); --json lists them"
    for rename in found.alternatives:
        if option := _options((rename,)):
            yield f"one of several: ckptools consolidate {arguments} -o renamed.pt --only model {quoted(option)}"


def _options(renames: Sequence[Rename]) -> list[str]:
    """Express renames as command-line options; none if only a map can express them."""
    if any(one.kind != "prefix" or not (one.old + one.new).isprintable() or "=" in one.old for one in renames):
        return []
    if len(renames) == 1 and renames[0].old and not renames[0].new:
        return ["--strip-prefix", renames[0].old]
    return [word for rename in renames for word in ("--rename", f"{rename.old}={rename.new}")]
