"""Tensors of two sides held against each other: names, shapes, dtypes, and values where they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptools.checks.difference.measures import Tolerance
from ckptools.checks.difference.plain_values import NUMBERED
from ckptools.checks.difference.sides import HeldTensor
from ckptools.checks.difference.tensor_digests import nbytes_of, parts_of, sha256_of
from ckptools.checks.difference.tensor_values import Measured, compare_tensors
from ckptools.dtypes import short
from ckptools.files.opening import OpenFiles
from ckptools.model.difference import DIFFERENT, TensorDifference, Verdict
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.fetch_ahead import Part
from ckptools.tensor_io.progress import Progress, not_told
from ckptools.tensor_io.shared_work import in_ranks
from ckptools.text import plural, shape

Pair = tuple[HeldTensor | None, HeldTensor | None]


@dataclass(frozen=True)
class Reading:
    """How values are compared.

    Attributes:
        files: keeps sources open.
        threads: how many.
        tolerance: how far values may be apart; None for not at all.
        every_byte: read also what has the same stated checksum on both sides.
        progress: called with bytes read and the tensor they are of.
    """

    files: OpenFiles
    threads: int
    tolerance: Tolerance | None = None
    every_byte: bool = False
    progress: Progress = not_told


def structure_row(a: HeldTensor | None, b: HeldTensor | None) -> TensorDifference:
    """What is known of a tensor on both sides without its values."""
    held = a or b
    assert held is not None
    row = TensorDifference(
        held.name, held.subject, "not compared", "", b.name if b else None,
        a.shape if a else None, b.shape if b else None, a.dtype if a else None, b.dtype if b else None,
        a.layout if a else None, b.layout if b else None,
    )  # fmt: skip
    if a is None or b is None:
        return row._replace(verdict="only in A" if b is None else "only in B")
    verdict, detail = _structure(a, b)
    return row._replace(verdict=verdict, detail=detail)


def _structure(a: HeldTensor, b: HeldTensor) -> tuple[Verdict, str]:
    if a.shape != b.shape:
        return "differs", f"shape {shape(a.shape)} / {shape(b.shape)}"
    problems = [f"{side}: {held.problem}" for side, held in (("A", a), ("B", b)) if held.problem]
    if problems:
        return "cannot be compared", "; ".join(problems)
    if a.dtype != b.dtype:
        return "differs", _dtypes(a, b)
    return ("cannot be compared", NUMBERED) if a.number or b.number else ("not compared", "")


def _dtypes(a: HeldTensor, b: HeldTensor) -> str:
    return f"{short(a.dtype)} / {short(b.dtype)}"


def value_rows(pairs: Sequence[Pair], how: Reading) -> tuple[list[TensorDifference], int, int]:
    """A row for each pair with its values compared, where both sides have them; bytes that were read, and were not."""
    rows = [structure_row(a, b) for a, b in pairs]
    both = [n for n, (a, b) in enumerate(pairs) if a and b and a.shape == b.shape and not (a.problem or b.problem)]
    measured = _measured(pairs, [n for n in both if all(h and h.tensor is not None for h in pairs[n])], how)
    hashed = _hashed(pairs, [n for n in both if n not in measured], how)
    for n in both:
        a, b = pairs[n]
        assert a is not None and b is not None
        row = with_measures(rows[n], measured[n], how) if n in measured else _by_digest(rows[n], *hashed[n])
        rows[n] = _sure(row, a, b)
    held = [one.tensor for n in hashed for one in pairs[n] if one is not None and one.tensor is not None]
    read = sum(found.nbytes for found in measured.values()) + sum(tensor.nbytes for tensor in held)
    return rows, read, sum(found.nbytes_skipped for found in measured.values())


def _measured(pairs: Sequence[Pair], which: Sequence[int], how: Reading) -> dict[int, Measured]:
    tensors: list[tuple[str, Tensor, Tensor]] = []
    for n in which:
        a, b = pairs[n]
        assert a and b and a.tensor is not None and b.tensor is not None
        tensors.append((a.name, a.tensor, b.tensor))
    found = compare_tensors(tensors, how.files, how.threads, how.tolerance, how.every_byte, how.progress)
    return dict(zip(which, found, strict=True))


def _sure(row: TensorDifference, a: HeldTensor, b: HeldTensor) -> TensorDifference:
    """The row; where only a number matches nothing is called equal, and an assumed name is said."""
    if a.number or b.number:
        alike = "values are " + ("equal" if row.verdict in ("same", "same checksum") else "not equal")
        return row._replace(verdict="cannot be compared", detail=f"{NUMBERED}; {alike}")
    if a.assumed or b.assumed:
        return row._replace(detail="; ".join(filter(None, (row.detail, "name assumed"))))
    return row


# -- what was measured -------------------------------------------------------------------------------------------


def with_measures(row: TensorDifference, found: Measured, how: Reading) -> TensorDifference:
    """A row of two tensors of one shape, with what comparing their values found."""
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
    """What should be known of the measures of a row."""
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
    """SHA-256, or why there is none, of both sides of pairs of which one has no more than that."""

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
        return row._replace(detail=f"{row.detail}; digests tell nothing of values in another dtype")
    whys = [f"{side}: {text}" for side, text in (("A", a), ("B", b)) if not is_sha256(text)]
    if whys:
        return row._replace(verdict="cannot be compared", detail="; ".join(whys))
    return row._replace(verdict="same" if a == b else "differs", detail="SHA-256" if a == b else "another SHA-256")


def is_sha256(text: str) -> bool:
    """Whether a text is a SHA-256 and not the reason why there is none."""
    return len(text) == 64 and not text.strip("0123456789abcdef")
