"""Propose the next command after `inspect`: one that works, with the options that opened the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptools.dtypes import can_be_nan
from ckptools.files.opening import tells_others
from ckptools.formats.shared.checkpoint_builder import SalvagingReader
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import can_be_read
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.rules.verdict import is_alone, verdict_of
from ckptools.text import clip_middle, printable
from ckptools.training_state.adapters import WRITTEN, adapters_of
from ckptools.training_state.models import chosen_models
from ckptools.training_state.sections import sections_of_kind

NEWEST = "finds the newest whole step"

MAX_BASE = 60
MAX_FILES = 8
"""With more files on the command line than this, no command is proposed, as it would be too long."""


class NextCommand(NamedTuple):
    """A command to type next; the comment says what it does, if its name does not."""

    name: str
    arguments: str
    comment: str = ""

    @property
    def line(self) -> str:
        """The command line to type."""
        return f"ckptools {self.name} {self.arguments}"

    def __str__(self) -> str:
        return f"{self.line}     # {self.comment}" if self.comment else self.line


def command_arguments(ck: Checkpoint) -> str:
    """Return the arguments that open a checkpoint again: its path, and the options with which it was opened.

    Empty if the user named so many files that they would not fit a line.
    """
    options = ck.options
    files = getattr(options, "files", ())
    if len(files) > MAX_FILES:
        return ""
    words = [str(path) for path in files or (ck.path,)]
    if options is None:
        return quoted(words)
    words += ["--ranks", options.ranks] if options.ranks is not None else []
    words += ["--only-this-file"] if options.only_this_file else []
    words += ["--follow-symlinks"] if options.follow_symlinks else []
    words += ["--model", options.model] if options.model else []
    words += ["--salvage"] if isinstance(options.read_file, SalvagingReader) else []
    words += ["--weights", options.weights] if options.weights != "fp32" else []
    given_by = getattr(options.names, "given_by", "")
    words += ["--names", given_by] if given_by and Path(given_by).exists() else []
    words += ["--rules", str(options.rules)] if options.rules is not None else []
    shapes = getattr(options.shapes, "source", "")
    words += ["--shapes", shapes] if shapes and Path(shapes).exists() else []
    return quoted(words)


def quoted(words: Sequence[str]) -> str:
    """Quote words for a shell, safe to print."""
    import shlex

    return " ".join(printable(shlex.quote(word)) for word in words)


def next_command(ck: Checkpoint) -> NextCommand | None:
    """Choose a command that works; None if there is none."""
    named = command_arguments(ck)
    if not named:
        return None
    model = [tensor for section in sections_of_kind(ck, "model") for _, tensor in tensors_in(section.value)]
    verdict = verdict_of(ck)
    if is_alone(ck):
        comment = f"to consolidate, {_rest_of(ck)}"
        return NextCommand("inspect", f"{named} --section model", comment) if model else None
    if any(p.kind.forbids == "any output" for p in ck.problems if p.severity == "error"):
        return NextCommand("doctor", named, NEWEST)
    if verdict.whole is None:
        return NextCommand("verify", named)
    if any(tensor.note for tensor in model if tensor.kind != "meta"):
        return NextCommand("inspect", f"{named} --section model")
    return _consolidation(ck, named, model)


def instead_of_writing(named: str, following: str, problems: Iterable[Problem]) -> str:
    """Replace `consolidate` by `stats` if values are NaN or infinite: such a model is not worth writing."""
    finite = all(problem.kind is not Code.NOT_FINITE for problem in problems)
    return (
        following
        if finite or not following.startswith("ckptools consolidate")
        else f"ckptools stats {named} --sort nan"
    )


def after_verify(named: str, following: str, ok: bool, all_read: bool, problems: Iterable[Problem] = ()) -> list[str]:
    """List commands to propose after a report: `doctor` or `verify`, then the proposal of `inspect` (`following`).

    `named` are the arguments that open the checkpoint again, or ""; `all_read` tells whether checksums and values were
    checked.
    """
    if not named:
        return []
    more = [f"ckptools doctor {named}"] if not ok else [] if all_read else [f"ckptools verify {named} --deep --values"]
    following = instead_of_writing(named, following, problems)
    read_more = (f"ckptools verify {named}", f"ckptools doctor {named}")
    return more + ([following] if following and not following.startswith(read_more) else [])


def _rest_of(ck: Checkpoint) -> str:
    alone = ck.options is not None and ck.options.only_this_file
    beside = "put the other rank files beside it" if tells_others(ck.path) else "name the other rank files too"
    return "leave out --only-this-file" if alone else beside


def _consolidation(ck: Checkpoint, named: str, model: list[Tensor]) -> NextCommand | None:
    tensors = model or [tensor for _, tensor in tensors_in(ck.tree) if not tensor.note]
    out = "OUT.safetensors" if model else "OUT.pt"
    named += " --model all" if model and not chosen_models(ck) else ""
    if verdict_of(ck).whole and (of_adapter := _of_adapter(ck, named)):
        return of_adapter
    if verdict_of(ck).whole or verdict_of(ck).recoverable:
        return NextCommand("consolidate", f"{named} -o {out}") if tensors else None
    sound = [tensor for tensor in tensors if not tensor.note]
    if any(can_be_read(tensor.shape, _boxes_here(ck, tensor)) for tensor in sound):
        return NextCommand("consolidate", f"{named} -o {out} --allow-missing", "whole tensors; lists the others")
    if any(can_be_nan(tensor.dtype) and any(box.numel for box in _boxes_here(ck, tensor)) for tensor in sound):
        return NextCommand("consolidate", f"{named} -o {out} --allow-missing --fill nan", "holes as NaN; lists them")
    return NextCommand("doctor", named, NEWEST)


def _of_adapter(ck: Checkpoint, named: str) -> NextCommand | None:
    """The command for LoRA adapters without their base: PEFT's folder of one; its merge if it is that folder already.

    None if base weights are here, or no rule covers the kind of adapter.
    """
    adapters = adapters_of(ck)
    if not adapters or any(one.here or one.kind not in WRITTEN for one in adapters):
        return None
    first = adapters[0]
    named += f" --adapter {quoted([first.name])}" if len(adapters) > 1 else ""
    if not first.alphas:
        comment = "ADAPTER: an adapter_config.json that states alpha"
        return NextCommand("consolidate", f"{named} --only lora --like ADAPTER -o OUT/", comment)
    if first.name or ck.format != "hugging_face":
        return NextCommand("consolidate", f"{named} --only lora -o OUT/", "as PEFT saves it")
    base = first.stated.get("base_model_name_or_path")
    of = f", {printable(clip_middle(base, MAX_BASE))}" if isinstance(base, str) and base else ""
    return NextCommand("consolidate", f"{named} --merge-lora --base HF -o OUT/", f"HF: its base model{of}")


def _boxes_here(ck: Checkpoint, tensor: Tensor) -> set[Box]:
    """The boxes of a tensor that lie in files that can be read, as far as is known."""
    if tensor.every_shard.is_here:
        return tensor.every_shard.boxes
    unread = set() if ck.all_ranks else {None, *ck.ranks}  # ranks with unread files, which may hold the rest
    return {s.box for s in tensor.shards if s.is_here or s.rank in unread}
