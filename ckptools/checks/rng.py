"""The check of random number generators: every rank has states of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptools.checks.results import judged, skipped
from ckptools.contents.random_states import random_states
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import tensors_in
from ckptools.model.verification import Check
from ckptools.text import first_few
from ckptools.training_state.sections import sections_of_kind

MAY = "; only ranks that share one copy of the model should"
"""Not every file tells whether they do: in a DCP folder a tensor-parallel matrix looks as one that FSDP cut."""


def distinct_states(ck: Checkpoint) -> Check:
    """Whether every rank has a state of its own for each generator."""
    states = random_states(ck)
    shared = {s: d for s, d in states.items() if len(d) > 1}
    if not shared:
        return skipped("rng", "no RNG state" if not states else "RNG state of one rank")
    counts = ", ".join(f"{stream} {len(set(d.values()))} distinct of {len(d)}" for stream, d in shared.items())
    problems = [
        Problem(Code.RNG_STATES_EQUAL, f"all {len(d)} ranks have the same {stream} state{MAY}")
        for stream, d in shared.items()
        if len(set(d.values())) == 1
    ]
    problems += _equal_for_some(shared)
    if problems and _share_a_model(ck):
        return judged("rng", [], f"{counts}; ranks that share one copy of the model may draw alike")
    return judged("rng", problems, counts)


def _share_a_model(ck: Checkpoint) -> bool:
    """Whether all ranks work on one copy of the model, and so on the same data.

    Stages of a pipeline do, and a mesh of one dimension on which something is repeated: FSDP shards every parameter,
    tensor parallel leaves biases whole.
    """
    model = (t for s in sections_of_kind(ck, "model") for _, t in tensors_in(s.value))
    return ck.in_parts or any(t.placements == ("Replicate()",) and t.mesh == (ck.world_size.value,) for t in model)


def _equal_for_some(states: Mapping[str, Mapping[Any, int]]) -> Iterator[Problem]:
    """Ranks that have one state where others have their own.

    Groups of one size, such as the data-parallel copies of each tensor-parallel rank, are meant to be equal.
    """
    streams: dict[tuple[Any, ...], list[str]] = {}
    for stream, digests in states.items():
        groups: dict[int, list[Any]] = {}
        for rank, digest in digests.items():
            groups.setdefault(digest, []).append(rank)
        if len({len(ranks) for ranks in groups.values()}) > 1:
            for members in (m for m in groups.values() if len(m) > 1):
                streams.setdefault(tuple(members), []).append(stream)
    for ranks, same in streams.items():
        text = f"ranks {first_few(ranks)} have the same {', '.join(same)} state, other ranks have their own"
        yield Problem(Code.RNG_STATES_EQUAL, f"{text}; a file may have been copied, or restored on the wrong rank")
