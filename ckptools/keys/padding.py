"""Whether the last rows of a vocabulary are padding: rows of no token, which trainers add for even division.

Megatron pads to a multiple of `make_vocab_size_divisible_by` times the tensor-parallel size, and states the result.
Source: megatron/training/tokenizer/tokenizer.py (`_vocab_size_with_padding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptools.files.opening import OpenFiles
from ckptools.formats.megatron.folders import setting
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.rearranged import RowBlock, split_rows
from ckptools.tensor_io.stream import tensor_bytes


def why_padding(tensor: Tensor, kept: int, args: Mapping[str, Any], files: OpenFiles) -> str:
    """What proves that the rows from `kept` on belong to no token; "" if nothing does.

    `args` are Megatron's settings, where the checkpoint has them.

    Raises:
        ReadError: the rows cannot be read.
    """
    rows = tensor.shape[0]
    padded = setting(args, "padded_vocab_size")
    multiple = (setting(args, "make_vocab_size_divisible_by") or 0) * (
        setting(args, "tensor_model_parallel_size", "model_parallel_size") or 1
    )
    if padded == rows and multiple and -(-kept // multiple) * multiple == rows:
        return f"args.padded_vocab_size is {rows}, which is {kept} rounded up to a multiple of {multiple}"
    rest = split_rows(tensor, [RowBlock(kept, rows - kept, 0, 0)])[0]
    if all(bytes(piece).count(0) == len(piece) for piece in tensor_bytes(rest, rest.dtype, files)):
        return f"all values of the last {rows - kept} rows are zero"
    return ""
