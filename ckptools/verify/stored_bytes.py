"""Checks of files and their bytes: checksums match, values are finite, copies on several ranks are equal.

One pass reads bytes for checksums and values. A torch.save archive, and so each item of a DCP file, states a CRC-32 for
each zip entry. torch never compares them, so a flipped bit loads silently. safetensors has no checksums.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ckptools.dtypes import EXPONENTS, NAN_CODES, WIDTHS, has_nonfinite, nonfinite_mask, scannable, short
from ckptools.errors import ReadError, original_of
from ckptools.files.opening import File, OpenFiles, Window, reading
from ckptools.files.zip_archive import EOCD, FRONT, Container, archive_before, has_local_header
from ckptools.keys.value_digests import once
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover_problem
from ckptools.model.facts import RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.rules.tensors import PLACEHOLDER
from ckptools.tensor_io.checksums import CHUNK, Record, Stored, crc32, read_pieces, stored_records, without_records
from ckptools.tensor_io.fetch_ahead import Part, copies_of, fetched_runs
from ckptools.tensor_io.replicas import differing_boxes
from ckptools.tensor_io.stream import MANIFEST_SCHEMA, file_digest, tensor_digest
from ckptools.text import and_more, duration, few, fqn_of, plural, size
from ckptools.training_state.models import chosen_models
from ckptools.training_state.rank_values import RankValues, Shared
from ckptools.training_state.sections import sections_of, tensors_of
from ckptools.verify.record import Check, judged, not_judged

MAX_NAMED = 5


def records_of(ck: Checkpoint) -> list[Stored]:
    """List the storages (in torch.save archives: zip entries) that hold bytes of tensors, in file order."""
    return stored_records((fqn_of(path), tensor) for path, tensor in tensors_in(ck.tree))


def not_here(ck: Checkpoint) -> int:
    """Count shards in missing or damaged files; at least one for each such file."""
    tensors = (t for _, t in tensors_in(ck.tree) if t.kind != "meta" and not t.every_shard.is_here)
    return max(sum(len(t.shards) - len(t.found) for t in tensors), sum(not file.is_here for file in ck.files))


def is_scanned(found: Stored) -> bool:
    """Whether the storage holds floating-point values, to be searched for NaN and infinities."""
    return bool(_dtypes(found))


def is_encoded(found: Stored) -> bool:
    """Whether the storage holds only encoded tensors, whose raw bytes are not searched for NaN."""
    return all(shard.encoded is not None for _, shard in found.owners)


@dataclass(frozen=True)
class Findings:
    """The problems found in one storage.

    Attributes:
        checksum: a problem if the bytes do not match their stated CRC-32.
        values: a problem for each tensor with NaN or infinities.
    """

    checksum: tuple[Problem, ...]
    values: tuple[Problem, ...]
    nbytes: int


def read_record(found: Stored, files: OpenFiles, deep: bool, values: bool) -> Findings:
    """Read a storage once, to compare its checksum, search its values for NaN, or both.

    Raises:
        ReadError: the file cannot be read, or became shorter.
    """
    record = found.record
    check = _is_checked(found, deep)
    dtypes = _dtypes(found) if values else set()
    if not check and not dtypes:
        return Findings((), (), 0)
    crc, odd, headed = 0, False, True
    with files.open(record.path) as file:
        if check and file.descriptor is None:
            if record.nbytes > FRONT:  # smaller entries are read together
                file.expect([(record.offset - FRONT, min(record.end, record.offset + CHUNK))])
            headed = has_local_header(file, record.name, record.offset)
        for piece in read_pieces(file, record.offset, record.nbytes):
            crc = crc32(piece, crc) if check else 0
            odd = odd or any(has_nonfinite(piece, dtype) for dtype in dtypes)
    wrong = (_wrong_checksum(found, crc),) if check and crc != record.crc else ()
    wrong = wrong if headed else (_wrong_header(found), *wrong)
    return Findings(wrong, tuple(_odd_values(found, files)) if odd else (), record.nbytes)


def with_replicas(
    ck: Checkpoint, found: Sequence[Stored], findings: Sequence[Findings], damaged: Collection[Record]
) -> list[Findings]:
    """Note for each wrong checksum whether other ranks have undamaged copies of all tensors in the storage."""
    if not damaged:
        return list(findings)
    shared = Shared(sections_of(ck))
    tensors = {fqn_of(path): tensor for path, tensor in tensors_in(ck.tree) if shared.holds(path)}
    made = []
    for one, finding in zip(found, findings, strict=True):
        elsewhere = bool(finding.checksum) and _is_elsewhere(one, tensors, damaged)
        made.append(replace(finding, checksum=tuple(replace(p, replicated=elsewhere) for p in finding.checksum)))
    return made


def with_padding(ck: Checkpoint, findings: Sequence[Findings]) -> list[Findings]:
    """Turn problems with NaN or infinity into warnings where such values may be meant.

    They may be in tensors that cannot be joined, as padding of flat buffers is never set; and in single numbers of
    Lightning's `callbacks`: `ModelCheckpoint` starts with an infinite `kth_value`.
    Source: pytorch_lightning/callbacks/model_checkpoint.py.
    """
    if not any(finding.values for finding in findings):
        return list(findings)
    unjoined = {fqn_of(path) for path, tensor in tensors_in(ck.tree) if tensor.note}
    scores = {fqn_of(path) for path, tensor in tensors_in(ck.tree) if path[0] == "callbacks" and not tensor.shape}

    def judged(problem: Problem) -> Problem:
        if problem.tensor in scores:
            return replace(problem, message=f"{problem.message}; a callback's own number", severity="warning")
        if problem.tensor not in unjoined:
            return problem
        return replace(problem, message=f"{problem.message}; not joined: it may be padding", severity="warning")

    return [replace(finding, values=tuple(map(judged, finding.values))) for finding in findings]


def _is_elsewhere(found: Stored, tensors: Mapping[str, Tensor], damaged: Collection[Record]) -> bool:
    left = (without_records(tensors[fqn], damaged) for fqn, _ in found.owners if fqn in tensors)
    shared = all(fqn in tensors for fqn, _ in found.owners)  # other ranks have no copy of a value that differs by rank
    return shared and all(cover_problem(tensor, "") is None for tensor in left)


def parts_of(found: Stored, deep: bool, values: bool) -> list[Part]:
    """List the byte ranges that `read_record` reads: the storage, and its local header if the checksum is compared."""
    path, start, end = found.record.part
    if _is_checked(found, deep):
        return [(path, start - FRONT, end)]
    return [(path, start, end)] if values and _dtypes(found) else []


def bytes_to_read(ck: Checkpoint, deep: bool, values: bool) -> int:
    """Count the bytes that `read_record` will read for all storages."""
    if not deep and not values:
        return 0
    return sum(f.record.nbytes for f in records_of(ck) if _is_checked(f, deep) or (values and _dtypes(f)))


def _is_checked(found: Stored, deep: bool) -> bool:
    """Whether to compare the checksum, if the archive states one."""
    return deep and found.record.crc != 0


def _dtypes(found: Stored) -> set[str]:
    """Collect the dtypes in a storage that can represent NaN or infinity."""
    return {s.source.dtype for _, s in found.owners if s.source is not None and scannable(s.source.dtype)}


def _wrong_checksum(found: Stored, crc: int) -> Problem:
    fqn, shard = found.owners[0]
    more = and_more(len(found.owners) - 1)
    name = original_of(found.record.path).name
    text = f"{name} {shard.box}{more}: {found.record.damage(crc)}"
    return Problem(Code.BAD_CHECKSUM, text, shard.rank, fqn, files=(name,))


def _wrong_header(found: Stored) -> Problem:
    fqn, shard = found.owners[0]
    name = original_of(found.record.path).name
    text = f"{name} record {found.record.name}: local header and directory disagree; the file is damaged"
    return Problem(Code.BAD_CHECKSUM, text, shard.rank, fqn, files=(name,))


def _odd_values(found: Stored, files: OpenFiles) -> Iterator[Problem]:
    """Search each tensor by itself: a storage may contain padding, and elements of no tensor."""
    from ckptools.tensor_io.read import read_shard

    for fqn, shard in found.owners:
        if shard.source is None or not scannable(shard.source.dtype):
            continue
        data = read_shard(shard, files).tobytes()
        mask = nonfinite_mask(data, shard.source.dtype)
        if mask.any():
            assert shard.source is not None
            parts = 2 if shard.source.dtype.startswith("complex") else 1
            first, count = int(mask.argmax()) // parts, int(mask.reshape(-1, parts).any(axis=1).sum())
            nans = _nans(data, shard.source.dtype, mask) if parts == 1 else count
            kinds = [f"{nans} NaN"] if nans else []
            kinds += [f"{count - nans} Inf"] if count > nans else []
            place = list(shard.box.index_of(first))
            yield Problem(Code.NOT_FINITE, f"{', '.join(kinds)}, first at {place}", shard.rank, fqn)


def _nans(data: bytes, dtype: str, mask: Any) -> int:
    """Count the NaNs among nonfinite elements: all with a nonzero fraction."""
    import numpy as np

    if dtype in NAN_CODES or dtype == "float8_e4m3fn":
        return int(mask.sum())
    raw = np.frombuffer(data, f"<u{WIDTHS.get(dtype, 1)}")
    sign = 1 << (8 * raw.dtype.itemsize - 1)
    fraction = raw.dtype.type(sign - 1 & ~EXPONENTS[dtype])
    return int(((raw & fraction) != 0)[mask].sum())


# -- copies on several ranks -------------------------------------------------------------------------------------------


def replicated(ck: Checkpoint) -> list[tuple[str, Tensor]]:
    """List the tensors, with their names, of which several ranks hold the same region and should agree.

    Tensors whose shards have unknown positions are left out: two shards of one shape need not be copies.
    """
    found, shared = [], Shared(sections_of(ck))
    for path, tensor in tensors_of(sections_of(ck)):
        if tensor.has_copies and not _without_places(tensor) and shared.holds(path):
            found.append((fqn_of(path), tensor))
    return found


def _without_places(tensor: Tensor) -> bool:
    """Whether the positions of the shards are unknown: each shard then starts at offset 0."""
    runs = tensor.kind == "flat_pieces" and not any(any(shard.box.offsets) for shard in tensor.shards)
    return bool(tensor.note) and (runs or tensor.kind == "tensor_parallel")


def fetch_copies(ck: Checkpoint) -> None:
    """Fetch the bytes for comparing copies from remote storage, for as many tensors as fit at once."""
    next(fetched_runs((tensor for _, tensor in tensors_of(sections_of(ck))), copies_of))


def own(ck: Checkpoint, files: OpenFiles) -> str:
    """Name the values that differ between ranks by design, in one line; empty if there are none.

    Raises:
        ReadError: a file cannot be read.
    """
    names = [fqn_of(path) for path in RankValues(ck, files).own()]
    return f"each rank has its own: {few(names, MAX_NAMED)}" if names else ""


def unequal(fqn: str, tensor: Tensor, files: OpenFiles) -> Iterator[Problem]:
    """Yield the first region of a tensor whose copies differ, as a problem.

    Raises:
        ReadError: a file cannot be read.
    """
    for found in list(differing_boxes(tensor.found, files).values())[:1]:
        yield found.problem(fqn, files)


# -- checks of files: all exist, are complete, of one save and one layout, and as torch and a manifest expect them -----


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
"""Why some files, or some of their contents, were not looked at."""

FAR_APART = 3600.0
"""A larger gap in seconds between the first and the last file suggests two saves."""


def presence(ck: Checkpoint) -> Check:
    """Check that every file exists and is complete, and that no other file lies among them."""
    here = sum(f.is_here for f in ck.files)
    problems = [*(p for p in ck.problems if p.kind in PRESENCE), *_left_over(ck)]
    detail = f"{here} of {len(ck.files)} here and complete"
    return judged("files", problems, detail, looked_at=here, of=len(ck.files), rest=NOT_HERE)


def one_save(ck: Checkpoint) -> Check:
    """Check that sizes, times and steps of the files are consistent with one save."""
    here = [f for f in ck.files if f.is_here]
    sizes = sorted({f.nbytes for f in here})
    ends = dict.fromkeys(map(size, (*sizes[:1], *sizes[-1:])))
    apart, when, astray = written_apart(ck.files)
    problems = [p for p in ck.problems if p.kind in ONE_SAVE]
    if apart > FAR_APART:
        hours = f"{apart / 3600:.1f} hours"
        whole = f"files were written {hours} apart" if not astray else f"written {hours} {when} the others"
        text = f"{whole}; they may be of two saves, or copied one by one"
        ranks = tuple(sorted({f.rank for f in astray if f.rank is not None}))
        files = () if len(ranks) == len(astray) else tuple(f.path.name for f in astray)
        ranks = () if files else ranks
        problems.append(Problem(Code.MIXED_SAVES, text, severity="warning", files=files, ranks=ranks))
    within = f", written within {duration(apart)}" if apart >= 1 else ""
    detail = f"{plural(len(here), 'file')} of {' to '.join(ends) or 'no size'}{within}"
    return judged("one save", problems, detail, looked_at=len(here), of=len(ck.files), rest=NOT_HERE)


def written_apart(files: Iterable[RankFile]) -> tuple[float, str, list[RankFile]]:
    """The seconds between the first and the last file, and the few files `before` or `after` the longest pause.

    No file is named if both sides have as many, or if there are other long pauses.
    """
    written = sorted((f for f in files if f.modified), key=lambda f: f.modified or 0.0)
    times = [f.modified or 0.0 for f in written]
    if len(times) < 2:
        return 0.0, "", []
    apart, pauses = times[-1] - times[0], [later - earlier for earlier, later in pairwise(times)]
    at = pauses.index(max(pauses)) + 1
    when, few_files = ("before", written[:at]) if 2 * at < len(written) else ("after", written[at:])
    sure = 2 * max(pauses) > apart and 2 * len(few_files) < len(written)
    return apart, when, few_files if sure else []


def _left_over(ck: Checkpoint) -> Iterator[Problem]:
    for folder in dict.fromkeys(f.path.parent for f in ck.files):
        with reading(folder):
            names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        for name in names:
            if name.endswith((".metadata.tmp", ".partial")):
                yield Problem(Code.LEFT_OVER, f"{name} is left over from a write that was interrupted")


def exactly_covered(ck: Checkpoint) -> Check:
    """Check that every element of every tensor is in exactly one shard; copies of a shard count once."""
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
    """Check that ranks agree on the world size, and on the shape, dtype and shards of every tensor."""
    ranks = len({f.rank for f in ck.files if f.status == "read" and f.rank is not None})
    known = len({f.rank for f in ck.files if f.rank is not None})
    problems = [p for p in ck.problems if p.kind in AGREEMENT]
    if ranks < 2 and not problems:
        return not_judged("ranks agree on layout", "no two ranks to compare", known if known > 1 else 0)
    detail = f"{ranks} of {known}" if ranks == known else ""
    return judged("ranks agree on layout", problems, detail, looked_at=ranks, of=known, rest=NOT_HERE)


# -- archives ----------------------------------------------------------------------------------------------------------
# torch refuses a file with undamaged values if it cannot read `version` and other small entries, through the local
# header of each. Source: caffe2/serialize/inline_container.cc (`PyTorchStreamReader::init`).


VERSIONS = ("version", ".data/version")
"""Zip entries with the version of an archive; without one torch refuses it."""

SMALL = (*VERSIONS, ".format_version", ".storage_alignment", ".data/serialization_id", "byteorder")
"""Small zip entries that torch reads from every archive, beside the pickle and the storages."""

MAX_SMALL = 1 << 10
"""Largest size of such an entry in bytes."""


BOUNDS = 16 << 10
"""Bytes at the beginning and the end of an archive, fetched for many files at once."""


def damaged_archives(ck: Checkpoint, files: OpenFiles) -> list[Problem]:
    """Report archives that torch would refuse or misread although their pickle and tensors are undamaged."""
    read = (file for file in ck.files if file.status == "read")
    return [p for run in fetched_runs(read, _bounds) for file in run for p in _damaged_in(file, files)]


def _bounds(file: RankFile) -> list[Part]:
    """List the byte ranges that `damaged_archives` reads of a file that is one small archive."""
    size = file.nbytes
    return [(file.path, 0, min(BOUNDS, size)), (file.path, max(size - BOUNDS, 0), size)]


def _damaged_in(rank_file: RankFile, files: OpenFiles) -> Iterator[Problem]:
    with suppress(ReadError), files.open(rank_file.path) as file:  # other checks report a missing file
        for window in _archives(file):
            item = f", item at byte {window.start}:" if window.start else ""
            for why in _refused(window):
                text = f"{rank_file.path.name}{item} {why}; torch.load may refuse it"
                yield Problem(Code.BAD_CHECKSUM, text, rank_file.rank, files=(rank_file.path.name,))


def _archives(file: File) -> Iterator[Window]:
    """Yield the archives in a file, last first: the file itself, or each item of a `.distcp`.

    Remotely each item would take several requests, so only files that are one archive are checked.
    """
    end = file.size
    while end > EOCD.size:
        begins = archive_before(file, end - EOCD.size)
        if begins is None or (begins and file.descriptor is None):
            return
        yield Window(file, begins, end - begins)
        end = begins


def _refused(window: Window) -> Iterator[str]:
    """Yield reasons why torch refuses an archive; opening it has already reported a damaged central directory."""
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


# -- manifest ----------------------------------------------------------------------------------------------------------


MAX_MANIFEST = 256 << 20
"""Largest manifest in bytes."""


ListedTensor = tuple[str, tuple[int, ...], str]
"""Dtype, shape and SHA-256 of a tensor in a manifest."""


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
    """Yield every tensor by its name in the tree; tensors of the model to look at also by fqn."""
    models = chosen_models(ck)
    for path, tensor in tensors_in(models[0].value) if len(models) == 1 else ():
        yield fqn_of(path), tensor
    for path, tensor in tensors_in(ck.tree):
        yield fqn_of(path), tensor


def of_tensor(name: str, said: ListedTensor, tensor: Tensor | None, files: OpenFiles) -> Iterator[Problem]:
    """Compare one tensor with its entry in the manifest."""
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
    """Compare a file with the SHA-256 that its own checkpoint lists.

    Raises:
        ReadError: the file cannot be read.
    """
    if not path.is_file():
        yield Problem(Code.MANIFEST_DIFFERS, f"{path.name} is listed with a sha256, and not here")
    elif file_digest(path)[1] != stated:
        yield Problem(Code.MANIFEST_DIFFERS, f"{path.name} has another sha256 than the checkpoint states")


def of_file(manifest: Path, name: str, said: tuple[int, str]) -> Iterator[Problem]:
    """Compare one file beside the manifest with its entry; a file that does not exist is skipped."""
    plain = all(part not in ("", ".", "..") for part in name.split("/")) and "\0" not in name and "\\" not in name
    path = manifest.parent / name
    if not plain or not path.is_file():
        return
    nbytes, digest = file_digest(path)
    if (nbytes, digest) != said:
        text = f"{name} has {nbytes} bytes and another sha256 than the manifest says ({said[0]} bytes)"
        yield Problem(Code.MANIFEST_DIFFERS, text)
