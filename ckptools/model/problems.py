"""The problems of a checkpoint: the table of their codes, and the record of a problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, SupportsIndex, TypeVar, overload

from ckptools.errors import SAVE_FAILED
from ckptools.text import and_more, clip, named_ranks, plural, printable

# -- how much of a checkpoint a rule or a check covered: all of it, a part, or nothing ---------------------------------


class Looked(NamedTuple):
    """The number of files, tensors, zip entries or counters that a check covered.

    Attributes:
        looked_at: number that it looked at.
        of: total number.
        rest: why it did not look at the rest.
    """

    looked_at: int
    of: int
    rest: str = ""

    @property
    def result(self) -> Literal["ok", "partly", "not judged"]:
        """The result of a check without findings: `ok` only if everything was looked at."""
        if not self.looked_at:
            return "not judged"
        return "ok" if self.looked_at == self.of else "partly"

    @property
    def words(self) -> str:
        """Why the check did not cover everything; empty if it did."""
        if self.result == "ok":
            return ""
        return self.rest if not self.looked_at else f"{self.looked_at} of {self.of} looked at: {self.rest}"

    def _record(self) -> dict[str, Any]:
        return {"result": self.result, **self._asdict()}


# -- records: data with named fields, which show themselves in one line at a prompt and as a table in a notebook -------
# The model must not import the code that makes tables, so `api` calls `show_with` once, with functions that import it
# when a notebook asks. Wrapping every record instead would give users a second class of each to learn. Before that
# call, a notebook shows the line.


Class = TypeVar("Class", bound=type)

MAX_LINE = 120
"""Characters of a `repr`."""

MAX_TEXT = 40
"""At most this many characters of a text in a `repr`."""

SCALARS = frozenset({str, int, float, bool, type(None)})
"""Types that need no conversion: most fields of a large checkpoint's rows have one of them."""

_html_of: Callable[[Any], str] | None = None
_text_of: Callable[[Any], str] = repr
_table_of: Callable[[Any, str], str] | None = None


def show_with(
    html_of: Callable[[Any], str], text_of: Callable[[Any], str], table_of: Callable[[Any, str], str]
) -> None:
    """Set the functions that render records as HTML, text and tables.

    Args:
        html_of: makes the HTML of a record for a notebook.
        text_of: makes the text of a record that its command prints.
        table_of: makes a table of rows in one of tabulate's formats.
    """
    global _html_of, _text_of, _table_of  # the one place where the model learns of a view
    _html_of, _text_of, _table_of = html_of, text_of, table_of


def as_html(value: Any) -> str | None:
    """The HTML of a value for a notebook; None before `show_with` was called, so that the `repr` is shown."""
    return None if _html_of is None else _html_of(value)


def as_text(value: Any) -> str:
    """The text of a record as its command prints it; its `repr` before `show_with` was called."""
    return _text_of(value)


def displayed(record: Class) -> Class:
    """Give a class of records a one-line `repr`, a table in a notebook, and `to_dict`.

    The line shows the result of its method `_summary`, or else its fields.
    """
    if not hasattr(record, "to_dict"):
        record.to_dict = to_dict  # type: ignore[attr-defined]
    record.__repr__ = one_line  # type: ignore[method-assign, assignment]
    record._repr_html_ = as_html  # type: ignore[attr-defined]
    return record


def one_line(record: Any) -> str:
    """Render a record in at most 120 characters that are safe to print: `<RankFile rank 3: read, 301.3 MiB>`."""
    return line_of(type(record).__name__, record._summary() if hasattr(record, "_summary") else _fields_in_line(record))


def line_of(kind: str, words: str) -> str:
    """Make a `repr` of at most 120 characters: a class name and a description."""
    return f"<{clip(printable(f'{kind} {words}'.rstrip()), MAX_LINE - 2)}>"


def _fields_in_line(record: Any) -> str:
    known = ((name, getattr(record, name)) for name in record_fields(record) or ())
    return ", ".join(f"{name}={_brief(value)}" for name, value in known if value is not None and value not in ("", ()))


