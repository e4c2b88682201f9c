"""CRC-32 of joined bytes from the CRC-32s of the pieces.

The CRC register after n more zero bytes is a linear function of the register before, over GF(2); a 32 x 32 bit
matrix, and squaring it doubles n. Polynomial 0xEDB88320 (zip, zlib).
"""

from __future__ import annotations

from functools import lru_cache

POLYNOMIAL = 0xEDB88320
Matrix = tuple[int, ...]


def combine(first: int, second: int, length: int) -> int:
    """CRC-32 of A + B, where `first` is that of A, `second` that of B, and B has `length` bytes."""
    if length <= 0:
        return first
    if first == 0:
        return second
    return _times(_zeros(length), first) ^ second


def _times(matrix: Matrix, vector: int) -> int:
    total, row = 0, 0
    while vector:
        if vector & 1:
            total ^= matrix[row]
        vector >>= 1
        row += 1
    return total


@lru_cache(maxsize=1024)
def _zeros(length: int) -> Matrix:
    """The effect of `length` zero bytes."""
    result: Matrix = tuple(1 << i for i in range(32))
    power = 0
    while length:
        if length & 1:
            result = _product(_power(power), result)
        length >>= 1
        power += 1
    return result


@lru_cache(maxsize=64)
def _power(exponent: int) -> Matrix:
    """The effect of 2**exponent zero bytes."""
    if exponent:
        half = _power(exponent - 1)
        return _product(half, half)
    one_bit: Matrix = (POLYNOMIAL, *(1 << i for i in range(31)))
    for _ in range(3):  # 1, 2, 4, 8 bits
        one_bit = _product(one_bit, one_bit)
    return one_bit


def _product(a: Matrix, b: Matrix) -> Matrix:
    return tuple(_times(a, column) for column in b)
