"""The files that are parts of one model: whose they look like, and the rank of each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ckptools.text import few

NUMBER = re.compile(r"\d+")
OF_ONE_RANK = re.compile(r"(?<![A-Za-z])part[-_]?\d+")
"""A number that counts the files of one rank."""

WRITERS = (
    (r"model-rank-\*-part-\*\.safetensors", "vLLM or SGLang (sharded_state)", "start from the weights it was made of"),
    (r"model\*-mp\*\.safetensors", "DeepSeek's inference code", "start from the Hugging Face weights it was made of"),
    (r"rank\*\.safetensors", "TensorRT-LLM", "start from the weights it was converted from"),
    (r"rank_\*\.safetensors", "Fast-LLM", "export it with `fast-llm convert`"),
    (r".*mp_rank_\*.*", "NeMo or Megatron", "convert it with its own script"),
)
"""Whose files have a name, and what to do instead of joining them."""

SMP = re.compile(r".+_partial")
"""Folder of a partial checkpoint of SageMaker's model parallelism: `model_RANKINFO.pt`, `fp16_states_RANKINFO.pt` …
Source: docs.aws.amazon.com, "Checkpointing a distributed PyTorch model" of smp 1.10."""

BY_RULES = "--rules FILE joins them where you know along which dimensions they were cut"


class PartFiles(NamedTuple):
    """The files that are parts of one model, in the order of their numbers, and their name with `*` for these."""

    files: tuple[Path, ...]
    pattern: str


def not_joined(parts: PartFiles) -> str:
    """One line that says what a file of these is, and that it is unknown how they join."""
    text = f"part of {len(parts.files)} files by their names ({parts.pattern})"
    if len(parts.files) == 1:
        text = f"part of several files by its name ({parts.pattern}), of which this one is here"
    depth = 1 + parts.pattern.count("/")
    names = few(["/".join(path.parts[-depth:]) for path in parts.files])
    return f"{text}: {names}; how they join is not known{_instead(parts)}; {BY_RULES}"


def _instead(parts: PartFiles) -> str:
    """Whose files these look like and what to do; "" for names that many use."""
    if SMP.fullmatch(parts.files[0].parent.name):
        return " (they look like a partial checkpoint of SageMaker's smp: save it with partial=False)"
    named = ((writer, advice) for name, writer, advice in WRITERS if re.fullmatch(name, parts.pattern))
    writer, advice = next(named, ("", ""))
    return f" (they look like those of {writer}: {advice})" if writer else ""


def ranks_of(parts: PartFiles) -> dict[Path, int] | None:
    """The rank of each file: the one number in which their names differ, that of a `part` left out; None for others."""
    folders = "/" in parts.pattern
    words = [OF_ONE_RANK.sub("", path.parent.name if folders else path.stem) for path in parts.files]
    numbers = [tuple(map(int, NUMBER.findall(word))) for word in words]
    if len(set(map(len, numbers))) != 1:
        return None
    varying = [column for column in zip(*numbers, strict=True) if len(set(column)) > 1]
    return dict(zip(parts.files, varying[0], strict=True)) if len(varying) == 1 else None
