"""How much two tensors differ, put together from their parts, and how far they may be apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckptools.model.regions import Ints


@dataclass(frozen=True)
class Tolerance:
    """How far values may be apart: `|a - b| <= atol + rtol * |b|`, as numpy and torch have it."""

    rtol: float = 0.0
    atol: float = 0.0


@dataclass
class Measures:
    """What was measured of a tensor, or of a part of it.

    Attributes:
        compared: elements that were compared.
        differing: elements that differ.
        outside: elements that differ by more than the tolerance.
        nonfinite: elements that are NaN or infinite on a side; they are in no measure below.
        max: largest absolute difference.
        dd: sum of squares of the differences.
        aa: sum of squares of A.
        bb: sum of squares of B.
        first: index of the first element that differs.
        values: that element in A and in B, with every digit.
    """

    compared: int = 0
    differing: int = 0
    outside: int = 0
    nonfinite: int = 0
    max: float = 0.0
    dd: float = 0.0
    aa: float = 0.0
    bb: float = 0.0
    first: Ints | None = None
    values: tuple[str, str] | None = None

    def add(self, other: Measures) -> None:
        """Add those of another part."""
        for name in ("compared", "differing", "outside", "nonfinite", "dd", "aa", "bb"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max = max(self.max, other.max)
        if other.first is not None and (self.first is None or other.first < self.first):
            self.first, self.values = other.first, other.values

    @property
    def change(self) -> float | None:
        """Norm of the difference over that of A; None where that is 0 or beyond what a float holds."""
        return _finite(math.sqrt(self.dd / self.aa)) if self.aa > 0 and self.dd >= 0 else None

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between A and B; None where one of them is 0."""
        # a * b = (a * a + b * b - (a - b) * (a - b)) / 2
        norms = math.sqrt(self.aa) * math.sqrt(self.bb)
        return _finite(max(-1.0, min(1.0, (self.aa + self.bb - self.dd) / 2 / norms))) if norms > 0 else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
