"""The contents of an output, and its plan: tensors, files, and the place of every tensor in them.

The plan can be printed, shared between threads, and run in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptools.dtypes import ITEMSIZE, is_floating
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Problem
from ckptools.model.provenance import Filled
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.stream import Band, Copy, parts_of
from ckptools.text import KeyPath, fqn_of
from ckptools.training_state.sections import Section

if TYPE_CHECKING:
    from ckptools.keys.expected_names import Original

LEFT_OUT = "left-out."
"""The suffix of the side file that lists left-out names."""

CrcOf = Callable[[int], int]
"""The CRC-32 of a job, by its number."""


class FromReplicas(NamedTuple):
    """Ranks whose files are lost or damaged, and the ranks whose files together hold the same values."""

    lost: tuple[int, ...]
    by: tuple[int, ...]


@dataclass
class OutputContents:
    """The tree to write, and everything that was noted while it was chosen.

    Attributes:
        tree: the subtree to write; its tensors have exactly one shard per region.
        model_paths: key paths of the tensors that belong to a model, for `--dtype`.
        left_out: key paths that are not written, with the reason.
        missing: tensors with holes by key path, with the regions that are in no file.
        filled: `nan` or `zero` if holes are filled; empty if such tensors are left out.
        places: every section to write, with its key path in `tree`.
        renamed: every name of the model with its new one; empty without renaming.
        part: the requested part: `model`, `optimizer`, `all` or a glob.
        lost: key paths that are left out because the source has lost them.
        carried: tensors with values that were filled in when the source was written, by key path.
        passed_over: errors of the source about parts to write for which there is neither a gap nor a left-out name.
        unsure: warnings that the source may have held more values than its tensors show.
        borrowed: tensors with regions of another checkpoint of the run by key path, with these regions.
        borrowed_from: name, step and ranks of that checkpoint.
        by_rank: key paths of lists by rank, where ranks had values of their own.
        from_replicas: the ranks whose lost files are replaced by replicas on other ranks; None if no file is lost.
        like: the Hugging Face model that the output shall be like; None if the user named no model.
        base: the model whose weights an adapter was merged into; None if no other checkpoint has them.
    """

    tree: Any
    source: Checkpoint
    model_paths: set[KeyPath] = field(default_factory=set)
    left_out: dict[KeyPath, str] = field(default_factory=dict)
    missing: dict[KeyPath, tuple[Box, ...]] = field(default_factory=dict)
    filled: str = ""
    notes: list[str] = field(default_factory=list)
    places: tuple[tuple[Section, KeyPath], ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    part: str = "all"
    lost: set[KeyPath] = field(default_factory=set)
    carried: dict[KeyPath, Filled] = field(default_factory=dict)
    passed_over: tuple[Problem, ...] = ()
    unsure: tuple[Problem, ...] = ()
    with_record: bool = True
    by_rank: tuple[KeyPath, ...] = ()
    from_replicas: FromReplicas | None = None
    like: Original | None = None
    base: Checkpoint | None = None
    borrowed: dict[KeyPath, tuple[Box, ...]] = field(default_factory=dict)
    borrowed_from: str = ""


@dataclass(frozen=True)
class Job:
    """One tensor of the output, with one shard per region, and its place: a file's index and a byte offset."""

    fqn: str
    tensor: Tensor
    dtype: str
    file: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return self.tensor.numel * ITEMSIZE[self.dtype]

    def parts(self) -> Iterable[Copy | Band]:
        """Copies or bands in ascending order of their offset, without gaps, created lazily."""
        return parts_of(self.tensor, self.dtype)


@dataclass(frozen=True, slots=True)
class Framing:
    """Bytes at an offset of an output file outside of tensors: headers, pickle, directory.

    `data` makes them from the CRC-32s of the jobs; in a streamed output, only of the jobs before these bytes.
    """

    offset: int
    data: Callable[[CrcOf], bytes]


@dataclass(frozen=True)
class ReadTensor:
    """A tensor of an output, or a part of one; `read` lets the format's own library return it as a `torch.Tensor`."""

    fqn: str
    tensor: Tensor
    dtype: str
    read: Callable[[], Any]


@dataclass(frozen=True)
class ReadBack:
    """An output opened `by` a library, named with its version, and the tensors that have bytes of their own."""

    by: str
    tensors: Sequence[ReadTensor]


