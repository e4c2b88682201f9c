"""The options of consolidating, as the command line and Python share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptools.dtypes import ITEMSIZE, SHORT, is_floating
from ckptools.errors import UsageError
from ckptools.tensor_io.threads import thread_count


@dataclass(frozen=True)
class ConsolidateOptions:
    """Which parts of a checkpoint to write, how, and what to check before the output gets its name.

    Attributes:
        format: `pt`, `safetensors` or `dcp`, if the output has no suffix; a file gets the format's suffix.
        only: `model` (the bare state dict), `optimizer`, or `all` (the same tree); or a glob, such as `blocks.*`, for
            those names of the model that match. Default: `model` for `.safetensors`, else `all`.
        map: new names of the model by old ones, or a JSON of them, such as `match` finds.
        strip_prefix: a beginning of names to remove, such as `module.`.
        rename: `OLD=NEW` for a tensor or module, `OLD.=NEW.` for the beginning of names; applied after `map` and
            `strip_prefix`, in order. The state of an optimizer follows the names of the model.
        dtype: torch dtype for the floating-point tensors of the model, such as `bfloat16`; None keeps theirs.
        max_shard_size: bytes of tensors per file of safetensors (which get a Hugging Face index) or of a DCP.
        tied: for safetensors: `keep` writes a tied weight under each name, `drop` only under the first.
        keep_types: keep values that plain `torch.load` does not accept (timedeltas, numpy's values …) in a `.pt`,
            instead of the nearest that it does.
        force: overwrite an existing output.
        allow_missing: leave out tensors that are not whole, and list them, instead of refusing.
        fill: with `allow_missing`: `nan` or `zero` to put into holes, which are listed; without it a tensor with a hole
            is left out.
        dequantize: write the values of quantized tensors, as their class computes them; else they are not written.
        prefer_rank: take this rank's copy of a tensor if copies differ that should be equal.
        check: let the format's own library read the output back before it gets its name, and compare it with the
            shards; for a dry run, compare the source with its checksums.
        unchecked: do not compare the source with its stated checksums.
        manifest: write sha256 of every tensor and file into a JSON beside the output.
        provenance: record in the output its source, filled holes and left-out names.
        dry_run: plan and check, write nothing.
        resume: keep the written part if writing is interrupted, and continue from what the same call has kept: a
            journal beside the output lists the complete regions, which are read again and checked.
        jobs: threads; None for one per core, at most four.
    """

    format: str | None = None
    only: str | None = None
    map: Mapping[str, str] | str | Path | None = None
    strip_prefix: str | None = None
    rename: Sequence[str] = ()
    dtype: str | None = None
    max_shard_size: int | None = None
    tied: str = "keep"
    keep_types: bool = False
    force: bool = False
    allow_missing: bool = False
    fill: str | None = None
    dequantize: bool = False
    prefer_rank: int | None = None
    check: bool = False
    unchecked: bool = False
    manifest: bool = False
    provenance: bool = True
    dry_run: bool = False
    resume: bool = False
    jobs: int | None = None

    @property
    def threads(self) -> int:
        """Number of threads that copy."""
        return thread_count(self.jobs, most=4)


def full_dtype(name: str | None) -> str | None:
    """Expand a dtype that may be given short, such as `bf16`, to torch's name.

    Raises:
        UsageError: a weight cannot have it.
    """
    if name is None:
        return None
    full = {short: long for long, short in SHORT.items()}.get(name, name)
    if full not in ITEMSIZE or not is_floating(full) or full.startswith("float4"):
        raise UsageError(None, f"--dtype {name}: choose a floating-point dtype, such as float32, bfloat16, float16")
    return full


def hole_rule(options: ConsolidateOptions) -> str | None:
    """The rule for a tensor with a hole: None to refuse it, `leave` to leave it out, or the fill value.

    Raises:
        UsageError: the options contradict each other, or the fill value is unknown.
    """
    fill = options.fill
    if fill is not None and fill not in ("nan", "zero"):
        raise UsageError(None, f"--fill {fill}: choose nan or zero")
    if fill is not None and not options.allow_missing:
        raise UsageError(None, "--fill needs --allow-missing; without it nothing that has a hole is written")
    return fill or ("leave" if options.allow_missing else None)


def tied_rule(options: ConsolidateOptions) -> str:
    """The rule for a tied weight in safetensors.

    Raises:
        UsageError: there is no such rule.
    """
    if options.tied not in ("keep", "drop"):
        raise UsageError(None, f"--tied {options.tied}: choose keep or drop")
    return options.tied


def shard_size(options: ConsolidateOptions) -> int | None:
    """The largest number of bytes of tensors in a file of the output; None for one file.

    Raises:
        UsageError: it is no number of bytes.
    """
    size = options.max_shard_size
    if size is not None and (type(size) is not int or size < 0):
        raise UsageError(None, f"--max-shard-size {size!r}: expected a number of bytes")
    return size
