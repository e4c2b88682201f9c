"""Checks of files: all are there, complete, of one save, of one layout, as torch and a manifest expect them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ckptools.dtypes import short
from ckptools.errors import ReadError
from ckptools.files.opening import File, OpenFiles, Window, reading
from ckptools.files.zip_archive import Container
from ckptools.files.zip_directory import EOCD, archive_before
from ckptools.formats.shared.placeholders import PLACEHOLDER
from ckptools.keys.value_digests import once
from ckptools.model.checkpoint import Checkpoint, RankFile
from ckptools.model.cover import cover_problem
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import fqn_of, tensors_in
from ckptools.tensor_io.stream import MANIFEST_SCHEMA, file_digest, tensor_digest
from ckptools.text import duration, plural, size
from ckptools.training_state.sections import sections_of_kind
from ckptools.verify.record import Check, judged, not_judged

PRESENCE = (
    Code.FILE_MISSING,
    Code.FILE_CUT,
    Code.VALUE_LOST,
    Code.STRAY_FILE,
    Code.NAME_CONTRADICTS,
    Code.NAMED_AS_ANOTHER_RANK,
    Code.ONE_OF_SEVERAL,
    Code.NOT_READ,
    Code.FILE_UNREADABLE,
    Code.NEVER_WRITTEN,
    Code.MODEL_PART_MISSING,
)
ONE_SAVE = (Code.ODD_FILE_SIZE, Code.MIXED_SAVES)
AGREEMENT = (Code.WORLD_SIZES_DISAGREE, Code.LAYOUT_DISAGREES)

NOT_HERE = "the others are missing or damaged"
"""Reason why not all files, or not all that they hold, were looked at."""

FAR_APART = 3600.0
"""Seconds between the first and the last file of one save; more suggest two saves."""


def presence(ck: Checkpoint) -> Check:
    """Whether every file is there and complete, and no other file is among them."""
    here = sum(f.is_here for f in ck.files)
    problems = [*(p for p in ck.problems if p.kind in PRESENCE), *_left_over(ck)]
    detail = f"{here} of {len(ck.files)} here and complete"
    return judged("files", problems, detail, looked_at=here, of=len(ck.files), rest=NOT_HERE)


def one_save(ck: Checkpoint) -> Check:
    """Whether sizes, times and steps of the files are consistent with one save."""
    here = [f for f in ck.files if f.is_here]
    sizes = sorted({f.nbytes for f in here})
    ends = dict.fromkeys(map(size, (*sizes[:1], *sizes[-1:])))
    times = [f.modified for f in ck.files if f.modified]
    apart = max(times) - min(times) if times else 0.0
    problems = [p for p in ck.problems if p.kind in ONE_SAVE]
    if apart > FAR_APART:
        text = f"files were written {apart / 3600:.1f} hours apart; they may be of two saves, or copied one by one"
        problems.append(Problem(Code.MIXED_SAVES, text, severity="warning"))
    within = f", written within {duration(apart)}" if apart >= 1 else ""
    detail = f"{plural(len(here), 'file')} of {' to '.join(ends) or 'no size'}{within}"
    return judged("one save", problems, detail, looked_at=len(here), of=len(ck.files), rest=NOT_HERE)


def _left_over(ck: Checkpoint) -> Iterator[Problem]:
    for folder in dict.fromkeys(f.path.parent for f in ck.files):
        with reading(folder):
            names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        for name in names:
            if name.endswith((".metadata.tmp", ".partial")):
                yield Problem(Code.LEFT_OVER, f"{name} is left over from a write that was interrupted")


def exactly_covered(ck: Checkpoint) -> Check:
    """Whether every element of every tensor is in exactly one shard; replicas of a shard count once."""
    tensors = [(fqn_of(path), t) for path, t in tensors_in(ck.tree) if t.kind != "meta"]
    if not tensors:
        return not_judged("layout", "no tensors")
    lost = [p for p in ck.problems if p.kind is Code.TENSOR_NOT_JOINED and p.severity == "error"]
    unplaced = {p.tensor for p in lost}
    lost += [p for p in ck.problems if p.kind is Code.PLACEHOLDERS]
    with_values = [(fqn, t) for fqn, t in tensors if fqn not in unplaced and t.note != PLACEHOLDER]
    covered = (cover_problem(t, fqn) for fqn, t in with_values)
    problems = [*lost, *(problem for problem in covered if problem is not None)]
    sharded = sum(t.sharded for _, t in tensors)
    placed = sum(not t.note for _, t in tensors)
    detail = f"{plural(placed, 'tensor')}, {sharded} sharded, covered exactly"
    return judged("layout", problems, detail, looked_at=placed, of=len(tensors), rest="the others cannot be joined")


def ranks_agree(ck: Checkpoint) -> Check:
    """Whether ranks agree on the world size, and on the shape, dtype and shards of every tensor."""
    ranks = len({f.rank for f in ck.files if f.status == "read" and f.rank is not None})
    known = len({f.rank for f in ck.files if f.rank is not None})
    problems = [p for p in ck.problems if p.kind in AGREEMENT]
    if ranks < 2 and not problems:
        return not_judged("ranks agree on layout", "no two ranks to compare", known if known > 1 else 0)
    detail = f"{ranks} of {known}" if ranks == known else ""
    return judged("ranks agree on layout", problems, detail, looked_at=ranks, of=known, rest=NOT_HERE)


# -- archives ---------------------------------------------------------------------------------------------------------
#
# All values can be right and torch still refuse their file: the reader opens `version` and others first, through the
# local header of each. Source: caffe2/serialize/inline_container.cc (`PyTorchStreamReader::init`).


VERSIONS = ("version", ".data/version")
"""Records with the version of an archive; without one torch refuses it."""

SMALL = (*VERSIONS, ".format_version", ".storage_alignment", ".data/serialization_id", "byteorder")
"""Optional records that torch reads from every archive, beside the pickle and the storages."""

MAX_SMALL = 1 << 10
"""Largest size of one of them in bytes."""


def damaged_archives(ck: Checkpoint, files: OpenFiles) -> list[Problem]:
    """Archives that torch would refuse or misread, although their pickle and tensors are right."""
    return [p for file in ck.files if file.status == "read" for p in _damaged_in(file, files)]


def _damaged_in(rank_file: RankFile, files: OpenFiles) -> Iterator[Problem]:
    with suppress(ReadError), files.open(rank_file.path) as file:  # other checks report a missing file
        for window in _archives(file):
            item = f", item at byte {window.start}:" if window.start else ""
            for why in _refused(window):
                text = f"{rank_file.path.name}{item} {why}; torch.load may refuse it"
                yield Problem(Code.BAD_CHECKSUM, text, rank_file.rank)


def _archives(file: File) -> Iterator[Window]:
    """The archives in a file, last first: one, or those of the items of a `.distcp`.

    In a store each item would take several requests, so only files that are one archive are checked there.
    """
    end = file.size
    while end > EOCD.size:
        begins = archive_before(file, end - EOCD.size)
        if begins is None or (begins and file.descriptor is None):
            return
        yield Window(file, begins, end - begins)
        end = begins


def _refused(window: Window) -> Iterator[str]:
    """Why torch refuses an opened archive; problems of its directory were reported when it was opened."""
    with suppress(ReadError):
        archive = Container(window)
        spelled = {name.lower(): name for name in archive.records}
        if spelled.keys().isdisjoint(VERSIONS):
            yield "has no record version"
        for name in SMALL:
            try:
                if name in spelled:
                    archive.read(spelled[name], MAX_SMALL)
            except ReadError as error:
                yield error.reason


# -- manifest ---------------------------------------------------------------------------------------------------------


MAX_MANIFEST = 256 << 20
"""Largest manifest in bytes."""


ListedTensor = tuple[str, tuple[int, ...], str]
"""Dtype, shape and SHA-256."""


def read_manifest(path: Path) -> tuple[Mapping[str, ListedTensor], Mapping[str, tuple[int, str]]]:
    """Read the tensors by fqn and the files by name from a manifest that `consolidate` wrote.

    Raises:
        ReadError: the file cannot be read, or is no manifest.
    """
    with File(path) as file:
        if file.size > MAX_MANIFEST:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_MANIFEST} are read")
        data = file.read(0, file.size)
    try:
        content = json.loads(data)
        tensors = {k: (str(v["dtype"]), tuple(v["shape"]), str(v["sha256"])) for k, v in content["tensors"].items()}
        files = {k: (int(v["bytes"]), str(v["sha256"])) for k, v in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ReadError(path, "is no manifest of ckptools, which has tensors and files with their sha256") from error
    if content.get("schema") != MANIFEST_SCHEMA:
        raise ReadError(path, f"is no manifest that this version reads; expected schema {MANIFEST_SCHEMA}")
    return tensors, files


def whole_tensors(ck: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its name in the tree; those of a single model also by their own fqn, as in a bare state dict."""
    models = sections_of_kind(ck, "model")
    for path, tensor in tensors_in(models[0].value) if len(models) == 1 else ():
        yield fqn_of(path), tensor
    for path, tensor in tensors_in(ck.tree):
        yield fqn_of(path), tensor


