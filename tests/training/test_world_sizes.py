"""Which numbers of ranks a strategy takes: what does not divide is refused in one line, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptools.errors import UsageError
from ckptools.training.options import CreateOptions, ModelSize, ParallelOptions, check_world_size


@pytest.mark.parametrize(
    ("strategy", "world_size", "parallel", "says"),
    [
        ("fsdp2-tp", 3, {}, "--world-size 3 does not divide by --tensor-parallel 2; try --world-size 4"),
        ("hsdp-tp", 6, {}, "does not divide by --tensor-parallel 2 times --replicas 2; try --world-size 8"),
        ("tp", 4, {"tensor_parallel": 2}, "--strategy tp cuts over all 4 ranks"),
    ],
)
def test_a_world_that_does_not_divide_is_refused(
    strategy: str, world_size: int, parallel: dict[str, int], says: str
) -> None:
    options = CreateOptions(Path("run"), strategy, world_size, parallel=ParallelOptions(**parallel))
    with pytest.raises(UsageError, match=says):
        check_world_size(options, world_size)


@pytest.mark.parametrize(
    ("world_size", "vocab", "parallel", "says"),
    [
        (6, 31, {}, "--vocab 31: torch's DTensor does not describe 31 rows that 2 ranks cut and 3 ranks cut again"),
        (8, 257, {}, "--vocab 257: torch's DTensor does not describe 257 rows that 2 ranks cut and 4 ranks cut again"),
        (12, 256, {"tensor_parallel": 4}, "--width 65: torch's DTensor does not describe 195 rows that 4 ranks cut"),
    ],
)
def test_rows_that_torch_would_describe_wrongly_are_refused(
    world_size: int, vocab: int, parallel: dict[str, int], says: str
) -> None:
    options = CreateOptions(
        Path("run"), "fsdp2-tp", world_size, parallel=ParallelOptions(**parallel), size=ModelSize(vocab=vocab)
    )
    with pytest.raises(UsageError, match=says):
        check_world_size(options, world_size)


@pytest.mark.parametrize(("strategy", "world_size"), [("fsdp2-tp", 4), ("fsdp2-tp", 6), ("hsdp-tp", 8)])
def test_uneven_rows_that_torch_describes_are_taken(strategy: str, world_size: int) -> None:
    check_world_size(CreateOptions(Path("run"), strategy, world_size), world_size)


@pytest.mark.parametrize(
    ("world_size", "parallel", "says"),
    [
        (5, {}, "--strategy pipeline has 5 stages for 3 blocks; try --layers 4 or more"),
        (3, {"microbatches": 3}, "--batch 8 does not divide into --microbatches 3"),
        (3, {"microbatches": 0}, "--batch 8 does not divide into --microbatches 0"),
    ],
)
def test_a_pipeline_that_cannot_be_cut_is_refused(world_size: int, parallel: dict[str, int], says: str) -> None:
    options = CreateOptions(Path("run"), "pipeline", world_size, parallel=ParallelOptions(**parallel))
    with pytest.raises(UsageError, match=says):
        check_world_size(options, world_size)


@pytest.mark.parametrize(
    ("strategy", "world_size", "experts", "says"),
    [
        ("moe", 3, 4, "--experts 4 does not divide by 3 ranks; try --experts 6"),
        ("fsdp2-tp", 2, 4, "--strategy fsdp2-tp cuts perceptrons, not --experts"),
    ],
)
def test_experts_that_cannot_be_shared_out_are_refused(strategy: str, world_size: int, experts: int, says: str) -> None:
    options = CreateOptions(Path("run"), strategy, world_size, size=ModelSize(experts=experts))
    with pytest.raises(UsageError, match=says):
        check_world_size(options, world_size)


@pytest.mark.parametrize(("strategy", "ranks"), [("tp", 8), ("fsdp2-tp", 16)])
def test_a_matrix_of_fewer_rows_than_ranks_is_not_cut(strategy: str, ranks: int) -> None:
    parallel = ParallelOptions(tensor_parallel=8)
    for size, says in ((ModelSize(width=7), "--width 7 cannot be cut over 8 ranks"), (ModelSize(vocab=7), "--vocab 7")):
        options = CreateOptions(Path("run"), strategy, ranks, size=size, parallel=parallel)
        with pytest.raises(UsageError, match=says):
            check_world_size(options, ranks)


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("fsdp2-tp", 2), ("hsdp-tp", 8), ("tp", 5), ("pipeline", 4), ("pipeline", 1), ("moe", 2), ("ddp", 7)],
)
def test_what_divides_is_taken(strategy: str, world_size: int) -> None:
    check_world_size(CreateOptions(Path("run"), strategy).completed(), world_size)
