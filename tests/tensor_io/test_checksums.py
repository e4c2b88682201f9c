"""CRC-32: the fast one, the one of Python, and our joining of pieces say the same."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptools.tensor_io import checksums
from ckptools.tensor_io.checksums import crc32, crc32_combine, joined

CRC = st.integers(0, 2**32 - 1)


@given(st.binary(max_size=3000), CRC)
def test_a_checksum_is_that_of_zlib_from_any_start(data, start):
    assert crc32(data, start) == zlib.crc32(data, start)


@pytest.mark.parametrize("join", [crc32_combine, joined])
@given(a=st.binary(max_size=3000), b=st.binary(max_size=3000))
def test_checksums_of_pieces_join_to_the_checksum_of_the_whole(join, a, b):
    assert join(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


@given(CRC, CRC, st.integers(1, 1 << 42))
def test_both_ways_of_joining_agree_over_any_length(first, second, length):
    assert joined(first, second, length) == crc32_combine(first, second, length)


WITHOUT = """
import sys, zlib
sys.modules["isal"] = None
from ckptools.tensor_io import checksums
assert checksums.crc32 is zlib.crc32
print(checksums.crc32_combine(zlib.crc32(b"left"), zlib.crc32(b"right"), 5) == zlib.crc32(b"leftright"))
"""


def test_zlib_serves_where_there_is_no_isal():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_the_fast_one_is_used_where_it_is_installed():
    assert (checksums.crc32 is zlib.crc32) == (importlib.util.find_spec("isal") is None)
