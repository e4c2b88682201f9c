"""The command that people want after `inspect`: one that works, with the options that opened the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptools.dtypes import can_be_nan
from ckptools.files.location import tells_others
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.tensor_io.coverage import can_be_read
from ckptools.text import printable
from ckptools.training_state.sections import sections_of_kind
from ckptools.training_state.verdict import is_alone, verdict_of

MAX_FILES = 8
"""Files that were named one by one and are named again; a longer command is of no use."""


def command_arguments(ck: Checkpoint) -> str:
    """The arguments that open a checkpoint again: its path, and the options that it was opened with.

    Empty where so many files were named that they would not fit a line.
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
    words += ["--weights", options.weights] if options.weights != "fp32" else []
    told_by = getattr(options.names, "told_by", "")
    words += ["--names", told_by] if told_by and Path(told_by).exists() else []
    words += ["--rules", str(options.rules)] if options.rules is not None else []
    shapes = getattr(options.shapes, "source", "")
    words += ["--shapes", shapes] if shapes and Path(shapes).exists() else []
    return quoted(words)


def quoted(words: Sequence[str]) -> str:
    """Words as a shell takes them, safe to print."""
    import shlex

    return " ".join(printable(shlex.quote(word)) for word in words)


def next_command(ck: Checkpoint) -> str:
    """A command that works, and behind a `#` what it does where the name does not say it; "" where there is none."""
    named = command_arguments(ck)
    if not named:
        return ""
    model = [tensor for section in sections_of_kind(ck, "model") for _, tensor in tensors_in(section.value)]
    verdict = verdict_of(ck)
    if is_alone(ck):
        rest = _rest_of(ck)
        return f"ckptools inspect {named} --section model     # to consolidate, {rest}" if model else ""
    if verdict.whole is None or any(p.kind.forbids == "any output" for p in ck.problems if p.severity == "error"):
        return f"ckptools verify {named}"
    if any(tensor.note for tensor in model if tensor.kind != "meta"):
        return f"ckptools inspect {named} --section model"
    return _consolidation(ck, named, model)


def after_verify(named: str, following: str, ok: bool, all_read: bool) -> list[str]:
    """What to type after a report: what tells more of what is wrong, or proves more; then what `inspect` proposes.

    Args:
        named: the arguments that open the checkpoint again; "" where there are none.
        following: what `inspect` proposes.
        ok: whether every check was passed.
        all_read: whether checksums and values were among them.
    """
    if not named:
        return []
    more = [f"ckptools doctor {named}"] if not ok else [] if all_read else [f"ckptools verify {named} --deep --values"]
    return more + ([following] if following and following != f"ckptools verify {named}" else [])


def _rest_of(ck: Checkpoint) -> str:
    alone = ck.options is not None and ck.options.only_this_file
    beside = "put the other rank files beside it" if tells_others(ck.path) else "name the other rank files too"
    return "leave out --only-this-file" if alone else beside


def _consolidation(ck: Checkpoint, named: str, model: list[Tensor]) -> str:
    tensors = model or [tensor for _, tensor in tensors_in(ck.tree) if not tensor.note]
    out = "OUT.safetensors" if model else "OUT.pt"
    if verdict_of(ck).whole or verdict_of(ck).recoverable:
        return f"ckptools consolidate {named} -o {out}" if tensors else ""
    here = [(tensor, _boxes_here(ck, tensor)) for tensor in tensors if not tensor.note]
    if any(can_be_read(tensor.shape, boxes) for tensor, boxes in here):
        return f"ckptools consolidate {named} -o {out} --allow-missing     # what is there; lists the holes"
    if any(can_be_nan(tensor.dtype) and any(box.numel for box in boxes) for tensor, boxes in here):
        return f"ckptools consolidate {named} -o {out} --allow-missing --fill nan     # holes as NaN; lists them"
    return f"ckptools verify {named}"


def _boxes_here(ck: Checkpoint, tensor: Tensor) -> set[Box]:
    """What of a tensor lies, as far as is known, in files that can be read."""
    return {s.box for s in tensor.shards if s.is_here or _may_hold(ck, s.rank)}


def _may_hold(ck: Checkpoint, rank: int | None) -> bool:
    """Whether the rest of a tensor may lie with a rank whose file was not read."""
    return not ck.all_ranks and (rank is None or rank in ck.ranks)