OpenBack = Callable[[Sequence[Path]], AbstractContextManager[ReadBack]]
"""Opens an output, given the current paths of its files. Errors are the library's own."""


@dataclass(frozen=True)
class OutputLayout:
    """A planned output.

    Attributes:
        files: path and size in bytes of every file with tensors, in the order in which they get their names.
        jobs: every tensor, with its place, in the order of files and of offsets in them.
        framing: maps the number of a file to its bytes outside of tensors, in order; jobs write all other bytes.
        read_back: opens the finished output with the format's own library.
        texts: small files beside these files, by path, which get their names last.
        checksums: whether `framing` needs the CRC-32 of every tensor.
        needs: names in the output that `torch.load(weights_only=True)` does not accept.
        tied: names of model tensors that share the bytes of an earlier one, with its name.
        folder: the folder of all files, if they get their names together as one folder.
        tensors: number of tensors with bytes of their own; None for one per job.
        load: the line of Python that loads the output.
        left_out: key paths of the selection that the format cannot store, with the reason.
        name_of: maps a key path of the selection to its name in the output.
    """

    files: tuple[tuple[Path, int], ...]
    jobs: tuple[Job, ...]
    framing: Callable[[int], Iterable[Framing]]
    read_back: OpenBack
    texts: Mapping[Path, str | bytes] = field(default_factory=dict)
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


@dataclass(frozen=True)
class WriteOptions:
    """Options of a writer, as in `ConsolidateOptions`, with torch's full name of the dtype.

    If `streamed`, no byte of a file depends on later ones, so that it can be written from start to end.
    """

    dtype: str | None
    max_shard_size: int | None
    tied: str
    keep_types: bool
    streamed: bool
    layout: str = "saved"


def quoted(text: str | Path) -> str:
    """A text as a Python literal, in double quotes if it needs no escapes."""
    spelled = repr(str(text))
    return f'"{text}"' if spelled == f"'{text}'" and '"' not in spelled else spelled


def beside(out: Path, what: str) -> Path:
    """The JSON file beside an output: `OUT.json`, or `OUT.index.json` for `what="index."`."""
    return out.with_name(f"{out.name}.{what}json")


def identity(tensor: Tensor) -> Any:
    """Identity of a tensor's bytes, equal for tied tensors; None for a tensor without bytes."""
    if not tensor.numel:
        return None
    extents = tensor.extents
    others = (extents.located[i] for i in sorted(extents.located))
    sources = tuple([(shard.box, *shard.sources) for shard in others])
    return (tensor.shape, tensor.dtype, *extents.identity, sources)


def output_dtype(path: KeyPath, tensor: Tensor, selection: OutputContents, dtype: str | None) -> str:
    """The output dtype of a tensor: `dtype` for the floating-point tensors of a model, else its own.

    Without `dtype`, such a tensor takes the dtype that the model to be like has for it.
    """
    like = selection.like.shapes.tensors.get(fqn_of(path)) if selection.like else None
    wanted = dtype or (like.dtype if like else "")
    return wanted if wanted and path in selection.model_paths and is_floating(tensor.dtype) else tensor.dtype


def files_of(sizes: Sequence[int], limit: int | None) -> list[range]:
    """Divide items, in order, among as few files of at most `limit` bytes as possible, of nearly equal size.

    An item larger than `limit` gets its own file. Filling one file after the other would leave a small last one, and
    parallel readers or writers would wait for the full ones.
    """
    if not sizes:
        return [range(0)]
    limit = sum(sizes) if limit is None else limit
    ends = [0, *accumulate(sizes)]
    count = len(sizes)
    # The least number of files for the items from each index on, found by filling one file after the other.
    needed = [0] * (count + 1)
    stop = count
    for begin in reversed(range(count)):
        while stop > begin + 1 and ends[stop] - ends[begin] > limit:
            stop -= 1
        needed[begin] = 1 + needed[stop]
    files: list[range] = []
    first = 0
    while first < len(sizes):
        left = needed[0] - len(files)
        target = ends[first] + (ends[-1] - ends[first]) / left
        end = first + 1
        # The next item belongs to this file if its middle does, or if there would be no room for it later.
        while end < len(sizes) and ends[end + 1] - ends[first] <= limit:
            if needed[end] < left and (ends[end] + ends[end + 1]) / 2 > target:
                break
            end += 1
        files.append(range(first, end))
        first = end
    return files
