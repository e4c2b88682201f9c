"""Find problems of a set of rank files by their names, sizes and structure; no tensor bytes are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptools.files.opening import tells_others
from ckptools.formats.rank_search.rank_names import parse, unfinished
from ckptools.formats.shared.checkpoint_builder import Fault, RankDifferences
from ckptools.formats.shared.merge import Merge, put
from ckptools.model.cover import cover_problem
from ckptools.model.facts import RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.rank_vote import Vote, same_records, vote
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Absent, leaf_at, tensors_in
from ckptools.rules.files import FileClaims, beyond, missing, twice
from ckptools.text import KeyPath, few, fqn_of, spans
from ckptools.training_state.optimizers import UNNAMED as NUMBERED
from ckptools.training_state.rank_values import RUN_NAMES, Shared, counts_steps, is_own
from ckptools.training_state.sections import Section, find_sections, is_gathered

ODD_SIZE = 0.5
"""A rank file smaller than this fraction of the median is reported; uneven shards alone are never so small."""

UNNAMED = "?"
"""Name of a missing file if the caller named the others one by one."""


def check_files(
    files: Sequence[RankFile],
    faults: Mapping[Path, Fault],
    world: int,
    sharded: bool,
    in_parts: bool = False,
    keys: Collection[Any] = (),
) -> Iterator[Problem]:
    """Yield problems of files that are missing, cut, odd, stray or duplicate.

    If ranks have different parameters (`in_parts`), files may differ in size. A part whose name is one of the top-level
    `keys` of the tree contains nothing else.
    """
    sizes = sorted(f.nbytes for f in files if f.is_here)
    usual = sizes[len(sizes) // 2] if sizes else 0
    here = {f.path for f in files if f.status != "missing"}
    for file in files:
        part = file.part if file.part in keys else None
        if file.status == "missing":
            yield _missing(file, part, here)
        elif file.status in ("cut", "bad"):
            yield faults[file.path].problem(file.path.name, file.rank, part)
        elif file.rank is not None and file.rank >= world and sharded:
            yield from beyond([FileClaims(file.path, file.rank, {"rank": file.rank})], {"rank": world})
        elif not in_parts and not file.part and file.nbytes < usual * ODD_SIZE:
            text = f"{file.path.name} has {file.nbytes} bytes, others {usual}"
            yield Problem(Code.ODD_FILE_SIZE, text, file.rank)
    yield from twice(_claims(file, file.rank) for file in files if file.rank is not None)


def _claims(file: RankFile, rank: int) -> FileClaims:
    """The claims of a rank's file: its name may state another rank than its content."""
    named, part = parse(file.path), {"part": file.part} if file.part else {}
    return FileClaims(file.path, rank, {"rank": named.rank if named else rank, **part}, {"rank": rank})


def _missing(file: RankFile, part: str | None, here: Collection[Path]) -> Problem:
    name, left = file.path.name, unfinished(file.path)
    if name == UNNAMED:
        others = "" if tells_others(file.path) else ", and the server lists no others"
        return missing(f"file of this rank among the named ones{others}", file.rank, part, kind="")
    if file.path in here:
        return missing(f"file holds it; {name} holds another", file.rank, part, kind="")
    more = f"; {few(left)} is here, whose write was not finished" if left else ""
    return missing(name, file.rank, part, more=more)


def compare_ranks(merge: Merge, tree: Any, more: Mapping[KeyPath, Vote[Any]] | None = None) -> RankDifferences:
    """Judge which values may differ between ranks; `more` has votes on further values, by key path."""
    if not more and all(len(ranked) < 2 for ranked in merge.roots.values()):
        return RankDifferences(tree, (), (), {}, {})
    sections = find_sections(tree)
    tree = _join_param_groups(merge, tree, sections)
    shared = Shared(sections)
    differing = {**(more or {}), **merge.differing}
    problems = [p for path, p in merge.disagreeing.items() if shared.holds(path)]
    problems += _check_values(differing, shared)
    apart = [path for path in (*merge.disagreeing, *merge.uneven) if not shared.holds(path)]
    own = [p for p in (*differing, *apart) if not (shared.holds(p) or counts_steps(p) or _of_a_run(p))]
    # A rank without random states counts as well; for other values only ranks that have one count.
    inside = [s for s in sections if is_own(s)]
    own += [p for p in merge.partial if any(s.holds(p) and len(p) > len(s.path) for s in inside)]
    for path in apart:
        tree = put(tree, path, next(iter(merge.values(path).values())))
    per_rank = {s.path: v for s in sections if _is_listed(s, own) and len(v := merge.values(s.path)) > 1}
    rest = (p for p in own if not any(p[: len(s)] == s for s in per_rank))
    per_rank |= {p: v for p in (_saved_whole(p, merge, sections) for p in rest) if len(v := merge.values(p)) > 1}
    return RankDifferences(tree, tuple(problems), tuple(own), per_rank, _unequal(merge, sections, per_rank))


