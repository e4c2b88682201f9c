"""Elements as numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptools.tensor_io.numbers import RUN, sum_of_squares


@given(st.integers(0, 3 * RUN + 1), st.integers(0, 2**32))
def test_the_sum_of_squares_is_that_of_every_element(length, seed):
    values = np.random.default_rng(seed).standard_normal(length)
    assert sum_of_squares(values) == pytest.approx(math.fsum(v * v for v in values.tolist()), rel=1e-13)
