"""What a writer promises: the output files, and where in them every tensor's bytes go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ckptools.consolidate.plan import Job
from ckptools.consolidate.selection import Selection
from ckptools.files.partial_files import write_at
from ckptools.model.tensor import Shard, Tensor
from ckptools.model.tree import KeyPath, fqn_of

LEFT_OUT = "left-out."
"""What the name of the side file of what was not written has behind the output's."""

CrcOf = Callable[[int], int]
"""The CRC-32 of a job, by its number."""


@dataclass(frozen=True, slots=True)
class Framing:
    """Bytes of an output file that are no tensor's: headers, pickle, directory.

    Attributes:
        offset: where they begin in the file.
        data: gives them, from the CRC-32s of the jobs; where the output is streamed, of those that lie before them.
    """

    offset: int
    data: Callable[[CrcOf], bytes]


@dataclass(frozen=True)
class ReadTensor:
    """A tensor of an output, or a part of one, to be read by the format's own library.

    Attributes:
        fqn: for messages.
        tensor: what it was made of; one shard per region.
        dtype: dtype in the output.
        read: returns it as a `torch.Tensor`.
    """

    fqn: str
    tensor: Tensor
    dtype: str
    read: Callable[[], Any]


@dataclass(frozen=True)
class ReadBack:
    """An output, opened by its format's own library.

    Attributes:
        by: the library and its version.
        tensors: everything in it that has bytes of its own.
    """

    by: str
    tensors: Sequence[ReadTensor]


OpenBack = Callable[[Sequence[Path]], AbstractContextManager[ReadBack]]
"""Opens an output, given where its files are now. Errors are the library's own."""


@dataclass(frozen=True)
class Layout:
    """A planned output.

    Attributes:
        files: path and size in bytes of every file with tensors, in the order in which they get their names.
        jobs: every tensor, with its place, in the order of files and of offsets in them.
        framing: what is not tensors in a file, by its number: in order, and with the jobs every byte of it.
        read_back: opens the finished output with the format's own library.
        texts: small files beside them, by path, which get their names after them.
        checksums: whether `framing` needs the CRC-32 of every tensor.
        needs: names in the output that `torch.load(weights_only=True)` does not accept.
        tied: names of model tensors that share the bytes of an earlier one, with its name.
        folder: the folder that all files are in, when they get their names together as one folder.
        notes: what the user should know of the output.
        tensors: how many tensors have bytes of their own; None for one per job.
        load: the line of Python that loads the output.
        left_out: what of the selection the format has no place for, by key path: why.
        name_of: what the output calls what is at a key path of the selection.
    """

    files: tuple[tuple[Path, int], ...]
    jobs: tuple[Job, ...]
    framing: Callable[[int], Iterable[Framing]]
    read_back: OpenBack
    texts: Mapping[Path, str] = field(default_factory=dict)
    checksums: bool = False
    needs: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    notes: tuple[str, ...] = ()
    tensors: int | None = None
    load: str = ""
    left_out: Mapping[KeyPath, str] = field(default_factory=dict)
    name_of: Callable[[KeyPath], str] = fqn_of

    @property
    def nbytes(self) -> int:
        """Bytes of all files with tensors."""
        return sum(size for _, size in self.files)

    def finish(self, targets: Sequence[int], crcs: Sequence[int]) -> None:
        """Write what is not tensors, given the descriptors of the files and the CRC-32 of each job."""
        for number, target in enumerate(targets):
            for framing in self.framing(number):
                write_at(target, framing.offset, framing.data(crcs.__getitem__))


@dataclass(frozen=True)
class WriteOptions:
    """What a caller may ask of a writer.

    Attributes:
        dtype: dtype for the floating-point tensors of the model; None to keep each one's own.
        max_shard_size: bytes of tensors per file; None for one file.
        tied: `keep` writes a tied weight under each name, `drop` under the first only (where a format cannot share).
        keep_types: keep values in a `.pt` that plain torch.load does not make, instead of the nearest that it does.
        streamed: let no byte of a file depend on those behind it, so that it can be written from its first to its last.
    """

    dtype: str | None = None
    max_shard_size: int | None = None
    tied: str = "keep"
    keep_types: bool = False
    streamed: bool = False


class Writer(Protocol):
    """What every module in this folder that writes a format provides.

    Attributes:
        NAME: an identifier.
        WRITES: what it writes, in one line.
        SUFFIXES: of the output names that ask for it.
        ONLY: what is written when the caller does not say: `model`, `optimizer` or `all`.
        FILE: what the output is called in a folder that the caller named; empty where it is a folder itself.
        BY_NAME: whether optimizer state is to be given to it by name, where the source has numbers.
    """

    NAME: str
    WRITES: str
    SUFFIXES: tuple[str, ...]
    ONLY: str
    FILE: str
    BY_NAME: bool

    def lay_out(self, selection: Selection, out: Path, options: WriteOptions) -> Layout:
        """Plan the output."""


def quoted(text: str | Path) -> str:
    """A text as Python spells it, in double quotes where it needs no escapes."""
    spelled = repr(str(text))
    return f'"{text}"' if spelled == f"'{text}'" and '"' not in spelled else spelled


def beside(out: Path, what: str) -> Path:
    """The JSON file beside an output: `OUT.json`, or `OUT.index.json` for what is `index.`."""
    return out.with_name(f"{out.name}.{what}json")


def identity(tensor: Tensor) -> Any:
    """What two tied tensors have in common: the same regions from the same bytes. None for one without bytes."""
    if not tensor.numel:
        return None
    return (tensor.shape, tensor.dtype, tuple(map(_place, tensor.shards)))


def _place(shard: Shard) -> tuple[object, ...]:
    return (shard.box, *((source.path, source.offset, source.strides) for source in shard.sources))


def output_dtype(path: KeyPath, tensor: Tensor, selection: Selection, dtype: str | None) -> str:
    """The dtype that a tensor gets: `dtype` for the floating-point tensors of a model, else its own."""
    from ckptools.dtypes import is_floating

    applies = dtype is not None and path in selection.model_paths and is_floating(tensor.dtype)
    return dtype if applies and dtype is not None else tensor.dtype