def _brief(value: Any) -> str:
    """Render a field in a few characters, in time that the file cannot inflate."""
    if isinstance(value, (str, Path)):
        return clip(str(value), MAX_TEXT)
    if isinstance(value, (list, tuple)) and len(value) <= 8 and all(type(v) is int for v in value):
        return str(list(value))
    if isinstance(value, (list, tuple, set, frozenset, Mapping)):
        return f"<{len(value)}>"
    if isinstance(value, Enum):
        return value.name
    return f"{value:.4g}" if isinstance(value, float) else clip(repr(value), MAX_TEXT)


# -- as plain data -----------------------------------------------------------------------------------------------------


def to_dict(record: Any) -> dict[str, Any]:
    """The fields of a record as a plain dict; the result of its method `_record`, if it has one.

    Raises:
        TypeError: the object is not a record.
    """
    if hasattr(record, "_record"):
        return {str(name): to_plain(value) for name, value in record._record().items()}
    names = record_fields(record)
    if names is None:
        raise TypeError(f"{type(record).__name__} is no record")
    return {name: to_plain(getattr(record, name)) for name in names}


def record_fields(value: Any) -> tuple[str, ...] | None:
    """The names of a record's public fields (without leading `_`); None if the value is not a record."""
    kind: type = type(value)
    return _fields_of(kind)


@lru_cache(maxsize=1024)
def _fields_of(record: type) -> tuple[str, ...] | None:
    if is_dataclass(record):
        names = tuple(field.name for field in fields(record))
    elif issubclass(record, tuple) and hasattr(record, "_fields"):
        names = record._fields
    else:
        return None
    return tuple(name for name in names if not name.startswith("_"))


def to_plain(value: Any) -> Any:
    """Convert a field of a record to texts, numbers, flags, None, and lists and dicts of these."""
    if type(value) in SCALARS:
        return value
    if hasattr(value, "_record") or record_fields(value) is not None:
        return to_dict(value)
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(child) for child in value]
    return str(value) if isinstance(value, Path) else value


# -- rows --------------------------------------------------------------------------------------------------------------


Row = TypeVar("Row")
Key = TypeVar("Key")


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Group rows by key, in the order in which the keys first occur."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


