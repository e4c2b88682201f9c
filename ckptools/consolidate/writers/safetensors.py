"""`.safetensors`: one file, or several with a Hugging Face index; other values go to a JSON beside it.

A file is a little-endian u64 with the header's length, the header (JSON, space-padded to 8 bytes), then the tensors,
contiguous and without holes, sorted by falling alignment and name as the format's own library does. Source: the
format's README and its Rust implementation.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import date, datetime, time, timedelta
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from ckptools.consolidate.provenance import record_of
from ckptools.consolidate.writers.layout import (
    Framing,
    Job,
    OutputContents,
    OutputLayout,
    ReadBack,
    ReadTensor,
    WriteOptions,
    beside,
    files_of,
    identity,
    output_dtype,
    quoted,
)
from ckptools.dtypes import ITEMSIZE, SAFETENSORS
from ckptools.errors import RefusedError
from ckptools.model.provenance import KEY, Provenance
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Device, Global, NumpyArray, NumpyDtype, NumpyScalar, Size, TorchName, tensors_in
from ckptools.text import fqn_of

MAX_HEADER = 100_000_000
"""Largest header in bytes that the format's own library reads."""


def lay_out(selection: OutputContents, out: Path, options: WriteOptions) -> OutputLayout:
    """Plan one or several safetensors files."""
    entries, tied = _entries(selection, out, options)
    there = selection.like.files if selection.like and options.max_shard_size is None else {}
    groups = _groups(entries, options.max_shard_size, there if all(e.fqn in there for e in entries) else {})
    paths = _paths(out, len(groups))
    record = record_of(selection)
    headers = [_header(group, record) for group in groups]
    jobs, sizes = [], []
    for index, (group, header) in enumerate(zip(groups, headers, strict=True)):
        at = len(header)
        for entry in group:
            jobs.append(replace(entry, file=index, offset=at))
            at += entry.nbytes
        sizes.append(at)

    def framing(file: int) -> Iterator[Framing]:
        yield Framing(0, lambda _: headers[file])

    texts: dict[Path, str] = {}
    others = values_json(selection.tree)
    if others is not None:
        texts[beside(out, "")] = others
    if len(groups) > 1:
        weight_map = {e.fqn: p.name for g, p in zip(groups, paths, strict=True) for e in g}
        total = sum(e.nbytes for g in groups for e in g)
        listed = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        texts[beside(out, "index.")] = json.dumps(listed, indent=2) + "\n"
    files = tuple(zip(paths, sizes, strict=True))
    return OutputLayout(files, tuple(jobs), framing, partial(_read_back, jobs), texts, tied=tied, load=_load(paths))


@contextmanager
def _read_back(jobs: Sequence[Job], paths: Sequence[Path]) -> Iterator[ReadBack]:
    from safetensors import __version__, safe_open

    with ExitStack() as stack:
        handles = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        tensors = [
            ReadTensor(job.fqn, job.tensor, job.dtype, partial(handles[job.file].get_tensor, job.fqn)) for job in jobs
        ]
        yield ReadBack(f"safetensors {__version__}", tensors)


def _entries(selection: OutputContents, out: Path, options: WriteOptions) -> tuple[list[Job], dict[str, str]]:
    """The tensors of the output, not placed in files yet, and the names of tied weights, each with its first name."""
    seen: dict[object, str] = {}
    entries: dict[str, Job] = {}
    tied: dict[str, str] = {}
    for path, tensor in tensors_in(selection.tree):
        entry = Job(fqn_of(path), tensor, output_dtype(path, tensor, selection, options.dtype), 0, 0)
        if entry.fqn in entries:
            raise RefusedError(out, f"two tensors would be called {entry.fqn}; write a .pt, which keeps the tree")
        if entry.fqn == "__metadata__":
            raise RefusedError(out, "a tensor is called __metadata__, which safetensors reserves; write a .pt")
        if entry.dtype not in SAFETENSORS:
            raise RefusedError(out, f"{entry.fqn} is {entry.dtype}, which safetensors cannot hold; write a .pt")
        first = seen.setdefault(identity(tensor) or entry.fqn, entry.fqn)
        # Only weights are tied; an optimizer may keep one `step` tensor for all its parameters.
        repeated = first != entry.fqn and path in selection.model_paths
        if repeated:
            tied[entry.fqn] = first
        if not repeated or options.tied == "keep":
            entries[entry.fqn] = entry
    return sorted(entries.values(), key=lambda e: (-ITEMSIZE[e.dtype], e.fqn)), tied


def _groups(entries: list[Job], limit: int | None, as_there: Mapping[str, str]) -> list[list[Job]]:
    """The tensors of each file: in name order, with at most `limit` bytes, of nearly equal size.

    If the output shall have the files of another model (`as_there`, file by name), they hold the same tensors as there.
    """
    if as_there:
        named = sorted(set(as_there.values()))
        files = [[e for e in entries if as_there[e.fqn] == file] for file in named]
        return [group for group in files if group]
    if limit is None or sum(e.nbytes for e in entries) <= limit:
        return [entries]
    ordered = sorted(entries, key=lambda e: e.fqn)
    groups = files_of([e.nbytes for e in ordered], limit)
    return [sorted((ordered[n] for n in g), key=lambda e: (-ITEMSIZE[e.dtype], e.fqn)) for g in groups]


