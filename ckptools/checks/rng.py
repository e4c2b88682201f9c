"""The check of random number generators: every rank has states of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptools.checks.results import judged, skipped
from ckptools.contents.random_states import ByRank, Owner, random_states
from ckptools.files.opening import OpenFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import tensors_in
from ckptools.model.verification import Check
from ckptools.text import first_few
from ckptools.training_state.sections import sections_of_kind

Prints = Mapping[Owner, str]
"""Fingerprint of a generator's state by rank."""

MAY = "; only ranks that share one copy of the model should"
"""Not every file tells whether they do: in a DCP folder a tensor-parallel matrix looks as one that FSDP cut."""


def distinct_states(ck: Checkpoint) -> Check:
    """Whether every rank has a state of its own for each generator."""
    with OpenFiles() as files:
        states = random_states(ck, files)
    shared = {stream: by_rank for stream, by_rank in states.items() if len(by_rank) > 1}
    unread = list(_unreadable(states))
    if not shared and not unread:
        return skipped("rng", "no RNG state" if not states else "RNG state of one rank")
    prints = {stream: _readable(by_rank) for stream, by_rank in shared.items()}
    counts = ", ".join(f"{stream} {len(set(p.values()))} distinct of {len(p)}" for stream, p in prints.items())
    # Places of one grid share one copy of the model, and may well draw alike.
    ranked = {s: by_rank for s, by_rank in prints.items() if not any(isinstance(owner, str) for owner in by_rank)}
    problems = [*_equal_for_all(ranked), *_equal_for_some(ranked)]
    if problems and _share_a_model(ck):
        return judged("rng", unread, f"{counts}; ranks that share one copy of the model may draw alike")
    return judged("rng", [*unread, *problems], counts)


def _readable(states: ByRank) -> Prints:
    return {rank: content.fingerprint for rank, content in states.items() if not content.problem}


def _unreadable(states: Mapping[str, ByRank]) -> Iterator[Problem]:
    for stream, by_rank in states.items():
        for owner, content in by_rank.items():
            rank = owner if isinstance(owner, int) else None
            if content.problem:
                yield Problem(Code.VALUE_LOST, f"its {stream} state cannot be read: {content.problem}", rank)


def _equal_for_all(states: Mapping[str, Prints]) -> Iterator[Problem]:
    for stream, prints in states.items():
        if len(prints) > 1 and len(set(prints.values())) == 1:
            which = next(iter(prints.values()))
            text = f"all {len(prints)} ranks have the same {stream} state, fingerprint {which}{MAY}"
            yield Problem(Code.RNG_STATES_EQUAL, text)


def _share_a_model(ck: Checkpoint) -> bool:
    """Whether all ranks work on one copy of the model, and so on the same data.

    Stages of a pipeline do, and a mesh of one dimension on which something is repeated: FSDP shards every parameter,
    tensor parallel leaves biases whole.
    """
    model = (t for s in sections_of_kind(ck, "model") for _, t in tensors_in(s.value))
    return ck.in_parts or any(t.placements == ("Replicate()",) and t.mesh == (ck.world_size.value,) for t in model)


def _equal_for_some(states: Mapping[str, Prints]) -> Iterator[Problem]:
    """Ranks that have one state where others have their own.

    Groups of one size, such as the data-parallel copies of each tensor-parallel rank, are meant to be equal.
    """
    streams: dict[tuple[Any, ...], list[str]] = {}
    for stream, prints in states.items():
        groups: dict[str, list[Any]] = {}
        for rank, fingerprint in prints.items():
            groups.setdefault(fingerprint, []).append(rank)
        if len({len(ranks) for ranks in groups.values()}) > 1:
            for fingerprint, members in groups.items():
                if len(members) > 1:
                    streams.setdefault(tuple(members), []).append(f"{stream} state ({fingerprint})")
    for ranks, same in streams.items():
        text = f"ranks {first_few(ranks)} have the same {', '.join(same)}, other ranks have their own"
        why = f"{text}; a file may have been copied, or restored on the wrong rank"
        yield Problem(Code.RNG_STATES_EQUAL, why, ranks=ranks)
