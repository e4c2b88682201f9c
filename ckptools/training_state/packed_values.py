"""The values of weights that are stored as codes, decoded by their library's rule from the tensors beside them.

Each weight becomes one quantized tensor under its own name. `decoding_rules` has the rules, except bitsandbytes', which
are here. In 4 bits (`Linear4bit`) `w` has two codes to a byte, whatever its dtype; `w.absmax` the scale of each block;
`w.quant_map` the number of each code; and `w.quant_state.bitsandbytes__nf4` a JSON of block size, shape and dtype. The
scales may be codes themselves (`w.nested_absmax`, `w.nested_quant_map`). In 8 bits (`Linear8bitLt`) `weight` has int8,
and `SCB` beside it the scale of each row.

Source: bitsandbytes 0.50.2: functional.py (`QuantState.as_dict`, `dequantize_4bit`, `get_4bit_type`), backends/default
(`_dequantize_4bit_compute`: in float32, then rounded; "matches C++ / CUDA behavior"), _ops.py
(`int8_vectorwise_dequant`), nn/modules.py (`weight_format` 0 is row-major). Compared bit for bit with its results. The
kernel of 0.50.2 for CPUs with AVX-512 uses wrong scales where a block crosses the end of a row; it is not imitated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.opening import OpenFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.extents import ExtentLayout
from ckptools.model.facts import ModelConfig
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Coding, Encoded, ScaleCoding, Shard, Source
from ckptools.model.tensor import CODES, Tensor
from ckptools.model.tree import GONE, Renamed, leaf_at, rebuilt
from ckptools.pickles.classes.codings import FLOATS
from ckptools.pickles.classes.tensors import note_on
from ckptools.tensor_io.checksums import FileRecords, Record, damaged_records
from ckptools.tensor_io.dcp_items import with_source
from ckptools.tensor_io.fetch_ahead import no_progress
from ckptools.tensor_io.numbers import Raw
from ckptools.tensor_io.read import dequantized, read_shard
from ckptools.text import KeyPath
from ckptools.training_state.decoding_rules import RULES, OtherFormError, Parts
from ckptools.training_state.quantized_weights import QuantizedWeight, decoded_in, own_name

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(sign * number / 12 for sign in (1, -1) for number in (0, 0.0625, 8, 12, 4, 6, 2, 3))
TABLES = {"nf4": NF4, "fp4": FP4}
"""The numbers of 4-bit codes. bitsandbytes computes with these, whatever `quant_map` a file has."""

ACTIVATIONS = (
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "activation_scale",
)  # fmt: skip
"""Names beside a quantized weight that say how its module's inputs and outputs are quantized."""

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MAX_STATE = 64 << 10
"""At most this many bytes of a weight's JSON are read."""

INT8_FACTOR = 7.874015718698502e-3
"""The factor in `int8_vectorwise_dequant`, for 1/127."""


def unpacked(checkpoint: Checkpoint, files: OpenFiles, compare: bool) -> Checkpoint:
    """Replace each packed weight and its parts by one quantized tensor; leave out the scales of its activations.

    Args:
        checkpoint: one with every rank's structure.
        files: keeps sources open.
        compare: whether bytes read on the way are compared with their checksums.

    Raises:
        ReadError: a file cannot be read.
    """
    if not any(scheme.dequantized for scheme in checkpoint.quantized):
        return checkpoint
    reader = _Reader(files, compare, checkpoint.config)

    def weights(node: dict[Any, Any]) -> dict[Any, Any]:
        packed = decoded_in(node, checkpoint.config)
        parts = {key for _, one in packed.values() for key in one.keys.values()}
        made: dict[Any, Any] = dict.fromkeys(parts, GONE)
        for key, (rule, one) in packed.items():
            name = own_name(key, one.layout)
            module = name[: -len(name.rpartition(".")[2])]
            made |= {f"{module}{end}": GONE for end in ACTIVATIONS if rule != "bitsandbytes"}
            made |= {name: GONE, key: Renamed(name, reader.weight(node, rule, one))}
        return made

    return replace(checkpoint, tree=rebuilt(checkpoint.tree, weights))


def with_values(checkpoint: Checkpoint, files: OpenFiles) -> Checkpoint:
    """Replace each packed weight and its parts by a tensor of its values, which are read when they are needed.

    Raises:
        ReadError: a file cannot be read.
    """
    found = unpacked(checkpoint, files, compare=False)
    tree = rebuilt(found.tree, lambda node: {k: dequantized(v) for k, v in node.items() if isinstance(v, Tensor)})
    left = tuple(scheme for scheme in found.quantized if not scheme.dequantized)
    return replace(found, tree=tree, quantized=left)