class RowMethods(Generic[Row]):
    """Methods that a sequence of records has in a notebook."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Row]:
        raise NotImplementedError

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def sort(self, by: str, reverse: bool = False) -> Rows[Row]:
        """Sort the rows by a field, such as `rows.sort("nbytes", reverse=True)[:10]`; rows without a value come last.

        Raises:
            AttributeError: the rows have no such field.
        """
        missing = [row for row in self if _is_missing(getattr(row, by))]
        known = [row for row in self if not _is_missing(getattr(row, by))]
        return Rows([*sorted(known, key=lambda r: getattr(r, by), reverse=reverse), *missing])

    def to_dicts(self) -> list[dict[str, Any]]:
        """Convert each row to a plain dict: texts, numbers, flags, None, and lists and dicts of these."""
        return [to_dict(row) for row in self]

    def to_markdown(self) -> str:
        """Make a Markdown table of the fields of `to_dicts`, with values as on a screen."""
        return repr(self) if _table_of is None else _table_of(self, "github")

    def __str__(self) -> str:
        """The table as on a screen, for `print`; the `repr` if there are no rows."""
        return (_table_of(self, "simple") if _table_of is not None else "") or repr(self)


class Rows(RowMethods[Row], tuple[Row, ...]):
    """A tuple of records, such as one for each tensor, which a notebook shows as a table.

    `pandas.DataFrame(rows.to_dicts())` is a table of them.

    Args:
        rows: the records: named tuples or dataclasses, all of one class.
    """

    __slots__ = ()
    __iter__ = tuple.__iter__

    @overload
    def __getitem__(self, index: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows[Row]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Row | Rows[Row]:
        found: Any = super().__getitem__(index)
        return Rows(found) if isinstance(index, slice) else found

    def __repr__(self) -> str:
        kind = type(self[0]).__name__ if self else "row"
        return f"<{plural(len(self), 'row')} of {kind}>" if self else "<no rows>"


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


# -- the codes, and a problem ------------------------------------------------------------------------------------------


Severity = Literal["error", "warning", "note"]

Forbids = Literal["nothing", "complete output", "any output"]
"""What an error forbids `consolidate` to write. `--allow-missing` permits `complete output`; no option permits
`any output`, because the files are not of one checkpoint or contradict each other.
"""

Lacks = Literal["nothing", "file", "part", "value", "tensor", "elements"]
"""What a problem makes unavailable: a whole file, a part with unknown names, a plain value, a tensor, or some
elements of a tensor.
"""


class Code(Enum):
    """Every problem that a checkpoint can have, with its code and usual severity.

    Attributes:
        code: stable, such as `CK001`; printed in messages and accepted by `--ignore`.
        meaning: a description in a few words.
        severity: an error is surely wrong; a warning may be; a note is for information.
        forbids: output that an error of this kind forbids `consolidate` to write.
        lacks: part of the checkpoint that the problem makes unavailable.
    """

    FILE_MISSING = "CK001", "file missing", "error", "complete output", "file"
    FILE_CUT = "CK002", "file cut short or damaged", "error", "complete output", "file"
    ODD_FILE_SIZE = "CK003", "file of an odd size", "warning"
    BAD_CHECKSUM = "CK004", "bad CRC-32", "error", "complete output", "elements"
    VALUE_LOST = "CK005", "value lost or damaged inside a file", "error", "complete output", "value"
    MIXED_SAVES = "CK006", "files of different steps or saves", "error", "any output"
    METADATA_CONTRADICTS = "CK007", "metadata that contradicts itself", "error", "any output"
    LEFT_OVER = "CK008", "left over from an interrupted write", "warning"
    STRAY_FILE = "CK009", "stray or duplicate rank file", "error", "any output"
    NAME_CONTRADICTS = "CK010", "file name and content disagree", "warning"
    ONE_OF_SEVERAL = "CK011", "one file of several", "error", "complete output", "part"
    KEPT_AS_SAVED = "CK012", "kept as the framework has it", "note"
    NOT_READ = "CK013", "file beside it that is not read", "note"
    MANIFEST_DIFFERS = "CK014", "differs from the manifest", "error"
    FILE_UNREADABLE = "CK015", "file that may not be read, or whose disk fails", "error", "complete output", "file"
    TRACKER_ASTRAY = "CK016", "tracker that names no newest whole checkpoint", "error"
    NEVER_WRITTEN = "CK017", "bytes that were never written to the disk", "error", "complete output", "value"
    FILE_CONTRADICTS = "CK018", "data file that contradicts the metadata", "error", "complete output", "file"
    FILLED = "CK019", "values that consolidate filled in", "error", "complete output", "value"
    LEFT_OUT = "CK020", "left out by consolidate", "error", "complete output", "value"
    ORIGIN_UNREADABLE = "CK021", "record of origin that cannot be read", "error", "complete output", "value"
    NAMED_AS_ANOTHER_RANK = "CK022", "rank file under the name of another rank", "error"
    TENSOR_GAP = "CK101", "gap in a tensor", "error", "complete output", "elements"
    TENSOR_OVERLAP = "CK102", "overlap in a tensor", "error", "complete output"
    WORLD_SIZES_DISAGREE = "CK103", "world sizes disagree", "error", "any output"
    LAYOUT_DISAGREES = "CK104", "ranks disagree on layout, shape or dtype", "error", "any output"
    COPIES_DIFFER = "CK105", "copies that should be equal differ", "error", "any output"
    TENSOR_NOT_JOINED = "CK106", "tensor that cannot be put together", "warning", "complete output", "tensor"
    MODEL_PART_MISSING = "CK107", "part of the model missing", "error", "complete output", "part"
    LAYOUT_INFERRED = "CK108", "layout that the files do not state", "note"
    PLACEHOLDERS = "CK109", "placeholders in the place of tensors", "error", "complete output", "part"
    SIZE_UNSTATED = "CK110", "tensors whose size no file states", "warning", "complete output", "part"
    NOT_FINITE = "CK201", "NaN or infinity", "error"
    ZEROS = "CK202", "zeros where there should be values", "error"
    NO_OPTIMIZER_STATE = "CK203", "no optimizer state for a parameter", "warning"
    STEPS_DISAGREE = "CK204", "step counters disagree", "warning"
    LEARNING_RATES_DISAGREE = "CK205", "scheduler and param groups have different learning rates", "warning"
    RNG_STATES_EQUAL = "CK206", "RNG states equal on several ranks", "warning"
    PARAM_GROUPS = "CK207", "parameter in no param group, or in two", "error"
    OPTIMIZER_STATE_SHAPE = "CK209", "optimizer state of another shape than its parameter", "error"
    OPTIMIZER_STATE_UNNAMED = "CK210", "optimizer state without a sure name", "warning"
    VALUES_ODD = "CK211", "values that are worth a look", "warning"
    FOREIGN_CLASSES = "CK301", "foreign classes, kept as data", "note"
    UNSAFE_NAME = "CK302", "name that could run code", "warning"
    WHOLE_MODULE = "CK303", "whole module instead of a state dict", "note"

    def __init__(
        self, code: str, meaning: str, severity: Severity, forbids: Forbids = "nothing", lacks: Lacks = "nothing"
    ) -> None:
        self.code, self.meaning, self.severity = code, meaning, severity
        self.forbids, self.lacks = forbids, lacks

    @property
    def spoils(self) -> bool:
        """Whether an error of this kind makes a checkpoint not whole: data is missing, or is of another save."""
        return self.forbids != "nothing"


class Differing(NamedTuple):
    """The values that ranks have of a thing that all ranks should share.

    Attributes:
        name: name of the thing, in a word or two: `lr`.
        values: the values in words, each with its ranks; without the usual one.
        usual: the value that more than half of the ranks have; "" without such a majority.
        hidden: number of further ranks whose values are not listed.
        plain: whether it is a plain value; else a tensor, of which `consolidate` can take one copy.
    """

    name: str
    values: tuple[tuple[str, tuple[int, ...]], ...]
    usual: str = ""
    hidden: int = 0
    plain: bool = True


@displayed
@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a checkpoint, or a note for its user.

    Attributes:
        kind: its entry in the table of known problems.
        message: one line: expected, found, what to do.
        rank: the rank it is about.
        tensor: fqn of the tensor it is about.
        severity: that of its kind, unless this problem is more or less grave.
        files: names of the files it is about, including those that the message only counts.
        ranks: the ranks it is about, if there are several, including those that the message only counts.
        replicated: whether other files hold undamaged copies of the affected values.
        differing: each rank's value, where ranks should share one.
        contents: the last part of the message, which states the content of a lost file; problems that follow from
            the loss repeat it.
        found: the rank, name or size that the file's content states.
        expected: the rank, name or size that the file should have.
    """

    kind: Code
    message: str
    rank: int | None = None
    tensor: str | None = None
    severity: Severity = None  # type: ignore[assignment]  # from here on, as the kind has it
    files: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    replicated: bool = False
    differing: Differing | None = None
    contents: str = ""
    found: int | str | None = None
    expected: int | str | None = None

    def __post_init__(self) -> None:
        if not self.severity:
            object.__setattr__(self, "severity", self.kind.severity)

    @property
    def code(self) -> str:
        """The problem's code, such as `CK001`."""
        return self.kind.code

    @property
    def fact(self) -> str:
        """The message without the part about a lost file's content."""
        return self.message.removesuffix(self.contents)

    def to_dict(self) -> dict[str, Any]:
        """The problem's code, severity, rank, tensor, message and files."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        names = ("code", "severity", "rank", "tensor", "message", "files")
        return {name: getattr(self, name) for name in names}

    def _summary(self) -> str:
        return f"{self.severity} {self}"

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """Every rank that it is about; empty for a problem that concerns no rank's own files."""
        return self.ranks or (() if self.rank is None else (self.rank,))

    def __str__(self) -> str:
        where = [f"rank {self.rank}"] if self.rank is not None else []
        where += [self.tensor] if self.tensor is not None else []
        return "  ".join([self.code, *where, self.message])


