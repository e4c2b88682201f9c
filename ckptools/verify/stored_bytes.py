"""Checks of stored bytes: checksums match, values are finite numbers, and copies on several ranks are equal.

Checksums and values are read once for both. Checksums are those of the container: a CRC-32 for each record of a
torch.save archive, and so for each item of a DCP. torch never compares them, so a flipped bit loads silently.
safetensors has none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptools.dtypes import EXPONENTS, NAN_CODES, WIDTHS, has_nonfinite, nonfinite_mask, scannable
from ckptools.errors import original_of
from ckptools.files.opening import OpenFiles
from ckptools.files.zip_archive import FRONT, has_local_header
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover_problem
from ckptools.model.problems import Code, Problem
from ckptools.model.shard import Shard
from ckptools.model.shards import all_here
from ckptools.model.tensor import Tensor
from ckptools.model.tree import fqn_of, tensors_in
from ckptools.tensor_io.checksums import CHUNK, Record, Stored, crc32, read_pieces, stored_records, without_records
from ckptools.tensor_io.fetch_ahead import Part, copies_of, fetched_runs
from ckptools.tensor_io.replicas import differing_boxes
from ckptools.text import and_more, few
from ckptools.training_state.rank_values import RankValues, Shared
from ckptools.training_state.sections import sections_of, tensors_of

MAX_NAMED = 5


def records_of(ck: Checkpoint) -> list[Stored]:
    """Every record with bytes of a tensor, in file order."""
    return stored_records((fqn_of(path), tensor) for path, tensor in tensors_in(ck.tree))


def not_here(ck: Checkpoint) -> int:
    """Number of pieces of tensors that are in no file here; at least one for each file that is missing or damaged."""
    tensors = (t for _, t in tensors_in(ck.tree) if t.kind != "meta" and not all_here(t.shards))
    return max(sum(len(t.shards) - len(t.found) for t in tensors), sum(not file.is_here for file in ck.files))


def is_scanned(found: Stored) -> bool:
    """Whether a record holds numbers that may be NaN or infinite, and that are looked at one by one."""
    return bool(_dtypes(found))


def is_encoded(found: Stored) -> bool:
    """Whether a record holds parts of encoded values alone, which are not looked at."""
    return all(shard.encoded is not None for _, shard in found.owners)


@dataclass(frozen=True)
class Findings:
    """The findings on one record.

    Attributes:
        checksum: the problem if the record does not match its stated CRC-32.
        values: tensors in it with NaN or infinities.
        nbytes: bytes read.
    """

    checksum: tuple[Problem, ...]
    values: tuple[Problem, ...]
    nbytes: int


def read_record(found: Stored, files: OpenFiles, deep: bool, values: bool) -> Findings:
    """Read a record once, for its checksum, its values, or both.

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
            if record.nbytes > FRONT:  # smaller records are read with others
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
    """Note for each wrong checksum whether other ranks have undamaged copies of everything in the record."""
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
    """The findings, in which NaN or infinity is a warning where it may be meant.

    In a tensor that is not joined: padding of flat buffers is never set. In a single number of Lightning's `callbacks`:
    `ModelCheckpoint` begins with an infinite `kth_value`. Source: pytorch_lightning/callbacks/model_checkpoint.py.
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
    shared = all(fqn in tensors for fqn, _ in found.owners)  # no other rank has a copy of a rank's own value
    return shared and all(cover_problem(tensor, "") is None for tensor in left)


def parts_of(found: Stored, deep: bool, values: bool) -> list[Part]:
    """The parts that `read_record` reads: the record, and its header if the checksum is compared."""
    path, start, end = found.record.part
    if _is_checked(found, deep):
        return [(path, start - FRONT, end)]
    return [(path, start, end)] if values and _dtypes(found) else []


def bytes_to_read(ck: Checkpoint, deep: bool, values: bool) -> int:
    """Number of bytes that `read_record` will read for all records."""
    if not deep and not values:
        return 0
    return sum(f.record.nbytes for f in records_of(ck) if _is_checked(f, deep) or (values and _dtypes(f)))


def _is_checked(found: Stored, deep: bool) -> bool:
    """Whether the checksum is compared; the container may state none."""
    return deep and found.record.crc != 0


def _dtypes(found: Stored) -> set[str]:
    """The dtypes of tensors in a record that can represent NaN."""
    return {s.source.dtype for _, s in found.owners if s.source is not None and scannable(s.source.dtype)}


def _wrong_checksum(found: Stored, crc: int) -> Problem:
    fqn, shard = found.owners[0]
    more = and_more(len(found.owners) - 1)
    text = f"{original_of(found.record.path).name} {shard.box}{more}: {found.record.damage(crc)}"
    return Problem(Code.BAD_CHECKSUM, text, shard.rank, fqn)


def _wrong_header(found: Stored) -> Problem:
    fqn, shard = found.owners[0]
    what = "local header and directory disagree; the file is damaged"
    return Problem(Code.BAD_CHECKSUM, f"{found.record.path.name} record {found.record.name}: {what}", shard.rank, fqn)


def _odd_values(found: Stored, files: OpenFiles) -> Iterator[Problem]:
    """Check each tensor separately: a storage may contain padding, and elements of no tensor."""
    from ckptools.tensor_io.read import read_shard

    for fqn, shard in found.owners:
        if shard.source is None or not scannable(shard.source.dtype):
            continue
        data = read_shard(shard, files).tobytes()
        mask = nonfinite_mask(data, shard.source.dtype)
        if mask.any():
            yield _odd_problem(fqn, shard, data, mask)


def _odd_problem(fqn: str, shard: Shard, data: bytes, mask: Any) -> Problem:
    assert shard.source is not None
    parts = 2 if shard.source.dtype.startswith("complex") else 1
    first, count = int(mask.argmax()) // parts, int(mask.reshape(-1, parts).any(axis=1).sum())
    nans = _nans(data, shard.source.dtype, mask) if parts == 1 else count
    kinds = [f"{nans} NaN"] if nans else []
    kinds += [f"{count - nans} Inf"] if count > nans else []
    place = list(shard.box.index_of(first))
    return Problem(Code.NOT_FINITE, f"{', '.join(kinds)}, first at {place}", shard.rank, fqn)


def _nans(data: bytes, dtype: str, mask: Any) -> int:
    """Count the NaNs among the odd elements: those with a fraction that is not zero."""
    import numpy as np

    if dtype in NAN_CODES or dtype == "float8_e4m3fn":
        return int(mask.sum())
    raw = np.frombuffer(data, f"<u{WIDTHS.get(dtype, 1)}")
    sign = 1 << (8 * raw.dtype.itemsize - 1)
    fraction = raw.dtype.type(sign - 1 & ~EXPONENTS[dtype])
    return int(((raw & fraction) != 0)[mask].sum())


# -- copies on several ranks ------------------------------------------------------------------------------------------


def replicated(ck: Checkpoint) -> list[tuple[str, Tensor]]:
    """Tensors that ranks should share, with a region on several ranks, and their names.

    Pieces that no rule joins have no places: two of the same shape are not copies.
    """
    found, shared = [], Shared(sections_of(ck))
    for path, tensor in tensors_of(sections_of(ck)):
        if tensor.has_copies and not _without_places(tensor) and shared.holds(path):
            found.append((fqn_of(path), tensor))
    return found


def _without_places(tensor: Tensor) -> bool:
    """Whether nothing says where the pieces of a tensor lie: each begins at its own first element."""
    runs = tensor.kind == "flat_pieces" and not any(any(shard.box.offsets) for shard in tensor.shards)
    return bool(tensor.note) and (runs or tensor.kind == "tensor_parallel")


def fetch_copies(ck: Checkpoint) -> None:
    """Fetch the bytes for comparing copies from a store, for as many tensors as fit at once."""
    next(fetched_runs((tensor for _, tensor in tensors_of(sections_of(ck))), copies_of))


def own(ck: Checkpoint, files: OpenFiles) -> str:
    """The line that names values of which each rank has its own; empty if there are none.

    Raises:
        ReadError: a file cannot be read.
    """
    names = [fqn_of(path) for path in RankValues(ck, files).own()]
    return f"each rank has its own: {few(names, MAX_NAMED)}" if names else ""


def unequal(fqn: str, tensor: Tensor, files: OpenFiles) -> Iterator[Problem]:
    """The first region of a tensor whose copies differ.

    Raises:
        ReadError: a file cannot be read.
    """
    for found in list(differing_boxes(tensor.found, files).values())[:1]:
        yield found.problem(fqn, files)
