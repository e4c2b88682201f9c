"""The options of consolidating, as the command line and Python share them, and what they ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckptools.dtypes import ITEMSIZE, SHORT, is_floating
from ckptools.errors import UsageError
from ckptools.model.values import describe_for_error
from ckptools.option import option
from ckptools.text import few, parse_bytes

if TYPE_CHECKING:
    from ckptools.consolidate.writers.layout import WriteOptions

MAX_NAMED = 5
"""Names in a note."""


@dataclass(frozen=True)
class ConsolidateOptions:
    """Which parts of a checkpoint to write, how, and what to check before the output gets its name.

    Each is an option of the command and an argument of `ckptools.Checkpoint.consolidate`, under its name and default.
    `jobs`, which comes with the options of opening there, is None for one thread per core, at most four.
    """

    format: str | None = option(
        None, "pt, safetensors or dcp, for a name without suffix (a file gets that suffix) or DIR/."
    )
    only: str | None = option(
        None,
        "model (the bare state dict), optimizer, or all (the same tree); or a glob of names of the model, such as"
        " 'blocks.*'. safetensors: model; else: all.",
    )
    map: Mapping[str, str] | str | Path | None = option(
        None, "A JSON of old name to new, such as match --write-map writes.", typed=Path | None
    )
    like: str | Path | None = option(
        None,
        "Write DIR/ like this Hugging Face folder or config.json: its names, shapes, dtypes, files, config, tokenizer.",
        metavar="ORIGINAL",
        typed=str | None,
    )
    assume: bool = option(False, "With --like: take what only shapes or a trainer's defaults speak for.")
    strip_prefix: str | None = option(None, "Take this beginning of names away, such as module.", metavar="PREFIX")
    rename: Sequence[str] = option(
        (),
        "Rename a tensor, or a module with all below it; with a dot behind both, a beginning of names.",
        metavar="OLD=NEW",
        typed=list[str],
    )
    dtype: str | None = option(None, "dtype for the model's floating-point tensors, such as bf16; others keep theirs.")
    max_shard_size: int | str | None = option(
        None,
        "Bytes of tensors per file of safetensors (several get an index) or of a DCP, such as 5GB.",
        typed=str | None,
    )
    tied: str = option("keep", "safetensors: keep writes a tied weight under each name, drop only under the first.")
    keep_types: bool = option(False, "Keep timedeltas, numpy arrays and the like, which plain torch.load refuses.")
    force: bool = option(False, "Overwrite an output that exists.")
    allow_missing: bool = option(False, "Leave out and list what is not whole, instead of refusing.")
    fill: str | None = option(None, "With --allow-missing: nan or zero in the place of holes, which are listed.")
    fill_from: str | Path | None = option(
        None,
        "Take what is missing or damaged from another checkpoint of the same run, and keep a record of it in the "
        "output; one of another run is refused.",
        metavar="OLDER",
        typed=str | None,
    )
    check: bool = option(
        False,
        "Let torch or safetensors read the output back, and compare it with the shards, byte for byte; "
        "with --dry-run: compare the source with its checksums.",
    )
    unchecked: bool = option(False, "Do not compare the source with the checksums that it states.")
    manifest: bool = option(False, "Write sha256 of every tensor and file into OUT.manifest.json.")
    provenance: bool = option(
        True, "Let the output say which checkpoint it was made of, and what was filled in or left out."
    )
    dequantize: bool = option(
        False,
        "Write the values of quantized tensors, as their class (torchao's) or bitsandbytes computes them; codes of any "
        "other kind are refused.",
    )
    prefer_rank: int | None = option(None, "Where ranks hold different copies of one tensor, take this rank's.")
    dry_run: bool = option(False, "Check and plan; write nothing.")
    resume: bool = option(False, "If it is cut short, keep what was written; the same command goes on from there.")
    jobs: int | None = None

    @property
    def threads(self) -> int:
        """Number of threads that copy: two per core, so that one reads while another waits for what it writes."""
        from ckptools.tensor_io.threads import thread_count

        return thread_count(self.jobs, most=4, per_core=2)


def write_options(options: ConsolidateOptions, streamed: bool) -> WriteOptions:
    """The options of the writer, with the dtype's full name in place of a short one, such as `bf16`."""
    from ckptools.consolidate.writers.layout import WriteOptions

    if options.dry_run and options.check and options.unchecked:
        raise UsageError(
            None, "--check compares the source with its checksums, and --unchecked does not: give one of them"
        )
    name = options.dtype
    dtype = None if name is None else {short: long for long, short in SHORT.items()}.get(name, name)
    if dtype is not None and (dtype not in ITEMSIZE or not is_floating(dtype) or dtype.startswith("float4")):
        raise UsageError(None, f"--dtype {name}: choose a floating-point dtype, such as float32, bfloat16, float16")
    if options.tied not in ("keep", "drop"):
        raise UsageError(None, f"--tied {options.tied}: choose keep or drop")
    return WriteOptions(dtype, _nbytes(options.max_shard_size), options.tied, options.keep_types, streamed)


