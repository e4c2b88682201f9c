"""How a strategy spreads the model, where it has a choice, and which choices go together. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ckptools.errors import UsageError
from ckptools.option import option

SHARDINGS = ("full", "grad-op", "hybrid")
STATE_DICT_TYPES = ("sharded", "local", "full")
PRECISIONS = ("fp32", "bf16")

# The strategies that each choice is one of; a choice that is not here is checked with the world's size.
CHOICES_OF: dict[str, tuple[str, ...]] = {
    "sharding": ("fsdp1",),
    "use_orig_params": ("fsdp1",),
    "state_dict_type": ("fsdp1",),
    "dtensor": ("fsdp1",),
    "precision": ("ddp", "fsdp1", "fsdp2", "hsdp", "fsdp2-tp", "hsdp-tp"),
    "replicas": ("fsdp1", "hsdp", "hsdp-tp"),
}


@dataclass(frozen=True)
class ParallelOptions:
    """Choices of the strategies; each is for some of them only.

    Attributes:
        sharding: FSDP1's FULL_SHARD, SHARD_GRAD_OP or HYBRID_SHARD.
        use_orig_params: FSDP1 shows the optimizer each parameter under its name, not one flat one per unit.
        state_dict_type: FSDP1's SHARDED_STATE_DICT, LOCAL_STATE_DICT or FULL_STATE_DICT.
        dtensor: FSDP1 on a device mesh.
        precision: of the parameters while they compute; what is kept and saved is float32 all the same.
        tensor_parallel: None leaves it to the strategy.
    """

    sharding: str = option("full", "fsdp1: full, grad-op (weights stay whole until backward), hybrid (in replicas).")
    use_orig_params: bool = option(True, "fsdp1: the optimizer sees parameters, not one flat one per unit.")
    state_dict_type: str = option("sharded", "fsdp1: sharded, local (flat pieces), full (rank 0 has all).")
    dtensor: bool = option(False, "fsdp1: DTensor in the files instead of ShardedTensor.")
    precision: str = option("fp32", "fp32, or bf16: computed in bfloat16, kept and saved in float32.")
    tensor_parallel: int | None = option(None, "Ranks that cut each matrix. [default: all with tp, 2 over fsdp2]")
    replicas: int = option(2, "Copies of the shards, with hsdp, hsdp-tp and --sharding hybrid.")
    microbatches: int = option(4, "Parts of a batch that are under way at once, with pipeline.")

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that cut each matrix where the others of the world shard or repeat it."""
        return self.tensor_parallel or 2


def check(parallel: ParallelOptions, strategy: str) -> None:
    """Refuse a word that is not known, and choices that torch or the strategy does not have.

    Raises:
        UsageError: there is one.
    """
    _check_word("sharding", parallel.sharding, SHARDINGS)
    _check_word("state-dict-type", parallel.state_dict_type, STATE_DICT_TYPES)
    _check_word("precision", parallel.precision, PRECISIONS)
    _check_strategy(parallel, strategy)
    if parallel.state_dict_type == "local":
        _check_local(parallel)
    if strategy == "fsdp1" and parallel.sharding != "hybrid" and parallel.replicas != ParallelOptions.replicas:
        raise UsageError(None, f"--replicas goes with --sharding hybrid, not {parallel.sharding}")


def _check_word(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(None, f"--{name} {value} is not known; choose from {', '.join(known)}")


def _check_strategy(parallel: ParallelOptions, strategy: str) -> None:
    defaults = {field.name: field.default for field in fields(parallel)}
    for name, strategies in CHOICES_OF.items():
        value = getattr(parallel, name)
        if value != defaults[name] and strategy not in strategies:
            flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
            raise UsageError(None, f"{flag} goes with --strategy {', '.join(strategies)}, not {strategy}")


def _check_local(parallel: ParallelOptions) -> None:
    """Both are torch's own limits, which it tells some ranks only, while the others wait for them."""
    if parallel.dtensor:
        raise UsageError(None, "--state-dict-type local does not go with --dtensor: flat pieces are no DTensors")
    if parallel.sharding == "hybrid":
        raise UsageError(
            None,
            "--state-dict-type local does not go with --sharding hybrid: torch writes it for one group of all ranks; "
            "choose --state-dict-type sharded or full",
        )
