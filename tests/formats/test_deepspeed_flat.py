"""DeepSpeed's flat buffers: each thing that the files say of a layout must say the same."""

from __future__ import annotations

import pytest

from ckptools.formats.deepspeed.zero_stages import Group, Refusal, contradiction, partition_length, shuffled

GROUP = Group(0, 0, {"a": (3,), "b": (5,)}, [0, 0], 2)
SAID = {0: {"a": (0, 3), "b": (3, 1)}, 1: {"b": (0, 4)}}
"""What `param_slice_mappings` of both ranks say of it: (start, elements)."""


def refusal(found: object) -> str:
    assert isinstance(found, Refusal)
    return f"rank {found.rank}: {found.why}"


def test_mappings_that_say_what_the_layout_says_are_no_contradiction():
    assert contradiction(GROUP, 4, SAID) is None


def test_a_mapping_that_lacks_a_parameter_is_refused():
    found = refusal(contradiction(GROUP, 4, {**SAID, 0: {"a": (0, 3)}}))
    assert found.startswith("rank 0:") and "has no element of b, expected 1 elements at 3" in found


def test_a_mapping_with_a_parameter_too_many_is_refused():
    found = refusal(contradiction(GROUP, 4, {**SAID, 1: {"b": (0, 4), "c": (4, 1)}}))
    assert found.startswith("rank 1:") and "has 1 elements at 4 of c, expected no element" in found


@pytest.mark.parametrize(
    ("lengths", "odd"), [({0: 4, 1: 5}, 1), ({0: 5, 1: 4}, 0), ({0: 4, 1: 3}, 1), ({0: 3, 1: 4}, 0)]
)
def test_a_partition_that_is_too_long_or_too_short_is_refused(lengths, odd):
    found = refusal(partition_length(GROUP, lengths, {}))
    assert found.startswith(f"rank {odd}:") and f"{lengths[odd]} elements are stored, expected 4 to 4 of 8" in found


def test_a_partition_may_keep_its_padding_and_no_more():
    group = Group(0, 0, {"a": (5,)}, [0], 2)
    assert [partition_length(group, {0: 4, 1: n}, {}) for n in (1, 4)] == [4, 4]
    assert "rank 1" in refusal(partition_length(group, {0: 4, 1: 5}, {}))


BEFORE = Group(0, 0, {"b": (5,), "a": (3,)}, [0, 0], 2)
"""The same parameters in the order of a round-robin shuffle."""


def test_mappings_from_before_a_shuffle_are_known_as_such():
    assert shuffled(BEFORE, 4, SAID)


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_rank_nothing_tells_the_order_before_a_shuffle(rank):
    assert not shuffled(BEFORE, 4, {r: said for r, said in SAID.items() if r != rank})


def test_padding_between_the_parameters_is_no_shuffle():
    assert not shuffled(Group(0, 0, {"b": (5,), "a": (3,)}, [0, 2], 2), 4, SAID)


def test_mappings_of_other_parameters_are_no_shuffle():
    assert not shuffled(Group(0, 0, {"b": (5,), "c": (3,)}, [0, 0], 2), 4, SAID)


def test_mappings_that_no_order_gives_are_no_shuffle():
    assert not shuffled(BEFORE, 4, {**SAID, 1: {"b": (1, 3)}})
