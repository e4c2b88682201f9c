"""CRC-32 of bytes, and of joined bytes from the CRC-32s of the pieces, as zip and zlib have it.

`isal` takes it several times as fast as `zlib` and lets other threads run meanwhile. Where it is not to be had,
`zlib` serves, and `joined` does what Python's `zlib` lacks.
"""

from __future__ import annotations

from functools import lru_cache

try:
    from isal.isal_zlib import crc32
    from isal.isal_zlib import crc32_combine as combine
except ImportError:  # no wheel for this platform
    from zlib import crc32

    def combine(crc1: int, crc2: int, crc2_length: int, /) -> int:
        """CRC-32 of A + B, from those of A and B and the length of B."""
        return joined(crc1, crc2, crc2_length)


__all__ = ["combine", "crc32", "joined"]

POLYNOMIAL = 0xEDB88320
"""That of zip, its highest power in the lowest bit."""

ONE = 1 << 31
"""The polynomial 1, its bits in the same order."""


def joined(first: int, second: int, length: int) -> int:
    """CRC-32 of A + B, where `first` is that of A, `second` that of B, and B has `length` bytes.

    `length` zero bytes behind A multiply its CRC, a polynomial over GF(2), by x to the power of 8 * `length`.
    """
    return _product(first, _zeros(length)) ^ second if length else first


def _product(a: int, b: int) -> int:
    """Product of two polynomials, modulo that of the CRC."""
    total, bit = 0, ONE
    while bit:
        if a & bit:
            total ^= b
        b = b >> 1 ^ POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return total


@lru_cache(maxsize=1024)
def _zeros(length: int) -> int:
    """The polynomial x to the power of 8 * `length`."""
    result, power = ONE, ONE >> 8
    while length:
        if length & 1:
            result = _product(result, power)
        power = _product(power, power)
        length >>= 1
    return result