def worst_first(problems: Iterable[Problem]) -> Rows[Problem]:
    """Sort problems: errors, then warnings, then notes, each in the order in which they were found."""
    return Rows(sorted(problems, key=lambda p: ("error", "warning", "note").index(p.severity)))


# -- remedies: the user's next step for each kind of problem, with the ranks' values where they differ -----------------


ORIGIN = "where it was saved"
AGAIN = f"copy {{files}} again from {ORIGIN}"
WHICH_COPY = "; verify --deep finds a damaged copy, --prefer-rank takes one"
AFTER_DEEP = "; --prefer-rank takes one"
"""Replaces `WHICH_COPY` in the remedies of verify --deep, which has just read every copy."""
BACK = "consolidate again once the files that were lost are back"
EARLIER = "go back to an earlier checkpoint"
REMEDIES = {
    Code.FILE_MISSING: "put {files} beside the others; --allow-missing writes what is whole",
    Code.FILE_CUT: f"{AGAIN}; --allow-missing writes what is whole",
    Code.ODD_FILE_SIZE: f"compare its size with the one where it was saved; if that differs, {AGAIN}",
    Code.BAD_CHECKSUM: f"{AGAIN}; --allow-missing leaves out what is damaged",
    Code.VALUE_LOST: f"{AGAIN}; --allow-missing leaves out what is damaged",
    Code.MIXED_SAVES: f"put the files of one save together: {AGAIN}",
    Code.METADATA_CONTRADICTS: "copy the metadata again from where it was saved",
    Code.LEFT_OVER: "delete it, once no process writes there",
    Code.STRAY_FILE: "move what does not belong here away; give files that changed places their names back",
    Code.NAME_CONTRADICTS: "rename what has the wrong name, if you trust the content",
    Code.ONE_OF_SEVERAL: "open its files together, by their folder; `ckptools formats` lists what is joined",
    Code.MANIFEST_DIFFERS: f"{AGAIN}, or write the manifest anew",
    Code.FILE_UNREADABLE: "make {files} readable",
    Code.TRACKER_ASTRAY: "let the tracker name the newest whole checkpoint: ckptools ls",
    Code.NEVER_WRITTEN: f"{AGAIN}; --allow-missing leaves out what was never written",
    Code.FILE_CONTRADICTS: "put the data files back under the names that they had, or copy {files} again",
    Code.FILLED: BACK,
    Code.LEFT_OUT: BACK,
    Code.ORIGIN_UNREADABLE: "consolidate again",
    Code.NAMED_AS_ANOTHER_RANK: "give {files} the names of the ranks that they hold; consolidate goes by the content",
    Code.TENSOR_GAP: "find the file that holds it; --allow-missing leaves it out, or fills it with --fill",
    Code.TENSOR_OVERLAP: "put the files of one save together",
    Code.WORLD_SIZES_DISAGREE: "put the files of one save together",
    Code.LAYOUT_DISAGREES: f"put the files of one save together: {AGAIN}",
    Code.COPIES_DIFFER: f"{AGAIN}{WHICH_COPY}",
    Code.TENSOR_NOT_JOINED: "give what the message names; --allow-missing leaves such tensors out",
    Code.MODEL_PART_MISSING: "put the missing part beside it",
    Code.PLACEHOLDERS: "consolidate the folder of ZeRO-3's rank files; to save a model, gather its parameters first"
    " (stage3_gather_16bit_weights_on_model_save)",
    Code.SIZE_UNSTATED: "give the shapes with --shapes FROM, or --allow-missing if you know that no rank is missing",
    Code.NOT_FINITE: EARLIER,
    Code.ZEROS: EARLIER,
    Code.VALUES_ODD: "compare with an earlier checkpoint: ckptools diff --values",
    Code.NO_OPTIMIZER_STATE: "freeze it when you resume, or expect its moments to begin at zero",
    Code.STEPS_DISAGREE: "compare with an earlier checkpoint: ckptools diff",
    Code.LEARNING_RATES_DISAGREE: "set the learning rate by hand when you resume",
    Code.RNG_STATES_EQUAL: "seed each rank anew when you resume",
    Code.PARAM_GROUPS: "correct the param groups before the optimizer is loaded",
    Code.OPTIMIZER_STATE_SHAPE: EARLIER,
    Code.OPTIMIZER_STATE_UNNAMED: "give the names with --names",
    Code.UNSAFE_NAME: "do not load it with torch.load(weights_only=False); ckptools runs nothing of it",
}
"""The user's next step by kind of problem; `{files}` stands for the files of its ranks."""

