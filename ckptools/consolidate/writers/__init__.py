"""Output formats: one module each, which is imported when it writes, and the visible tuple that lists them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptools.consolidate.writers.layout import OutputContents, OutputLayout, WriteOptions


@dataclass
class Writer:
    """An output format.

    Attributes:
        NAME: an identifier.
        WRITES: its output in one line.
        SUFFIXES: suffixes of output names that select it.
        ONLY: the default part to write: `model`, `optimizer` or `all`.
        FILE: name of the output in a folder given by the caller; empty if the output is a folder itself.
        BY_NAME: whether it takes optimizer state by name if the source has numbers.
    """

    NAME: str
    WRITES: str
    SUFFIXES: tuple[str, ...]
    ONLY: str = "all"
    FILE: str = ""
    BY_NAME: bool = False

    def lay_out(self, selection: OutputContents, out: Path, options: WriteOptions) -> OutputLayout:
        """Plan an output.

        Raises:
            RefusedError: the format cannot hold it.
        """
        if self.NAME == "pt":
            from ckptools.consolidate.writers.pt import lay_out
        elif self.NAME == "safetensors":
            from ckptools.consolidate.writers.safetensors import lay_out
        else:
            from ckptools.consolidate.writers.dcp import lay_out
        return lay_out(selection, out, options)


PT = Writer(
    "pt",
    "one torch.save file that plain torch.load reads (mmap=True too); the same tree with full tensors",
    (".pt", ".pth", ".bin", ".ckpt"),
    FILE="model.pt",
)
SAFETENSORS = Writer(
    "safetensors",
    "one .safetensors, or several with a Hugging Face index; the model",
    (".safetensors",),
    ONLY="model",
    FILE="model.safetensors",
    BY_NAME=True,
)
DCP = Writer(
    "dcp",
    "a torch.distributed.checkpoint folder to resume from at any world size: model, optimizer and the rest",
    (".dcp",),
)

WRITERS = (PT, SAFETENSORS, DCP)

FOLDER_HOLDS = SAFETENSORS
"""The default format in a folder, as for models on the Hugging Face hub."""
