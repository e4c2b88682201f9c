"""Wrappers: modules that hold one other module, and whose names stand in the names of its parameters.

A name with a wrapper in it loads only where the same wrapper is. The words in `WRAPPERS` are the only ones that count,
and each counts only where it is proven. A word of torch's own, with an underscore in front, is a wrapper's wherever it
stands: torch takes these words out itself. `module` is a name that others use too: it is a wrapper's only if every name
of a model begins with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from ckptools.text import few, plural


class Wrapper(NamedTuple):
    """The name of a wrapped module in the names of parameters, and the wrapper that puts it there."""

    word: str
    by: str


PRIVATE = (
    Wrapper("_orig_mod", "torch.compile"),
    Wrapper("_checkpoint_wrapped_module", "activation checkpointing"),
    Wrapper("_fsdp_wrapped_module", "FSDP1"),
    Wrapper("_fpw_module", "FSDP1 of torch 1.11, or FairScale"),
)
"""The words that are wrappers' wherever they stand.

Sources, in torch: `_dynamo/eval_frame.py`, `OptimizedModule`; `distributed/fsdp/_common_utils.py`,
`FSDP_WRAPPED_MODULE`; `distributed/algorithms/_checkpoint/checkpoint_wrapper.py`; and `_get_fqns` in
`distributed/checkpoint/state_dict.py`, which takes them out of every name. In FairScale:
`nn/data_parallel/fully_sharded_data_parallel.py`.
"""

LEADING = Wrapper("module", "a wrapper such as DDP")
"""The word that is a wrapper's only at the beginning of all names.

Sources: `DistributedDataParallel` in torch/nn/parallel/distributed.py, `DataParallel` in data_parallel.py there.
"""

WRAPPERS = (*PRIVATE, LEADING)

DDP = f"{LEADING.word}."

_PRIVATE_WORDS = frozenset(wrapper.word for wrapper in PRIVATE)


def without_wrappers(name: str) -> str:
    """Remove wrapper modules from a name; DDP's `module` stays."""
    return ".".join(part for part in name.split(".") if part not in _PRIVATE_WORDS)


def without_ddp(name: str) -> str:
    """Remove wrapper modules from a name, including DDP's leading `module`."""
    return without_wrappers(name).removeprefix(DDP)


def ddp_prefix(names: Collection[str]) -> str:
    """`module.` if every name of a model begins with it behind its wrappers, as in DDP's state dict; else empty."""
    return DDP if names and all(without_wrappers(name).startswith(DDP) for name in names) else ""


def bare_name(name: str, leading: str) -> str:
    """The name without wrappers; `leading` is the `ddp_prefix` of the names of its model."""
    return without_wrappers(name).removeprefix(leading) or name


def wrapper_words(names: Collection[str]) -> Iterator[str]:
    """Say which wrappers stand in the names of a model, and what put them there: one text for each place."""
    left = list(names)
    leading = list[Wrapper]()
    while left and (first := _first_of_all(left, leading)):
        leading.append(first)
        left = [name.partition(".")[2] for name in left]
    if leading:
        prefix = "".join(f"{wrapper.word}." for wrapper in leading)
        yield f"all names begin with {prefix}: {few([wrapper.by for wrapper in leading], len(leading))}"
    for wrapper in PRIVATE:
        held = sum(wrapper.word in name.split(".") for name in left)
        if held:
            yield f"{held} of {plural(len(left), 'name')} contain {wrapper.word}: {wrapper.by}"


def _first_of_all(names: Collection[str], before: Collection[Wrapper]) -> Wrapper | None:
    """The wrapper with which every name begins; `module` at most once."""
    return next(
        (
            wrapper
            for wrapper in WRAPPERS
            if all(name.startswith(f"{wrapper.word}.") for name in names)
            and not (wrapper is LEADING and wrapper in before)
        ),
        None,
    )
