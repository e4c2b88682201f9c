"""Headers of safetensors that lie."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from tests.hostile.cases.build import BIG, Build, written

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def cases() -> Iterator[tuple[str, Build]]:
    headers: dict[str, tuple[Any, int]] = {
        "data cut short": ({"x": ENTRY}, 7),
        "data added": ({"x": ENTRY}, 9),
        "hole before": ({"x": {**ENTRY, "data_offsets": [4, 12]}}, 12),
        "overlap": ({"x": ENTRY, "y": ENTRY}, 8),
        "end before begin": ({"x": {**ENTRY, "data_offsets": [8, 0]}}, 8),
        "shape that does not fit": ({"x": {**ENTRY, "shape": [3]}}, 8),
        "shape of 2^80": ({"x": {**ENTRY, "shape": [1 << 40, 1 << 40]}}, 8),
        "negative shape": ({"x": {**ENTRY, "shape": [-2]}}, 8),
        "float shape": ({"x": {**ENTRY, "shape": [2.0]}}, 8),
        "offset of 2^64": ({"x": {**ENTRY, "data_offsets": [0, 1 << 64]}}, 8),
        "unknown dtype": ({"x": {**ENTRY, "dtype": "F128"}}, 8),
        "no dtype": ({"x": {"shape": [2]}}, 8),
        "metadata of numbers": ({"__metadata__": {"step": 5}}, 0),
        "a list": (b"[]", 0),
        "half an object": (b'{"x":', 0),
        "no UTF-8": (b'{"\xff": 1}', 0),
        "nested 90 000 deep": (b'{"a": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", 0),
        "a number of 5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", 0),
        "duplicate name": (b'{"x":%s,"x":%s}' % ((json.dumps(ENTRY).encode(),) * 2), 8),
    }
    for name, (header, size) in headers.items():
        yield f"safetensors: {name}", _header(header, size)
    for length in (100_000_001, BIG, (1 << 64) - 1, 3000):
        yield f"safetensors: header of {length} bytes", _header({"x": ENTRY}, 8, length)


def _header(header: Any, size: int, length: int | None = None) -> Build:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = struct.pack("<Q", len(data) if length is None else length)
    return lambda folder: written(folder / "x.safetensors", head + data + bytes(size))