def _nbytes(given: int | str | None) -> int | None:
    """The bytes of tensors per file, which may be given as a text such as `5GB`; None for no limit."""
    size = parse_bytes(given) if isinstance(given, str) else given
    if given is not None and (type(size) is not int or size < 0):
        raise UsageError(None, f"--max-shard-size {given}: expected a size such as 5GB or 500MiB, or a number of bytes")
    return size


def hole_rule(options: ConsolidateOptions) -> str | None:
    """The rule for a tensor with a hole: None to refuse it, `leave` to leave it out, or the fill value."""
    fill = options.fill
    if fill is not None and fill not in ("nan", "zero"):
        raise UsageError(None, f"--fill {fill}: choose nan or zero")
    if fill is not None and not options.allow_missing:
        raise UsageError(None, "--fill needs --allow-missing; without it nothing that has a hole is written")
    return fill or ("leave" if options.allow_missing else None)


# -- new names: first a map, then a prefix to strip, then rules -------------------------------------------------------


class RenameRule(NamedTuple):
    """One rule as the user gave it, and its effect on a name."""

    given: str
    new_name: Callable[[str], str]


class Renaming(NamedTuple):
    """The renaming that the user asked for: new names by the checkpoint's own, and rules that all names go through."""

    names: Mapping[str, str]
    rules: Sequence[RenameRule]

    def of(self, names: Iterable[str], path: Path) -> tuple[dict[str, str], list[str]]:
        """Every name of a model with its new one, and a note on entries that match no name."""
        now = {name: self.names.get(name, name) for name in names}
        unknown = [old for old in self.names if old not in now]
        if self.names and len(unknown) == len(self.names):
            raise UsageError(path, f"--map: the model has none of its {len(unknown)} names; {_begin(now)}")
        for rule in self.rules:
            after = {old: rule.new_name(new) for old, new in now.items()}
            if not all(after.values()):
                lost = next(old for old, new in after.items() if not new)
                raise UsageError(path, f"{rule.given}: nothing would be left of the name {describe_for_error(lost)}")
            if after == now:
                raise UsageError(path, f"{rule.given}: fits no name of the model; {_begin(now)}")
            now = after
        note = f"--map: the model has no {few(list(map(describe_for_error, unknown)), MAX_NAMED)}" if unknown else ""
        return now, [note] if note else []


def _begin(now: Mapping[str, str]) -> str:
    return f"its names are such as {few([describe_for_error(name) for name in now.values()][:2])}"


def renaming_of(options: ConsolidateOptions) -> Renaming | None:
    """The renaming that the user asked for; None if there is none.

    Raises:
        ReadError: the map cannot be read.
        UsageError: a rule is malformed.
    """
    rules = []
    if options.strip_prefix is not None:
        begin = options.strip_prefix.rstrip(".") + "."
        if begin == ".":
            raise UsageError(None, "--strip-prefix is empty; give the beginning of names that goes, such as module.")
        rules.append(_rule(f"--strip-prefix {options.strip_prefix}", begin, ""))
    for text in options.rename:
        old, sign, new = text.partition("=")
        if not sign or not (old or new):
            raise UsageError(None, f"--rename {text}: expected OLD=NEW, such as blocks=layers or module.=")
        rules.append(_rule(f"--rename {text}", old, new))
    names = _map(options.map)
    return Renaming(names, rules) if names or rules else None


def _map(given: Mapping[str, str] | str | Path | None) -> Mapping[str, str]:
    if given is None or isinstance(given, Mapping):
        bad = next(((old, new) for old, new in (given or {}).items() if not (new and isinstance(new, str))), None)
        if bad is not None:
            raise UsageError(None, f"map: expected a name for {describe_for_error(bad[0])}, found {bad[1]!r:.80}")
        return given or {}
    from ckptools.keys.name_map import read_map

    return read_map(Path(given))


def _rule(given: str, old: str, new: str) -> RenameRule:
    """A rule for the tensor `old` and all below a module `old`; with a dot at its end, or empty, for a beginning."""
    from ckptools.keys.name_map import replaced_module, replaced_prefix

    if not old or old.endswith("."):
        if new and not new.endswith("."):
            raise UsageError(None, f"{given}: {old or 'nothing'} is the beginning of names; end {new} with a dot too")
        return RenameRule(given, lambda name: replaced_prefix(name, old, new))
    if not new or new.endswith("."):
        raise UsageError(None, f"{given}: {old} is a whole name; end both or none with a dot")
    return RenameRule(given, lambda name: replaced_module(name, old, new))
