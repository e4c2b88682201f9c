"""The output formats: a module for each, imported only when it writes, and the tuple that lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptools.consolidate.writers.layout import OutputContents, OutputLayout, WriteOptions

LayOut = Callable[[OutputContents, Path, WriteOptions], OutputLayout]
"""Plans an output; raises RefusedError if the format cannot hold it."""


@dataclass(frozen=True)
class Writer:
    """An output format.

    Attributes:
        WRITES: its output in one line.
        SUFFIXES: suffixes of output names that select it.
        lay_out: imports its module, and plans the output.
        ONLY: the default part to write: `model`, `optimizer` or `all`.
        FILE: name of the output in a folder given by the caller; empty if the output is a folder itself.
        BY_NAME: whether it writes optimizer state by name even if the source has numbers.
    """

    NAME: str
    WRITES: str
    SUFFIXES: tuple[str, ...]
    lay_out: LayOut
    ONLY: str = "all"
    FILE: str = ""
    BY_NAME: bool = False


def _pt(contents: OutputContents, out: Path, options: WriteOptions) -> OutputLayout:
    from ckptools.consolidate.writers.pt import lay_out

    return lay_out(contents, out, options)


def _safetensors(contents: OutputContents, out: Path, options: WriteOptions) -> OutputLayout:
    from ckptools.consolidate.writers.safetensors import lay_out

    return lay_out(contents, out, options)


def _dcp(contents: OutputContents, out: Path, options: WriteOptions) -> OutputLayout:
    from ckptools.consolidate.writers.dcp import lay_out

    return lay_out(contents, out, options)


PT = Writer(
    "pt",
    "one torch.save file that plain torch.load reads (mmap=True too); the same tree with full tensors",
    (".pt", ".pth", ".bin", ".ckpt"),
    _pt,
    FILE="model.pt",
)
SAFETENSORS = Writer(
    "safetensors",
    "one .safetensors, or several with a Hugging Face index; the model",
    (".safetensors",),
    _safetensors,
    ONLY="model",
    FILE="model.safetensors",
    BY_NAME=True,
)
DCP = Writer(
    "dcp",
    "a torch.distributed.checkpoint folder to resume from at any world size; the same tree with full tensors",
    (".dcp",),
    _dcp,
)

WRITERS = (PT, SAFETENSORS, DCP)

FOLDER_HOLDS = SAFETENSORS
"""The default format in a folder, as for models on the Hugging Face hub."""