WITHOUT_MAJORITY = {
    Code.MIXED_SAVES: "put the files of one save together: {values}",
    Code.COPIES_DIFFER: f"find out which is right: {{values}}{WHICH_COPY}",
}
"""The next step if no value has a majority among the ranks; `{values}` stands for the values."""

MAX_DIFFERING = 3
"""At most this many differing values are named in a remedy."""


def remedy_of(kind: Code, group: Sequence[Problem]) -> str:
    """The next step for problems of one kind with one cause; "" if none is known."""
    ranks = {rank for p in group for rank in p.all_ranks}
    several = len(ranks or {name for p in group for name in p.files}) > 1
    files = f"the file{'s' if several else ''}" + (f" of {named_ranks(ranks)}" if ranks else "")
    values = _values(group)
    remedy = (WITHOUT_MAJORITY if values and not ranks else REMEDIES).get(kind, "")
    if any(p.differing and p.differing.plain for p in group):
        remedy = remedy.removesuffix(WHICH_COPY)
    if kind is Code.FILE_CUT and all(SAVE_FAILED in p.message for p in group):
        remedy = f"{EARLIER}, as ckptools ls lists them; --allow-missing writes what is whole"
    if kind is Code.NEVER_WRITTEN and all(p.severity == "warning" for p in group):  # zeros are written as they are
        remedy = AGAIN
    if kind is Code.STRAY_FILE and all(p.severity == "warning" for p in group):
        remedy = f"compare {{files}} with {ORIGIN}, and move away a file that does not belong here"
    if kind is Code.FILE_MISSING and len(ranks) * 2 > max(ranks, default=0) + 1 > 2:  # most of them are not here
        files = f"the other {plural(len(ranks), 'rank file')}"
        remedy = remedy.replace("the others", "what is here")
    origin = "where they were saved" if several else ORIGIN
    return remedy.replace(ORIGIN, origin + (": {values}" if values else "")).format(files=files, values=values)


def _values(group: Sequence[Problem]) -> str:
    """Describe ranks' differing values: `its lr is 0.02, others have 0.003`; once per set of ranks."""
    first = {p.all_ranks: p.differing for p in reversed(group) if p.differing}
    if len(first) == 1 == len({p.all_ranks for p in group}):
        (found,) = first.values()
        if found.usual and len(found.values) == 1 and not found.hidden:
            ((value, ranks),) = found.values
            return f"{'its' if len(ranks) == 1 else 'their'} {found.name} is {value}, others have {found.usual}"
    listed = [_listed(found) for _, found in sorted(first.items())]
    return "; ".join(listed[:MAX_DIFFERING]) + and_more(len(listed) - MAX_DIFFERING)


def _listed(found: Differing) -> str:
    """List the values with their ranks: `lr is 0.003 (rank 0) or 0.02 (rank 1)`."""
    values = [f"{value} ({named_ranks(ranks)})" for value, ranks in found.values]
    values += [f"other values ({plural(found.hidden, 'more rank')})"] if found.hidden else []
    values += [f"{found.usual} (others)"] if found.usual else []
    return f"{found.name} is {' or '.join(values)}"