def _paths(out: Path, count: int) -> list[Path]:
    if count == 1:
        return [out]
    return [out.with_name(f"{out.stem}-{i + 1:05d}-of-{count:05d}{out.suffix}") for i in range(count)]


def _load(paths: Sequence[Path]) -> str:
    """The line of Python that reads all files into one dict."""
    if len(paths) == 1:
        return f"from safetensors.torch import load_file; state = load_file({quoted(paths[0])})"
    every = f"{len(paths):05d}.safetensors"
    file = quoted(str(paths[0]).replace("%", "%%").removesuffix(f"00001-of-{every}") + f"%05d-of-{every}")
    loop = f"for i in range(1, {len(paths) + 1}) for k, v in load_file({file} % i).items()"
    return f"from safetensors.torch import load_file; state = {{k: v {loop}}}"


def _header(group: Sequence[Job], record: Provenance | None) -> bytes:
    at = 0
    table: dict[str, object] = {"__metadata__": {"format": "pt", **({KEY: record.to_json()} if record else {})}}
    for entry in group:
        dtype, shape = SAFETENSORS[entry.dtype], list(entry.tensor.shape)
        table[entry.fqn] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + entry.nbytes]}
        at += entry.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise RefusedError(None, f"the header would have {len(text)} bytes; safetensors allows {MAX_HEADER}")
    return len(text).to_bytes(8, "little") + text


# -- values that are no tensors ----------------------------------------------------------------------------------------
# JSON has fewer types than a checkpoint: other values become `{"$type": ...}` with their parts, a key that is no text
# is written as in Python and listed under `$keys`, and NaN and infinities become text.

_TENSOR = object()


def values_json(tree: Any) -> str | None:
    """The values in a tree that are no tensors; None if there are none."""
    pruned = _encoded(tree)
    if pruned is _TENSOR or _hollow(pruned):
        return None
    return json.dumps({"schema": "ckptools/model/values/1", "values": pruned}, indent=2, allow_nan=False) + "\n"


def _hollow(node: Any) -> bool:
    """Whether only empty containers are left."""
    return isinstance(node, dict) and all(map(_hollow, node.values()))


def _encoded(node: Any) -> Any:
    if isinstance(node, Tensor):
        return _TENSOR
    if isinstance(node, Mapping):
        encoded: dict[str, Any] = {}
        odd: dict[str, str] = {}
        for key, value in node.items():
            item = _encoded(value)
            if item is _TENSOR:
                continue
            name = key if isinstance(key, str) else repr(key)
            if not isinstance(key, str):
                odd[name] = type(key).__name__
            encoded[name] = item
        return {**encoded, "$keys": odd} if odd else encoded
    if type(node) is list:
        return [None if (v := _encoded(item)) is _TENSOR else v for item in node]
    if node is None or isinstance(node, (bool, int, str)):
        return node
    if isinstance(node, float):
        return node if isfinite(node) else {"$type": "float", "value": repr(node)}
    for kind, name, parts in _TYPES:
        if isinstance(node, kind):
            return {"$type": name, **{k: _encoded(v) for k, v in parts(node).items()}}
    return {"$type": type(node).__name__, "value": repr(node)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_TYPES: tuple[tuple[Any, str, Any], ...] = (
    (Size, "torch.Size", lambda v: {"sizes": list(v)}),
    (tuple, "tuple", lambda v: {"items": [None if isinstance(i, Tensor) else i for i in v]}),
    ((set, frozenset), "set", lambda v: {"items": sorted(v, key=repr)}),
    (timedelta, "timedelta", lambda v: {"days": v.days, "seconds": v.seconds, "microseconds": v.microseconds}),
    ((datetime, date, time), "datetime", lambda v: {"iso": v.isoformat()}),
    ((range, slice), "range", lambda v: {"start": v.start, "stop": v.stop, "step": v.step}),
    (complex, "complex", lambda v: {"real": v.real, "imag": v.imag}),
    ((bytes, bytearray), "bytes", lambda v: {"base64": _base64(bytes(v))}),
    (NumpyArray, "numpy.ndarray", lambda v: {"dtype": v.dtype, "shape": list(v.shape), "base64": _base64(v.data)}),
    (NumpyScalar, "numpy.scalar", lambda v: {"dtype": v.dtype, "base64": _base64(v.data)}),
    (NumpyDtype, "numpy.dtype", lambda v: {"dtype": v.dtype}),
    (Device, "torch.device", lambda v: {"device": str(v)}),
    (TorchName, "torch", lambda v: {"name": v.name}),
    (Global, "name", lambda v: {"name": v.dotted}),
)
