"""Options of several commands, as dataclasses: each option is declared, explained and given its default once.

They concern opening a checkpoint, checks, selecting keys and rows, the form of the output, and messages beside it. A
command's parameter annotated with such a dataclass stands for all its fields; for typer and the user, options are flat.
An option of one command is a parameter of its own, whose default `option` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ckptools.errors import UsageError
from ckptools.option import option

if TYPE_CHECKING:
    from ckptools.keys.entries import Selection


Record = TypeVar("Record")

# -- dataclasses of options --------------------------------------------------------------------------------------------


def records_of(command: Callable[..., None]) -> dict[str, type]:
    """Find the parameters of a command that are dataclasses of options, by name."""
    named = {name: command.__globals__.get(text) for name, text in command.__annotations__.items()}
    return {name: record for name, record in named.items() if is_dataclass(record) and isinstance(record, type)}


def own_options(command: Callable[..., None]) -> dict[str, Field[Any]]:
    """Find the parameters of a command that are options by themselves, by name."""
    defaults = {name: known.default for name, known in signature(command).parameters.items()}
    return {name: default for name, default in defaults.items() if isinstance(default, Field)}


def call(command: Callable[..., None], given: Mapping[str, Any]) -> None:
    """Call a command with flat options, grouped into its dataclasses of options."""
    defaults = {name: known.default for name, known in own_options(command).items()}
    own = {name: given[name] for name in signature(command).parameters if name in given}
    command(**defaults | own, **{name: fill(record, given) for name, record in records_of(command).items()})


def fill(record: type[Record], given: Mapping[str, Any]) -> Record:
    """Make a dataclass of options, and dataclasses in its fields, from flat options; ignore other names in `given`."""
    found: dict[str, Any] = {}
    for known in fields(record):  # type: ignore[arg-type]
        if is_dataclass(known.default_factory):
            found[known.name] = fill(known.default_factory, given)
        elif known.name in given:
            found[known.name] = given[known.name]
    return record(**found)


def declared_options(command: Callable[..., None]) -> dict[str, Field[Any]]:
    """Find all options of a command by name: its own, and fields of its dataclasses of options."""
    options = own_options(command)
    for record in (*records_of(command).values(), OutputOptions):
        options |= {known.name: known for known in _options_in(record)}
    return options


def _options_in(record: type) -> Iterator[Field[Any]]:
    for known in fields(record):
        if is_dataclass(known.default_factory) and isinstance(known.default_factory, type):
            yield from _options_in(known.default_factory)
        elif "help" in known.metadata:
            yield known


def flags_of(command: Callable[..., None]) -> dict[str, str]:
    """Map every spelling of a command's boolean flags to the option that it sets."""
    off = {name: known for name, known in declared_options(command).items() if known.default is False}
    return {word: name for name, known in off.items() for word in spellings(name, known)}


def spellings(name: str, known: Field[Any]) -> list[str]:
    """List the spellings of an option: `--all-ranks` for `all_ranks`, unless others are declared."""
    return str(known.metadata["flag"] or f"--{name.replace('_', '-')}").split()


