"""The contract of every format, on fixtures that lie in a bucket."""

from __future__ import annotations

import pytest

from tests.formats.test_contract import (
    EVERY,
    test_consolidating_and_reopening_gives_the_same_state,
    test_every_leaf_is_in_exactly_one_section,
    test_every_shard_lies_inside_its_file_and_its_tensor,
    test_no_format_is_passed_over_because_of_its_names,
    test_the_first_format_that_detects_it_reads_it,
    test_the_shards_of_a_tensor_are_in_rank_order,
)
from tests.object_store import Bucketful
from tests.truth import KINDS, Known, one_of_each_form

__all__ = [
    "test_consolidating_and_reopening_gives_the_same_state",
    "test_every_leaf_is_in_exactly_one_section",
    "test_every_shard_lies_inside_its_file_and_its_tensor",
    "test_no_format_is_passed_over_because_of_its_names",
    "test_the_first_format_that_detects_it_reads_it",
    "test_the_shards_of_a_tensor_are_in_rank_order",
]


def _param(known: Known) -> object:
    return pytest.param(known, id=known.name, marks=() if known in KINDS else pytest.mark.slow)


@pytest.fixture(params=[_param(known) for known in EVERY if known in KINDS or known in one_of_each_form(EVERY)])
def known(request: pytest.FixtureRequest, bucket: Bucketful) -> Known:
    """A fixture that was put into a bucket: one of each form (`Known.form`), and of each way of storing."""
    return bucket.holding(request.param)