LISTS = ("params", "param_names")
"""Lists in a param group with one entry for each parameter."""


def _join_param_groups(merge: Merge, tree: Any, sections: Sequence[Section]) -> Any:
    """Let each param group list the names of all ranks, in rank order; such lists no longer count as differing.

    State is looked up by name, so the order of names means nothing: FSDP lists them as each rank's optimizer received
    its parameters. A parameter that only one rank owns is only in that rank's list. Source: torch/distributed/fsdp/
    _optim_utils.py, `_optim_state_dict`; torch's test_fsdp_optim_state.py, `use_diff_optim_inputs`.
    """
    for path in [path for path in merge.differing if path[-1:] in [(name,) for name in LISTS]]:
        listed = merge.values(path)
        beside = merge.values((*path[:-1], "params"))  # numbers have the order of their names
        by_name = all(map(_is_of_names, (*listed.values(), *beside.values())))
        optimizer = next((s for s in sections if s.kind == "optimizer" and s.holds(path)), None)
        if by_name and optimizer and all(_knows_no_other(rank, listed, merge, sections, optimizer) for rank in listed):
            tree = put(tree, path, list(dict.fromkeys(name for names in listed.values() for name in names)))
            del merge.differing[path]
    return tree


def _is_of_names(listed: Any) -> bool:
    return isinstance(listed, list) and all(isinstance(name, str) for name in listed)


def _knows_no_other(
    rank: int, listed: Mapping[int, Any], merge: Merge, sections: Sequence[Section], optimizer: Section
) -> bool:
    """Whether a rank's model, or else its optimizer's state, has none of the parameters that only other ranks list."""
    # A parameter without a name is named after its rank, and is in no model.
    named = {name for names in listed.values() for name in names if not name.startswith(NUMBERED)}
    others = named.difference(listed[rank])
    models = [s.path for s in sections if s.kind == "model"] if others else []
    holders = [merge.values(path).get(rank, {}) for path in models or [(*optimizer.path, "state")]]
    return not any(name in holder for holder in holders for name in others)


def _unequal(merge: Merge, sections: Sequence[Section], kept: Collection[KeyPath]) -> dict[KeyPath, dict[int, Any]]:
    """Each rank's value where ranks differ, unless the values are kept for every rank anyway.

    Stages of a pipeline lack most of a model and of its optimizer; that does not count as a difference.
    """
    parted = [s for s in sections if s.kind in ("model", "optimizer")]
    lacking = (path for path in merge.partial if not any(s.holds(path) for s in parted))
    found = (path for path in (*merge.differing, *merge.unlike, *lacking) if not any(path[: len(k)] == k for k in kept))
    return {path: of for path in found if len(of := merge.values_or_absent(path)) > 1}


def _saved_whole(path: KeyPath, merge: Merge, sections: Iterable[Section]) -> KeyPath:
    """The key path of the whole object around a value, if each rank saved it in its own section; else the value's."""
    root = merge.root_of(path) or ()
    return root if any(is_own(s) and root[: len(s.path)] == s.path for s in sections) else path


def _is_listed(section: Section, own: Iterable[KeyPath]) -> bool:
    """Whether a section is kept in full for every rank, unless ranks have gathered it themselves."""
    if not is_own(section) or any(t.sharded for _, t in tensors_in(section.value)):
        return False
    return not is_gathered(section.value) or any(map(section.holds, own))


def _of_a_run(path: KeyPath) -> bool:
    return bool(path) and path[-1] in RUN_NAMES


def _check_values(differing: Mapping[KeyPath, Vote[Any]], shared: Shared) -> Iterator[Problem]:
    """Find plain values that should be equal on all ranks but differ."""
    for path, found in differing.items():
        text = f"differs between ranks ({found.by_rank()})"
        code = Code.MIXED_SAVES
        if counts_steps(path):
            text += "; they are not of one step"
        elif _of_a_run(path):
            text += "; they are not of one run"
        elif shared.holds(path):
            code = Code.COPIES_DIFFER
        else:
            continue
        start = next((i for i in range(len(path) - 1, -1, -1) if isinstance(path[i], str)), 0)
        own = found.differing(fqn_of(path[start:]))
        yield Problem(code, text, None, fqn_of(path), ranks=found.odd, differing=own)


