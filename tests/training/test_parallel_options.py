"""Which choices within a strategy go together, and what is said of those that do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ckptools.errors import UsageError
from ckptools.training.options import CreateOptions, ParallelOptions, check_options, check_world_size

REFUSED = [
    ("fsdp2", 4, {"sharding": "hybrid"}, "--sharding goes with --strategy fsdp1, not fsdp2; add --strategy fsdp1"),
    ("ddp", 4, {"use_orig_params": False}, "--no-use-orig-params goes with --strategy fsdp1, not ddp"),
    (
        "tp",
        4,
        {"precision": "bf16"},
        "--precision goes with --strategy ddp, fsdp1, fsdp2, hsdp, fsdp2-tp, hsdp-tp, not tp",
    ),
    ("fsdp1", 4, {"sharding": "none"}, "--sharding none is not known; choose from full, grad-op, hybrid"),
    ("fsdp1", 4, {"precision": "fp16"}, "--precision fp16 is not known; choose from fp32, bf16"),
    ("fsdp1", 4, {"state_dict_type": "flat"}, "--state-dict-type flat is not known"),
    ("fsdp1", 4, {"state_dict_type": "local", "dtensor": True}, "does not go with --dtensor"),
    ("fsdp1", 4, {"state_dict_type": "local", "sharding": "hybrid"}, "choose --state-dict-type sharded or full"),
    ("hsdp", 3, {}, "--world-size 3 does not divide by --replicas 2; try --world-size 4"),
    ("fsdp1", 4, {"sharding": "hybrid", "replicas": 3}, "does not divide by --replicas 3; try --world-size 6"),
    ("ddp", 4, {"replicas": 4}, "--replicas goes with --strategy fsdp1, hsdp, hsdp-tp, not ddp; add --strategy hsdp"),
    ("fsdp1", 4, {"replicas": 4}, "--replicas goes with --sharding hybrid, not full; add --sharding hybrid"),
    ("hsdp", 4, {"replicas": 0}, "--replicas 0: must be at least 1"),
    (
        "ddp",
        4,
        {"tensor_parallel": 2},
        "--tensor-parallel goes with --strategy tp, fsdp2-tp, hsdp-tp, not ddp; add --strategy fsdp2-tp",
    ),
    ("fsdp2-tp", 4, {"tensor_parallel": 0}, "--tensor-parallel 0: must be at least 1"),
    ("fsdp1", 2, {"sharding": "hybrid"}, "FSDP1 then averages no gradients; try --world-size 4, or --strategy hsdp"),
]


@pytest.mark.parametrize(("strategy", "world_size", "parallel", "says"), REFUSED)
def test_what_torch_or_the_strategy_does_not_have_is_refused(
    strategy: str, world_size: int, parallel: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        wanted = CreateOptions(Path("run"), strategy, world_size, parallel=ParallelOptions(**parallel))
        check_options(wanted)
        check_world_size(wanted, world_size)


@pytest.mark.parametrize(
    ("strategy", "parallel"),
    [
        ("fsdp1", {"sharding": "hybrid", "state_dict_type": "full", "use_orig_params": False, "precision": "bf16"}),
        ("fsdp1", {"sharding": "grad-op", "state_dict_type": "local", "use_orig_params": False}),
        ("fsdp1", {"sharding": "hybrid", "dtensor": True, "replicas": 1}),
        ("hsdp", {"replicas": 4, "precision": "bf16"}),
    ],
)
def test_what_goes_together_is_taken(strategy: str, parallel: dict[str, Any]) -> None:
    wanted = CreateOptions(Path("run"), strategy, 4, parallel=ParallelOptions(**parallel))
    check_options(wanted)
    check_world_size(wanted, 4)


def test_a_layout_that_takes_sharded_state_only_says_so() -> None:
    wanted = CreateOptions(Path("run"), layout="dcp", parallel=ParallelOptions(state_dict_type="local"))
    with pytest.raises(UsageError, match="--state-dict-type goes with --layout composer, accelerate, not dcp"):
        check_options(wanted)
