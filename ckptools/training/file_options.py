"""How a layout's files are called and cut, where it has a choice."""

from __future__ import annotations

from dataclasses import dataclass

from ckptools.training.option import option


@dataclass(frozen=True)
class FileOptions:
    """What the files are called."""

    name: str | None = option(
        None,
        "Template of the file's name, or of the folder's where a layout is a folder: a path below OUT with "
        "{run_name}, {epoch}, {batch}, {rank}, {local_rank}, {node_rank} or {world_size} in it.",
    )
    run_name: str | None = option(None, "What {run_name} stands for. [default: such as fsdp1-4-ranks]")
