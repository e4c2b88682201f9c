"""The tensors of one weight file: safetensors or torch.save, whichever its first bytes say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.file_type import content_of, head_of, what_is
from ckptools.files.opening import File
from ckptools.files.safetensors_header import Header, read_header, source_of
from ckptools.formats.options import Options
from ckptools.model.provenance import KEY, Said
from ckptools.model.regions import Box
from ckptools.model.tensor import Shard, Tensor
from ckptools.pickles.loading import gc_paused

SHARDING_INFO = "DCP_SHARDING_INFO"
MAX_LIKELY = 1 << 32
"""A header's length beyond which a file was not meant as safetensors."""


@dataclass(frozen=True)
class WeightFile:
    """The structure of one weight file, safetensors or torch.save.

    Attributes:
        path: the file.
        tree: names and tensors; of a torch.save file whatever it has.
        nbytes: its size.
        modified: its time.
        bytes_read: how much was read.
        safetensors: whether it is one.
        sharded: whether it says that its tensors are pieces of larger ones (DCP).
        names: dotted names of its pickle.
    """

    path: Path
    tree: Any
    nbytes: int
    modified: float
    bytes_read: int
    safetensors: bool
    sharded: bool = False
    names: tuple[str, ...] = ()


def is_safetensors(head: bytes) -> bool:
    """Whether a file that begins with these bytes is meant as safetensors: a length, then an object."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_LIKELY


def read_weights(path: Path, options: Options) -> WeightFile:
    """Read the structure of one weight file.

    Raises:
        ReadError: it is damaged, or neither safetensors nor of torch.save.
    """
    with File(path) as file:
        head = head_of(file)
        if is_safetensors(head) or (path.suffix == ".safetensors" and not content_of(head)):
            return _of_safetensors(file, head, options)
    saved = options.read_file(path)
    return WeightFile(path, saved.tree, saved.nbytes, saved.modified, saved.bytes_read, False, names=saved.names)


def _of_safetensors(file: File, head: bytes, options: Options) -> WeightFile:
    what = "" if is_safetensors(head) else what_is(head)
    if what:
        raise ReadError(file.path, f"is {what}")
    with gc_paused():
        header = read_header(file)
        tree = {name: _tensor(file, header, name) for name in header.tensors}
    if KEY in header.metadata:
        options.said[file.path] = Said(header.metadata[KEY])
    return WeightFile(file.path, tree, file.size, file.modified, header.size, True, _says_pieces(header))


def _tensor(file: File, header: Header, name: str) -> Tensor:
    entry = header.tensors[name]
    shard = Shard(Box.whole(entry.shape), None, source_of(file, name, entry))
    return Tensor(entry.shape, entry.dtype, (shard,))


def _says_pieces(header: Header) -> bool:
    """Whether DCP wrote it and a tensor in it begins elsewhere than at 0; a rank's own name is not needed for that."""
    try:
        info = json.loads(header.metadata.get(SHARDING_INFO, "{}"))
    except (ValueError, RecursionError):
        return True
    entries = info.values() if isinstance(info, dict) else ()
    return any(isinstance(e, dict) and any(e.get("saved_offsets") or ()) for e in entries)