def weight_at(checkpoint: Checkpoint, path: KeyPath, files: OpenFiles) -> Tensor | None:
    """The quantized tensor of the packed weight whose codes are at a key path; None if it cannot be decoded."""
    node = leaf_at(checkpoint.tree, path[:-1])
    if not isinstance(node, dict) or path[-1] not in (found := decoded_in(node, checkpoint.config)):
        return None
    return _Reader(files, compare=False, config=checkpoint.config).weight(node, *found[path[-1]])


class _Reader:
    """Makes quantized tensors from the parts of packed weights; reads only the few bytes that describe them."""

    def __init__(self, files: OpenFiles, compare: bool, config: ModelConfig | None) -> None:
        self._files, self._compare, self._config = files, compare, config

    def weight(self, node: Mapping[str, Any], rule: str, packed: QuantizedWeight) -> Tensor:
        """The tensor of a weight; if its parts do not fit together, a tensor with a note.

        Args:
            node: the state dict.
            rule: the name of its rule.
            packed: the keys of its parts.
        """
        codes: Tensor = node[packed.keys[CODES]]
        try:
            if own_name(packed.keys[CODES], packed.layout) in node.keys() - {packed.keys[CODES]}:
                raise OtherFormError("the weight itself lies beside its codes")
            shards = tuple(self._shard(node, rule, packed, shard) for shard in codes.found)
            first = shards[0].encoded if shards else None
            if first is None or first.coding is None or any(shard.box != shards[0].box for shard in shards):
                raise OtherFormError(
                    "no file here has its codes" if first is None else "ranks hold it in several shapes"
                )
        except OtherFormError as why:
            kind = packed.layout.words.rpartition(" ")[2]
            written = f"packed by bitsandbytes as {kind}" if rule == "bitsandbytes" else f"codes of {_words(codes)}"
            text = f"{written}, but {why}: ckptools does not know its values"
            return replace(codes, kind="unreadable", note=text, coded=None)
        return Tensor(first.shape, first.coding.dtype, shards, "quantized", note=note_on(first))

    def _shard(self, node: Mapping[str, Any], rule: str, packed: QuantizedWeight, shard: Shard) -> Shard:
        """One rank's copy of a weight."""
        found = {part: _copy_of(node[key], shard.rank, part) for part, key in packed.keys.items()}
        sources = {part: place.source for part, place in found.items() if place.source is not None}
        if rule == "bitsandbytes":
            kind = packed.layout.words.rpartition(" ")[2]
            make = self._eight_bits if kind == "int8" else self._four_bits
            coding, shape, codes = make(kind, found)
            parts: Mapping[str, Source] = {**sources, CODES: codes}
            name = f"bitsandbytes.{kind}"
        else:
            library, decode = RULES[rule]
            kind, coding, shape, parts = decode(Parts(sources, self._config, self._raw))
            name = f"{library}.{kind}"
        encoded = Encoded(name, tuple(parts.items()), coding, shape, Box.whole(shape))
        return Shard(encoded.box, shard.rank, None, None, encoded)

    def _four_bits(self, kind: str, found: Mapping[str, Shard]) -> tuple[Coding, Ints, Source]:
        """The coding, the shape and the codes of a weight in 4 bits."""
        state = self._state(found["quant_state"])
        sizes, dtype, block = state.get("shape"), state.get("dtype"), state.get("blocksize")
        if state.get("quant_type") != kind or dtype not in FLOATS or block not in BLOCK_SIZES:
            raise OtherFormError("its quant_state describes another form")
        if not isinstance(sizes, list) or not sizes or not all(type(n) is int and n > 0 for n in sizes):
            raise OtherFormError("its quant_state states no shape")
        shape = tuple(sizes)
        shard = found.get("quant_map")
        if shard is None or shard.source is None or (shard.source.dtype, shard.source.shape) != ("float32", (16,)):
            raise OtherFormError("its quant_map is no table of 16 numbers")
        table = np.frombuffer(self._bytes(shard), "<f4")
        if not np.array_equal(table, np.array(TABLES[kind], "<f4")):
            raise OtherFormError(f"its quant_map is not that of {kind}, which bitsandbytes would take instead")
        count = -(-prod(shape) // block)
        nested = self._nested(state, found, count)
        _check(found, "absmax", "float32" if nested is None else "uint8", (count,))
        coding = Coding("codes", "absmax", block, "float32", dtype, "quant_map", bits=4, scale_coding=nested)
        source, nbytes = found["codes"].source, -(-prod(shape) // 2)
        if source is None or not source.contiguous or prod(source.shape) * ITEMSIZE[source.dtype] != nbytes:
            raise OtherFormError("its codes do not fit its shape")
        if source.shape[:1] == (1,):
            raise OtherFormError("its codes are those of a transposed weight")
        return coding, shape, source._replace(dtype="uint8", shape=(nbytes,), strides=(1,))

    def _nested(self, state: Mapping[str, Any], found: Mapping[str, Shard], count: int) -> ScaleCoding | None:
        """How scales that are codes are decoded; None if they are numbers."""
        if "nested_absmax" not in found and "nested_blocksize" not in state:
            return None
        block, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if state.get("nested_dtype") != "float32" or block not in BLOCK_SIZES or not isinstance(offset, float):
            raise OtherFormError("its quant_state does not describe its nested scales")
        _check(found, "nested_absmax", "float32", (-(-count // block),))
        _check(found, "nested_quant_map", "float32", (256,))
        return ScaleCoding("nested_quant_map", "nested_absmax", block, offset)

    def _eight_bits(self, kind: str, found: Mapping[str, Shard]) -> tuple[Coding, Ints, Source]:
        """The coding, the shape and the codes of a weight in 8 bits."""
        codes, layout = found["codes"].source, found.get("weight_format")
        if codes is None or len(codes.shape) != 2:
            raise OtherFormError("it is no matrix")
        _check(found, "SCB", "float32", (codes.shape[0],))
        if layout is not None and self._bytes(layout) != b"\0":
            raise OtherFormError("its weight_format is not row-major")
        coding = Coding("codes", "SCB", (1, codes.shape[1]), "float32", "float32", factor=INT8_FACTOR)
        return coding, codes.shape, codes

    def _state(self, shard: Shard) -> dict[str, Any]:
        """The JSON that describes a weight."""
        if shard.box.numel > MAX_STATE or shard.source is None or shard.source.dtype != "uint8":
            raise OtherFormError("its quant_state is no text")
        try:
            state = json.loads(self._bytes(shard))
        except (ValueError, RecursionError):
            raise OtherFormError("its quant_state is no JSON") from None
        if not isinstance(state, dict):
            raise OtherFormError("its quant_state is no JSON object")
        return state

    def _bytes(self, shard: Shard) -> bytes:
        """The bytes of a small part of a weight."""
        if shard.source is None or shard.box.numel * ITEMSIZE[shard.source.dtype] > MAX_STATE:
            raise OtherFormError("what describes it is too long")
        return bytes(self._raw(shard.source).tobytes())

    def _raw(self, source: Source) -> Raw:
        """The raw elements of a part, compared with their checksum first."""
        if self._compare and source.crc:
            record, of = Record.of(source), FileRecords()
            of.add([0], [ExtentLayout.of(source, 0)], [record.crc])
            for crc in damaged_records({record.path: of}, self._files, 1, no_progress).values():
                raise OtherFormError(f"{record.path.name} is damaged: {record.damage(crc)}")
        return read_shard(Shard(Box.whole(source.shape), None, source), self._files)


def _words(codes: Tensor) -> str:
    """How a weight is quantized, in words."""
    return codes.coded.scheme if codes.coded is not None else "an unknown scheme"


def _copy_of(tensor: Any, rank: int | None, part: str) -> Shard:
    """A rank's copy of a part, or the only copy."""
    here = [shard for shard in tensor.found if not tensor.note] if isinstance(tensor, Tensor) else []
    own = [shard for shard in here if shard.rank == rank] or here
    if len(own) != 1 or own[0].box != Box.whole(tensor.shape):
        raise OtherFormError(f"its {part} is cut over ranks or not here")
    try:
        found = with_source(own[0])
    except ReadError as error:
        raise OtherFormError(f"its {part} cannot be read: {error.reason}") from None
    if found.source is None:
        raise OtherFormError(f"its {part} is a tensor of another class")
    return found


def _check(found: Mapping[str, Shard], part: str, dtype: str, shape: Ints) -> None:
    """Refuse a weight unless it has a part of this dtype and shape."""
    source = found[part].source if part in found else None
    if source is None or (source.dtype, source.shape) != (dtype, shape):
        raise OtherFormError(f"its {part} does not fit its shape")
