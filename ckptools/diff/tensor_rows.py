"""Comparison of tensors: names, shapes, dtypes, and if they are asked for values, or SHA-256 of a side without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptools.diff.plain_values import NUMBERED
from ckptools.diff.record import DIFFERENT, TensorDifference, Tolerance, Verdict
from ckptools.diff.sides import SideTensor
from ckptools.diff.tensor_values import Measured, compare_tensors, copies_differ, read_for_digest
from ckptools.dtypes import short
from ckptools.errors import CkptoolsError
from ckptools.files.opening import OpenFiles
from ckptools.keys.value_digests import once
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.fetch_ahead import Part, in_ranks
from ckptools.tensor_io.stream import tensor_digest
from ckptools.tensor_io.threads import Progress, no_progress
from ckptools.text import plural, shape

Pair = tuple[SideTensor | None, SideTensor | None]

OWN_COPIES = "ranks hold different copies of it (verify names them)"


@dataclass(frozen=True)
class Reading:
    """How values are compared.

    Attributes:
        files: keeps sources open.
        threads: number of threads.
        tolerance: how far values may be apart; None for not at all.
        every_byte: also read regions whose stated checksums are the same on both sides.
        progress: called with bytes read and the tensor they are of.
    """

    files: OpenFiles
    threads: int
    tolerance: Tolerance | None = None
    every_byte: bool = False
    progress: Progress = no_progress


def structure_row(a: SideTensor | None, b: SideTensor | None) -> TensorDifference:
    """Compare a tensor of both sides without its values."""
    tensor = a or b
    assert tensor is not None
    row = TensorDifference(
        tensor.name, tensor.subject, "not compared", "", b.name if b else None,
        a.shape if a else None, b.shape if b else None, a.dtype if a else None, b.dtype if b else None,
        a.layout if a else None, b.layout if b else None,
    )  # fmt: skip
    if a is None or b is None:
        return row._replace(verdict="only in A" if b is None else "only in B")
    verdict, detail = _structure(a, b)
    return row._replace(verdict=verdict, detail=detail)


def _structure(a: SideTensor, b: SideTensor) -> tuple[Verdict, str]:
    if a.shape != b.shape:
        return "differs", f"shape {shape(a.shape)} / {shape(b.shape)}"
    problems = [f"{side}: {tensor.problem}" for side, tensor in (("A", a), ("B", b)) if tensor.problem]
    if problems:
        return "cannot be compared", "; ".join(problems)
    if a.dtype != b.dtype:
        return "differs", f"{short(a.dtype)} / {short(b.dtype)}"
    return ("cannot be compared", NUMBERED) if a.number or b.number else ("not compared", "")


def value_rows(pairs: Sequence[Pair], how: Reading) -> tuple[list[TensorDifference], int, int]:
    """A row for each pair, values compared if both sides have them; then the bytes read and the bytes not read."""
    rows = [structure_row(a, b) for a, b in pairs]
    both = [n for n, (a, b) in enumerate(pairs) if a and b and a.shape == b.shape and not (a.problem or b.problem)]
    measured = _measured(pairs, [n for n in both if all(h and h.tensor is not None for h in pairs[n])], how)
    hashed = _hashed(pairs, [n for n in both if n not in measured], how)
    for n in both:
        a, b = pairs[n]
        assert a is not None and b is not None
        row = with_measures(rows[n], measured[n], how) if n in measured else _by_digest(rows[n], *hashed[n])
        rows[n] = _sure(row, a, b)
    tensors = [one.tensor for n in hashed for one in pairs[n] if one is not None and one.tensor is not None]
    read = sum(found.nbytes for found in measured.values()) + sum(tensor.nbytes for tensor in tensors)
    return rows, read, sum(found.nbytes_skipped for found in measured.values())


def _measured(pairs: Sequence[Pair], which: Sequence[int], how: Reading) -> dict[int, Measured]:
    tensors: list[tuple[str, Tensor, Tensor]] = []
    for n in which:
        a, b = pairs[n]
        assert a and b and a.tensor is not None and b.tensor is not None
        tensors.append((a.name, a.tensor, b.tensor))
    found = compare_tensors(tensors, how.files, how.threads, how.tolerance, how.every_byte, how.progress)
    return dict(zip(which, found, strict=True))


def _sure(row: TensorDifference, a: SideTensor, b: SideTensor) -> TensorDifference:
    """Doubt a row where only a number matches, and mention an assumed name."""
    if a.number or b.number:
        alike = "values are " + ("equal" if row.verdict in ("same", "same checksum") else "not equal")
        return row._replace(verdict="cannot be compared", detail=f"{NUMBERED}; {alike}")
    if a.assumed or b.assumed:
        return row._replace(detail="; ".join(filter(None, (row.detail, "name assumed"))))
    return row


# -- what was measured -------------------------------------------------------------------------------------------


def with_measures(row: TensorDifference, found: Measured, how: Reading) -> TensorDifference:
    """Add the measured values to the row of two tensors of one shape."""
    if found.problem:
        return row._replace(verdict="cannot be compared", detail=found.problem)
    same_dtype = row.dtype_a == row.dtype_b
    m = found.measures
    if m is None or not m.differing:
        verdict: Verdict = "same checksum" if found.skipped else "same"
        if not same_dtype:
            verdict = "within tolerance" if how.tolerance else "differs"
        words = _words(row, found, same_dtype, "every value is equal")
        return row._replace(verdict=verdict, detail=words, compared=m.compared if m else 0, differing=0 if m else None)
    within = how.tolerance is not None and not m.outside
    return row._replace(
        verdict="within tolerance" if within else "differs",
        detail=_words(row, found, same_dtype),
        compared=m.compared,
        differing=m.differing,
        change=m.change,
        max=m.max,
        cosine=m.cosine,
        first=m.first,
        value_a=m.values[0] if m.values else None,
        value_b=m.values[1] if m.values else None,
    )


def _words(row: TensorDifference, found: Measured, same_dtype: bool, equal: str = "") -> str:
    """Remarks on the measures of a row."""
    m = found.measures
    words = [] if same_dtype else [f"{row.detail}, compared by value in float64", equal]
    if found.skipped and m is not None:
        words.append(f"{plural(found.skipped, 'element')} with the same CRC-32 not read, measures are of the rest")
    elif found.skipped:
        words.append("same CRC-32 in both, not read")
    if found.damaged:
        words.append("both state the same CRC-32: one of them is damaged (verify --deep)")
    if found.by_rank:
        words.append("each rank has its own, compared rank by rank")
    if m is not None and m.nonfinite:
        words.append(f"{plural(m.nonfinite, 'element')} not finite, in no measure")
    if m is not None and m.differing and not m.max and not m.outside and not m.nonfinite:
        words.append("equal in value, not in bits")
    return "; ".join(filter(None, words))


# -- digests -----------------------------------------------------------------------------------------------------


def _hashed(pairs: Sequence[Pair], which: Sequence[int], how: Reading) -> dict[int, tuple[str, str]]:
    """Hash both sides of pairs where one comes from a file of digests; a reason stands for a missing hash."""

    def work(n: int) -> tuple[str, str]:
        a, b = pairs[n]
        assert a is not None and b is not None
        return sha256_of(a, how.files, how.progress), sha256_of(b, how.files, how.progress)

    def nbytes(n: int) -> int:
        return sum(nbytes_of(one) for one in pairs[n] if one)

    def reads(n: int) -> list[Part]:
        return [part for one in pairs[n] if one for part in parts_of(one)]

    return dict(zip(which, in_ranks(work, which, how.threads, nbytes, reads=reads), strict=True))


def _by_digest(row: TensorDifference, a: str, b: str) -> TensorDifference:
    if row.verdict in DIFFERENT and row.dtype_a != row.dtype_b:
        return row._replace(detail=f"{row.detail}; digests say nothing about values in another dtype")
    whys = [f"{side}: {text}" for side, text in (("A", a), ("B", b)) if not is_sha256(text)]
    if whys:
        return row._replace(verdict="cannot be compared", detail="; ".join(whys))
    return row._replace(verdict="same" if a == b else "differs", detail="SHA-256" if a == b else "another SHA-256")


def is_sha256(text: str) -> bool:
    """Whether a text is a SHA-256, not the reason for a missing one."""
    return len(text) == 64 and not text.strip("0123456789abcdef")


def sha256_of(entry: SideTensor, files: OpenFiles, progress: Callable[[int, str], None]) -> str:
    """SHA-256 of a tensor's values in row-major order, or why there is none."""
    if entry.tensor is None or entry.problem:
        return entry.sha256 or entry.problem or "has no digest"
    try:
        if copies_differ(entry.tensor, files):
            return OWN_COPIES
        digest = tensor_digest(once(entry.tensor), files)
    except CkptoolsError as error:
        return str(error)
    progress(entry.tensor.nbytes, entry.name)
    return digest


def parts_of(entry: SideTensor) -> list[Part]:
    """The parts to read for its digest; none if the digest is known."""
    return [] if entry.tensor is None else read_for_digest(entry.tensor)


def nbytes_of(entry: SideTensor) -> int:
    """Bytes to read for its digest; 0 if the digest is known."""
    return 0 if entry.tensor is None else entry.tensor.nbytes