def of_tensor(name: str, said: ListedTensor, tensor: Tensor | None, files: OpenFiles) -> Iterator[Problem]:
    """How one tensor differs from its entry in the manifest."""
    dtype, shape, digest = said
    if tensor is None:
        yield Problem(Code.MANIFEST_DIFFERS, "is in the manifest and not in the checkpoint", None, name)
        return
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        text = f"is {short(tensor.dtype)} {list(tensor.shape)}, in the manifest {short(dtype)} {list(shape)}"
        yield Problem(Code.MANIFEST_DIFFERS, text, None, name)
        return
    if cover_problem(tensor, name) is None and tensor_digest(once(tensor), files) != digest:
        yield Problem(Code.MANIFEST_DIFFERS, "has other values than the manifest says", None, name)


def of_stated(path: Path, stated: str) -> Iterator[Problem]:
    """How a file differs from the SHA-256 that its own checkpoint states.

    Raises:
        ReadError: it cannot be read.
    """
    if not path.is_file():
        yield Problem(Code.MANIFEST_DIFFERS, f"{path.name} is listed with a sha256, and not here")
    elif file_digest(path)[1] != stated:
        yield Problem(Code.MANIFEST_DIFFERS, f"{path.name} has another sha256 than the checkpoint states")


def of_file(manifest: Path, name: str, said: tuple[int, str]) -> Iterator[Problem]:
    """How one file beside the manifest differs from its entry in it; nothing if the file does not exist."""
    plain = all(part not in ("", ".", "..") for part in name.split("/")) and "\0" not in name and "\\" not in name
    path = manifest.parent / name
    if not plain or not path.is_file():
        return
    nbytes, digest = file_digest(path)
    if (nbytes, digest) != said:
        text = f"{name} has {nbytes} bytes and another sha256 than the manifest says ({said[0]} bytes)"
        yield Problem(Code.MANIFEST_DIFFERS, text)