def check_gathered_rng(sections: Sequence[Section], differing: Mapping[KeyPath, Vote[Any]]) -> Iterator[Problem]:
    """Find files whose list of all ranks' RNG states differs from the others': one save lists the same in every file.

    Composer gathers the states while it saves, so they distinguish two runs at the same step. Tensors are compared by
    their stated checksums, so that nothing is read. Source: composer/utils/reproducibility.py.
    """
    for section in sections:
        if section.kind != "rng" or not is_gathered(section.value):
            continue
        votes = [found for path, found in differing.items() if section.holds(path)]
        # Of a thousand ranks' states nearly all agree, and checking that is faster than finding the one that differs.
        tensors = [tensor for _, tensor in tensors_in(section.value) if not same_records(tensor.shards)]
        for tensor in tensors:
            ranked = [(s.rank, s) for s in tensor.shards if s.rank is not None]
            votes.append(vote(ranked, lambda a, b: same_records((a, b))))
        odd = sorted({rank for found in votes for rank in found.odd})
        for rank in odd:
            text = "lists other RNG states of the ranks than the other files do; it is of another run or save"
            yield Problem(Code.MIXED_SAVES, text, rank, section.name)
        if not odd and not all(found.agree for found in votes):
            text = "files list different RNG states of the ranks; they are of several runs or saves"
            yield Problem(Code.MIXED_SAVES, text, None, section.name)


def check_lacking(merge: Merge, tree: Any, sections: Sequence[Section]) -> Iterator[Problem]:
    """Find names that some ranks lack in a model or optimizer although most have them.

    Ranks without an element of a parameter may well have no optimizer state for it.
    """
    trained = [s for s in sections if s.kind in ("model", "optimizer")]
    for path in merge.partial:
        of_all = any(s.path[: len(path)] == path or (s.kind == "model" and s.holds(path)) for s in trained)
        having = merge.values_or_absent(path) if of_all else {}
        lacking = [rank for rank, value in having.items() if isinstance(value, Absent)]
        if lacking and 2 * len(lacking) < len(having):
            gap = any(cover_problem(tensor, "") for _, tensor in tensors_in(leaf_at(tree, path)))
            text = f"rank {spans(lacking)} lacks it; the other {len(having) - len(lacking)} ranks have it"
            odd = tuple(lacking)
            yield Problem(Code.VALUE_LOST, text, lacking[0], fqn_of(path), ranks=odd, replicated=not gap)


OLDER_DTENSOR = "torch.distributed._tensor."
"""Module of DTensor's classes up to torch 2.4."""


def check_cut_order(tree: Any, names: Iterable[str]) -> Iterator[Problem]:
    """Find DTensors of older torch that two mesh dimensions cut along one dimension, in an unstated order.

    FSDP1 over tensor parallel cut in the order of the mesh. FSDP2 of torch 2.3 wrote the same placements, although its
    last mesh dimension had cut first; torch 2.4 refused to save such a model, and 2.5 writes `_StridedShard`.
    Source: pytorch#129206, #129627, #130760; found in files of torch 2.3.1.
    """
    if not any(name.startswith(OLDER_DTENSOR) for name in names):
        return
    doubtful = [fqn_of(path) for path, tensor in tensors_in(tree) if _is_cut_twice(tensor)]
    if doubtful:
        text = (
            f"two mesh dimensions cut one dimension of {few(doubtful, 3)}; rows are read in the order of the mesh, "
            "which FSDP2 of torch 2.3 over tensor parallel did not keep (pytorch#129206)"
        )
        only = doubtful[0] if len(doubtful) == 1 else None
        yield Problem(Code.LAYOUT_INFERRED, text, None, only, severity="warning")


def _is_cut_twice(tensor: Tensor) -> bool:
    cuts = [p for n, p in zip(tensor.mesh or (), tensor.placements or (), strict=False) if n > 1]
    return any(cut.startswith("Shard(") and cuts.count(cut) > 1 for cut in cuts)


def expected_bytes(files: Sequence[RankFile]) -> int | None:
    """Total size of all files, assuming that missing and cut ones have the usual size."""
    good = sorted(f.nbytes for f in files if f.is_here)
    absent = sum(not f.is_here for f in files)
    return sum(good) + absent * good[len(good) // 2] if good else None
