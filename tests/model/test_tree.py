from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from ckptools.model.tree import MANY, of_kinds

VALUES = st.sampled_from([1, True, "a", None, (1, 2), [3], {}, OrderedDict(a=1)])


@given(st.lists(st.integers(), min_size=MANY, max_size=MANY + 2), st.lists(VALUES), st.permutations(range(4)))
def test_values_of_some_classes_and_their_subclasses_are_found_in_order_among_many(ints, others, order):
    kinds = tuple((dict, list, tuple, bool)[i] for i in order[:2])
    for values in (others, ints, [*ints, *others, *ints]):
        assert of_kinds(values, kinds) == [value for value in values if isinstance(value, kinds)]
