"""Whatever tree a file unfolds to, every view has words for it."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptools.api.notebook import checkpoint_html
from ckptools.display.screen import Screen
from ckptools.inspect.record import inspect_report, report_text
from ckptools.inspect.sections import report_json, section_details, section_text
from ckptools.model.tree import NumpyArray, NumpyScalar, Opaque
from tests.display.made import HOSTILE, checkpoint, plain, sharded

GROUPED = ("state", "param_groups", "params", "lr", "step", "model")
SCHEDULED = ("last_epoch", "_last_lr", "base_lrs", "rng", "torch_version")
KEYS = st.sampled_from([*GROUPED, *SCHEDULED, 0, 1, True, None, 2.5, "1", (1, 2), *HOSTILE])
NUMBERS = (None, True, -3, 2**70, 10**3000, 1.5, float("nan"), float("inf"), 1j)
EMPTY: tuple[Any, ...] = ({}, [], (), {1}, b"\0", "x", timedelta(3))
DESCRIBED = (
    plain(3, 4),
    sharded(7, 2),
    Opaque("os.system"),
    NumpyScalar("<f8", b"\0"),
    NumpyArray("|O", (2,), False, b""),
)
LEAVES = st.sampled_from([*NUMBERS, *EMPTY, *DESCRIBED, *HOSTILE])
TREES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)
OPTIMIZERS = st.fixed_dictionaries({"state": st.dictionaries(KEYS, TREES, max_size=3), "param_groups": st.lists(TREES)})
SCHEDULERS = st.fixed_dictionaries({"last_epoch": TREES, "_last_lr": TREES})


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.fixed_dictionaries({"a": TREES, "optim": OPTIMIZERS, "scheduler": SCHEDULERS, "rng": TREES}))
def test_every_view_has_words_for_it(tree):
    ck = checkpoint(tree)
    report = inspect_report(ck)
    details = [d for kind in {s.kind for s in ck.sections} for d in section_details(ck, kind)]
    for screen in (Screen(), Screen(60, 5)):
        assert all(line.isprintable() for line in report_text(report, screen).split("\n"))
        assert all(line.isprintable() for line in section_text(report, details, screen).split("\n"))
    assert json.loads(report_json(report, details))["schema"]
    assert checkpoint_html(ck) and repr(ck).isprintable()