# -- opening -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpeningOptions:
    """Options for opening a checkpoint, of every command; `heading` is above them in the full help."""

    heading = "Opening"

    step: int | None = option(None, "Of the folder of a run, the checkpoint of this step.", common=True, metavar="N")
    ranks: str | None = option(
        None,
        "What the rank files in the folder PATH are called, such as 'model-{rank}-of-{world}.pt'.",
        common=True,
        metavar="PATTERN",
    )
    only_this_file: bool = option(False, "Do not look for the other ranks' files.", common=True)
    follow_symlinks: bool = option(False, "Accept links that lead out of the folder.")
    weights: Literal["fp32", "module"] = option(
        "fp32", "Where the model is stored twice (DeepSpeed, Megatron): fp32 master copy, or module."
    )
    rules: Path | None = option(None, "JSON that says how tensor-parallel weights are joined (Megatron, Meta Llama).")
    shapes: Path | None = option(
        None,
        "For FSDP1 flat parameters: where their shapes are stated, another checkpoint or a JSON of name to shape.",
        metavar="FROM",
    )
    names: Path | None = option(
        None,
        "For an optimizer keyed by number: what names its parameters, a checkpoint that keeps the module's order or a "
        "JSON list in the optimizer's order.",
        metavar="FROM",
    )
    model: str | None = option(
        None,
        "Which model, where there are several: a section's name, a role (ema, teacher, reference, critic) or all. "
        "[default: the trained one]",
        common=True,
        metavar="NAME",
    )
    salvage: bool = option(
        False, "Read a .pt that is cut short up to the cut; what is behind it is a gap.", common=True
    )
    jobs: int | None = option(None, "Threads, and processes that open many rank files.", flag="--jobs -j")

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise UsageError(None, f"--jobs {self.jobs}: must be at least 1")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `open_checkpoint`, which is given the path of the chosen step."""
        return {name: value for name, value in vars(self).items() if name != "step"}


ONE_CHECKPOINT = ("ranks", "only_this_file", "model")
"""Options that go with a single checkpoint, not with a run."""


@dataclass(frozen=True)
class RunOptions(OpeningOptions):
    """Options for opening each checkpoint of a run; options for a single checkpoint are hidden and refused."""

    ranks: str | None = option(None, "The names of one checkpoint's rank files.", hidden=True)
    only_this_file: bool = option(False, "One file of one checkpoint.", hidden=True)
    step: int | None = option(None, "The step of one checkpoint.", hidden=True)
    model: str | None = option(None, "One model of one checkpoint.", hidden=True)

    def of_run(self, command: str) -> dict[str, Any]:
        """Return the arguments to open each checkpoint of a run, refusing options for a single checkpoint."""
        for name in (*ONE_CHECKPOINT, "step"):
            if getattr(self, name) not in (None, False):
                word = f"--{name.replace('_', '-')}"
                raise UsageError(None, f"{word} goes with one checkpoint; {command} looks for those of a run by itself")
        return {name: value for name, value in self.arguments.items() if name not in ONE_CHECKPOINT}


@dataclass(frozen=True)
class WatchedRunOptions(RunOptions):
    """Options for opening each checkpoint of a run that is watched."""

    model: str | None = option(
        None,
        "With --values: whose norms to compare, where there are several models: a section's name or a role (ema, "
        "teacher, reference, critic). [default: the trained one]",
        common=True,
        metavar="NAME",
    )

    def of_run(self, command: str) -> dict[str, Any]:
        """Return the arguments to open each checkpoint of a run, refusing other options for a single checkpoint."""
        return {**RunOptions.of_run(replace(self, model=None), command), "model": self.model}


# -- checks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckOptions:
    """Options for the checks of a checkpoint, which are arguments of the function `verify`."""

    deep: bool = option(False, "Read every tensor; compare the CRC-32 that files carry.", common=True)
    values: bool = option(False, "Read every tensor; look for NaN and infinities.", common=True)
    manifest: Path | None = option(None, "A JSON that consolidate --manifest wrote: compare every digest in it.")
    ignore: Sequence[str] = option(
        (),
        "Problem codes that do not count, such as CK206,CK105; `ckptools explain CK206` says what one is.",
        common=True,
        metavar="CODES",
        typed=list[str],
    )


# -- keys and rows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelectionOptions:
    """Options that select keys of a checkpoint."""

    heading = "Keys"

    filter: list[str] | None = option(
        None,
        "Only keys that match, such as 'blocks.*.weight' (* matches dots too); may be repeated.",
        common=True,
        metavar="GLOB",
        completed="keys",
    )
    exclude: list[str] | None = option(
        None, "No keys that match; may be repeated.", common=True, metavar="GLOB", completed="keys"
    )
    section: str | None = option(
        None,
        "Only one section: model, optimizer, scheduler, rng, other, a section's own name; or all.",
        common=True,
        metavar="NAME",
        completed="sections",
    )

    @property
    def selection(self) -> Selection:
        """Turn the options into a `Selection` of keys."""
        from ckptools.keys.entries import Selection

        return Selection.given(self.filter, self.exclude, self.section)


@dataclass(frozen=True)
class RowOptions:
    """Options that select and sort the rows of a table."""

    heading = "Rows"

    sort: str | None = option(
        None,
        "Sort by this column: names from a to z, numbers from the largest; -COLUMN the other way.",
        common=True,
        metavar="COLUMN",
    )
    limit: int | None = option(
        None, "Show this many rows; 0 for all. [default: what fits a terminal, all when piped]", common=True
    )

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 0:
            raise UsageError(None, f"--limit {self.limit}: 0 is for all")


# -- output ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JsonOptions:
    """The option for output that is text or JSON."""

    heading = "Output"

    json: bool = option(False, "Print one JSON object for other programs.", common=True)


@dataclass(frozen=True)
class TableOptions(JsonOptions):
    """Options for the output of a record that is more than rows."""

    jsonl = False
    table_format: str | None = option(
        None, "Print the rows alone, as a github, tsv, latex, html or other table of tabulate.", metavar="FORMAT"
    )

    def __post_init__(self) -> None:
        """Refuse two forms at once, and an unknown table format, before anything is read."""
        if self.json + self.jsonl + (self.table_format is not None) > 1:
            raise UsageError(None, "--json, --jsonl and --table-format are forms of one answer: give one of them")
        if self.table_format is not None:
            from ckptools.display.tables import check_table_format

            check_table_format(self.table_format)

    @property
    def is_text(self) -> bool:
        """Whether the output is text that fits the screen."""
        return not (self.json or self.jsonl or self.table_format)


@dataclass(frozen=True)
class AnswerOptions(TableOptions):
    """Options for the output of a record that consists of rows."""

    jsonl: bool = option(False, "Print one JSON object per row, each on its line.")


@dataclass(frozen=True)
class EventOptions(AnswerOptions):
    """Options for the output of the events of a watch."""

    json: bool = option(False, "With --once: print one JSON object for other programs.")
    table_format: str | None = option(None, "A table cannot grow with each event.", hidden=True)
    jsonl: bool = option(False, "Print one JSON object per event, each on its line.")


Color = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class OutputOptions:
    """Options of every command for messages beside its output, and for colour."""

    heading = "Every command"

    quiet: bool = option(False, "Say nothing but the answer, and errors.", flag="--quiet -q")
    verbose: bool = option(False, "Say also what was read, and how long it took.", flag="--verbose -v", common=True)
    debug: bool = option(False, "Where something goes wrong, show Python's traceback too.")
    color: Color = option("auto", "Colour beside the words: auto (on a terminal), always or never; NO_COLOR is never.")
