"""Detect that a file is one of several that cannot be joined, by its name, by files beside it, and by its content.

Names of such files:

    model-rank-0-part-0.safetensors     vLLM, SGLang (sharded_state)
    model0-mp4.safetensors              DeepSeek's own inference code
    rank0.safetensors                   TensorRT-LLM, with `mapping` in config.json
    model_0.safetensors                 torch's own examples, and others
    tp_00_00.pt, mp_rank_00/model_weights.ckpt, dp_rank_00_tp_rank_01_pp_rank_00.pt    NeMo and similar
    pytorch_model-00001-of-00004.bin    one of a set, whose others are missing

A rank alone, as in `ep0-ba5-rank3.pt`, is handled by `rank_names`. Names such as `lora_rank_64` count something else.

Files beside it are evidence if they have the next number in their names and parameters that this one lacks, or if they
are other ranks' files with other bytes under the same names. Evidence in the content is fairseq's `shard_metadata`,
FSDP's `flat_param_0`, the number of a stage, absent layers, and TensorRT-LLM's mapping of several ranks. Slices look
like whole tensors, so the user has to supply the rest with `--ranks` and `--rules`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError
from ckptools.files.opening import File, content_of, head_at, is_remote, read_json, reading
from ckptools.files.safetensors_header import read_header
from ckptools.formats.rank_search.rank_names import RankName, numbers_in, parse, with_digits
from ckptools.formats.shared.several_checkpoints import several
from ckptools.model.problems import Code, Problem
from ckptools.model.provenance import KEY
from ckptools.model.rank_vote import same_records
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.option import spelled
from ckptools.pickles.reader import Saved
from ckptools.text import few, plural, spans
from ckptools.training_state.sections import Section, find_sections
from ckptools.training_state.wrappers import without_wrappers

# -- names -------------------------------------------------------------------------------------------------------------

COUNTED = re.compile(
    r"(?<![A-Za-z])(?:model\d{1,4}(?=-mp\d)|(?:rank[-_]?\d{1,9}|(?:shard|part|mp|tp|pp)[-_]?\d{1,5})(?!\d)"
    r"(?:_\d{1,5}(?=\.|$))?)"
)
"""Matches a word that counts ranks, with its number, or two as in `tp_00_00`."""

SLICE = re.compile(r"(?<![A-Za-z])(?:(?:mp|tp)[-_]?(?:rank)?[-_]?\d|(?:ep|cp)[-_]rank[-_]?\d)")
"""Matches words that count slices of tensors: a data-parallel rank has all of them, a stage some of them whole."""

FOLDER = re.compile(r"(?:(?:^|_)(?:mp|tp|pp|dp|ep|cp)_rank_\d+)+|(?:rank|mp|tp)[-_]?\d+")
"""Matches a folder with one rank's part; the file in it has a name that all ranks share."""

NUMBERED = re.compile(r"model_\d+\.safetensors")
"""Matches names of ranks, of the models of one run (Accelerate), of steps, and of ckptools' outputs."""

OF_A_SET = re.compile(r"(?<!\d)(\d+)-of-(?!0*1(?!\d))(\d+)(?!\d)")

OF_ONE_RANK = re.compile(r"(?<![A-Za-z])part[-_]?\d+")
"""Matches a number that counts the files of one rank."""

WRITERS = (
    (r"model-rank-\*-part-\*\.safetensors", "vLLM or SGLang (sharded_state)", "start from the weights it was made of"),
    (r"model\*-mp\*\.safetensors", "DeepSeek's inference code", "start from the Hugging Face weights it was made of"),
    (r"rank\*\.safetensors", "TensorRT-LLM", "start from the weights it was converted from"),
    (r"rank_\*\.safetensors", "Fast-LLM", "export it with `fast-llm convert`"),
    (r".*mp_rank_\*.*", "NeMo or Megatron", "convert it with its own script"),
)
"""The writer of files with such a name, and an alternative to joining them."""

FIRST_MODEL = "model.safetensors"
"""Accelerate's name for the first of several models; the second is `model_1.safetensors`."""

STEPS = 100
"""Numbers that are all multiples of this count steps, not ranks."""

ADAPTER = re.compile(r"lora|adapter", re.IGNORECASE)
DIGITS = re.compile(r"\d+")
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
MAX_ENTRIES = 1 << 16


class PartFiles(NamedTuple):
    """The files that are parts of one model, in the order of their numbers, and their name with `*` for the numbers."""

    files: tuple[Path, ...]
    pattern: str


def parts_with(path: Path) -> PartFiles | None:
    """The parts beside a file, with itself; None if its name is not a part's."""
    if _is_adapter(path):
        return None
    if COUNTED.search(path.stem):
        return _found(path.parent, _pattern(path.name), path)
    if NUMBERED.fullmatch(path.name):
        found = _found(path.parent, "model_*.safetensors", path)
        return found if _counts_ranks(found.files, path) else None
    folder = path.parent if path.parent.name else path.absolute().parent
    if FOLDER.fullmatch(folder.name):
        return _found(folder.parent, f"{_pattern(folder.name)}/{path.name}", path)
    return None


def _is_adapter(path: Path, tree: Any = None) -> bool:
    """Whether a safetensors file is an adapter: `rank` in its name is a matrix rank, and versions lie beside it."""
    of_lora = isinstance(tree, Mapping) and any("lora" in str(key).lower() for key in tree)
    return path.suffix == ".safetensors" and (of_lora or ADAPTER.search(path.name) is not None)


def _pattern(name: str) -> str:
    """A name with `*` for the numbers of its ranks; other numbers, such as a step, stay."""
    return COUNTED.sub(lambda found: DIGITS.sub("*", found[0]), name)


def _found(folder: Path, pattern: str, path: Path) -> PartFiles:
    """The files of a pattern below a folder; for a single remote file only that file, because only it was named."""
    if is_remote(path):
        return PartFiles((path,), pattern)
    expression = re.compile(r"\d+".join(map(re.escape, pattern.split("*"))))
    depth = pattern.count("/")
    with reading(folder):
        entries = (e / path.name if depth else e for e in islice(folder.iterdir(), MAX_ENTRIES))
        names = (e for e in entries if expression.fullmatch("/".join(e.parts[-1 - depth :])))
        files = sorted((e for e in names if e.is_file()), key=_numbers)
    return PartFiles(tuple(files), pattern)


def _counts_ranks(files: Sequence[Path], path: Path) -> bool:
    """Whether `model_0.safetensors` and similar names count ranks.

    They do, unless the first model of Accelerate lies beside them, their numbers are those of steps, or `consolidate`
    wrote this one.
    """
    numbers = [_numbers(file)[0][-1] for file in files]
    follows_the_first = 0 not in numbers and not is_remote(path) and path.with_name(FIRST_MODEL).is_file()
    if follows_the_first or math.gcd(*numbers) >= STEPS:
        return False
    with suppress(ReadError), File(path) as file:
        return KEY not in read_header(file).metadata
    return True


def _numbers(path: Path) -> tuple[list[int], str]:
    return [int(n) for n in DIGITS.findall(f"{path.parent.name}/{path.name}")], path.name


def parts_in(folder: Path) -> PartFiles | None:
    """The only model whose parts are in a folder, by their names; None if it has other files of weights too.

    Raises:
        SeveralError: it contains parts of several models.
    """
    with reading(folder):
        entries = sorted(islice(folder.iterdir(), MAX_ENTRIES))
        ranks = [e for e in entries if e.is_dir() and FOLDER.fullmatch(e.name)]
        files = [e for e in entries if e.suffix in SUFFIXES and e.is_file()]
        files = files or [f for rank in ranks for f in sorted(rank.iterdir()) if f.suffix in SUFFIXES and f.is_file()]
    families: dict[str, PartFiles] = {}
    for file in files:
        found = None if parse(file) is not None and not SLICE.search(file.stem) else parts_with(file)
        if found is None or (found.files[0].parent == folder) is ("/" in found.pattern):
            return None  # also for a folder that is itself a part
        families.setdefault(found.pattern, found)
    if len(families) > 1:
        raise several(folder, [parts.files[0] for parts in families.values()])
    return next(iter(families.values()), None)


def ranks_of(parts: PartFiles) -> dict[Path, int] | None:
    """The rank of each file: the only number in which their names differ, except the number of a `part`; else None."""
    folders = "/" in parts.pattern
    words = [OF_ONE_RANK.sub("", path.parent.name if folders else path.stem) for path in parts.files]
    numbers = [tuple(map(int, DIGITS.findall(word))) for word in words]
    if len(set(map(len, numbers))) != 1:
        return None
    varying = [column for column in zip(*numbers, strict=True) if len(set(column)) > 1]
    return dict(zip(parts.files, varying[0], strict=True)) if len(varying) == 1 else None


def not_joined(parts: PartFiles) -> str:
    """Describe in one line that a file is one of these parts, their likely writer, and that they cannot be joined."""
    text = f"part of {len(parts.files)} files by their names ({parts.pattern})"
    if len(parts.files) == 1:
        text = f"part of several files by its name ({parts.pattern}), of which this one is here"
    depth = 1 + parts.pattern.count("/")
    names = few(["/".join(path.parts[-depth:]) for path in parts.files])
    named = ((writer, advice) for name, writer, advice in WRITERS if re.fullmatch(name, parts.pattern))
    writer, advice = next(named, ("", ""))
    instead = f" (they look like those of {writer}: {advice})" if writer else ""
    by_rules = f"{spelled('rules')} FILE joins them where you know along which dimensions they were cut"
    return f"{text}: {names}; how they join is not known{instead}; {by_rules}"


# -- one file alone ----------------------------------------------------------------------------------------------------

FLAT = re.compile(r"_?flat_param(_\d+)?")
SHARDED = "shard_metadata"
"""Key that fairscale's users write beside the shards of FSDP; files with a rank in their names are joined by it."""

CONFIG = "config.json"
MAPPING = ("world_size", "tp_size", "pp_size")
"""Numbers of ranks in the `mapping` of TensorRT-LLM's configuration."""

Read = Callable[[Path], Saved]


def signs_in_torch_file(saved: Saved, sharded: bool, looks_around: bool, read_file: Read) -> Iterator[Problem]:
    """Yield evidence that a lone torch.save file is one of several; `sharded` if it holds shards.

    Files beside it are read only if `looks_around`.
    """
    named = OF_A_SET.search(saved.path.name)
    world = max((world for _, world in saved.claims), default=1)
    parts = parts_with(saved.path) if sharded else None
    if named:
        text = f"its name says {named[0]}: one file of several, and only this one is read"
        yield Problem(Code.ONE_OF_SEVERAL, text)
    elif world > 1:
        holds = "the shards" if sharded else "a mesh, and perhaps the part,"
        text = f"holds {holds} of one rank of {f'at least {world}' if saved.at_least else world}"
        way = f"name them all, or the folder with {spelled('ranks')} PATTERN"
        yield Problem(Code.ONE_OF_SEVERAL, f"{text}, and nothing proves which files hold the others'; {way}")
    elif parts:
        yield Problem(Code.ONE_OF_SEVERAL, not_joined(parts))
    elif not sharded:
        yield from signs_of_a_slice(saved.path, saved.tree, looks_around)
    if not sharded:
        yield from signs_of_more([(0, saved.tree)], in_parts=False, world_stated=True)
        if looks_around and not saved.form:
            yield from complements_beside(saved.path, saved.tree, read_file)


def signs_of_a_slice(path: Path, tree: Any, looks_around: bool) -> Iterator[Problem]:
    """Yield the first evidence that the whole tensors of a file are slices: in its name, content, or configuration."""
    parts = None if _is_adapter(path, tree) else parts_with(path)
    why = not_joined(parts) if parts else _by_content(tree) or (_by_configuration(path) if looks_around else "")
    if why:
        yield Problem(Code.ONE_OF_SEVERAL, why)


def _by_content(tree: Any) -> str:
    """Why a file is one rank's by its own content; "" without evidence."""
    if isinstance(tree, Mapping) and SHARDED in tree:
        way = f"open the files of all ranks ({spelled('ranks')} 'NAME-{{rank}}.pt')"
        return f"holds one rank's shards by its {SHARDED}; {way}"
    for key, _ in tensors_in(tree):
        last = str(key[-1]).rpartition(".")[2] if key else ""
        if FLAT.fullmatch(last):
            return f"holds one rank's part of flattened parameters ({last}), without their shapes and names"
    return ""


def _by_configuration(path: Path) -> str:
    """Why a file is one rank's by TensorRT-LLM's configuration beside it; in a store only named files are fetched."""
    beside = path.with_name(CONFIG)
    config: Any = None
    with suppress(ReadError, OSError):
        config = read_json(beside) if not is_remote(path) and beside.is_file() and not beside.is_symlink() else None
    mapping = config.get("mapping") if isinstance(config, Mapping) else None
    numbers = (mapping.get(name) for name in MAPPING if isinstance(mapping, Mapping))
    ranks = max((n for n in numbers if type(n) is int), default=1)
    return f"part of {ranks} by the mapping in {CONFIG} beside it; how they join is not known" if ranks > 1 else ""


def complements_beside(path: Path, tree: Any, read_file: Read) -> Iterator[Problem]:
    """Yield files with the next or the previous number in their names, and with parameters that this one lacks.

    Saves of one model at several steps have the same names, and are not parts of each other.
    """
    if _is_adapter(path, tree):
        return
    own = {name for model in _models(tree) for name in model}
    for number in (found for found, counts_steps in numbers_in(path.name) if not counts_steps):
        for other in (n for n in (int(number[0]) - 1, int(number[0]) + 1) if n >= 0):
            beside = with_digits(path, number, str(other).zfill(len(number[0])))
            names = _names_in(beside, read_file)
            lacking = [name for name in names if name not in own]
            if lacking and own.difference(names):
                text = f"{beside.name} beside it holds parameters that it lacks ({few(lacking, 1)})"
                text += "" if path.suffix == ".safetensors" else "; name both to open them as one"
                yield Problem(Code.ONE_OF_SEVERAL, text, severity="warning")


def _names_in(path: Path, read_file: Read) -> list[str]:
    """The names of parameters in a file that is quick to read, a zip archive or safetensors; empty for others."""
    with suppress(ReadError, OSError):
        if path.is_file() and not path.is_symlink():
            if path.suffix == ".safetensors":
                with File(path) as file:
                    return list(read_header(file).tensors)
            if content_of(head_at(path)) == "zip":
                return [name for model in _models(read_file(path).tree) for name in model]
    return []


# -- whole tensors of a file, or of the files of ranks -----------------------------------------------------------------
# The file of one pipeline stage looks like that of a whole model. Evidence of a stage: files name their stage; numbered
# layers are absent; ranks have different parameters and no file states the number of ranks; or some of such files
# have the same parameters. Only the first proves that something is missing; the others are reasons not to call it
# whole.

STAGES = (
    ("pp_rank", "pp_size"),
    ("pp_rank", "pp_world_size"),
    ("pipeline_parallel_rank", "pipeline_parallel_size"),
    ("pipeline_model_parallel_rank", "pipeline_model_parallel_size"),
    ("stage", "num_stages"),
    ("stage_id", "num_stages"),
    ("stage_index", "num_stages"),
)
"""Names for the number of a stage and the number of stages; the last as in `torch.distributed.pipelining`."""

SLICES = "have other bytes on each of"
MIN_EQUAL = 16
"""Fewer equal or different elements than this prove nothing."""

MAX_NAMED = 3
"""At most this many ranks with the same parameters are named."""

Ranked = Sequence[tuple[int, Any]]
"""The tree of each rank's file, in rank order."""


def signs_of_more(ranked: Ranked, in_parts: bool, world_stated: bool) -> Iterator[Problem]:
    """Yield evidence that other files have, or may have, further parameters; the given trees are not sharded.

    With `in_parts` ranks have different parameters; `world_stated` if files or names state the number of ranks.
    """
    models: dict[int, list[Mapping[str, Any]]] = {}
    stages = set[tuple[int, int, str]]()
    for rank, tree in ranked:  # a rank may have several files
        models.setdefault(rank, []).extend(_models(tree))
        stages |= {claim} if (claim := _stage(tree)) else set()
    yield from _missing_stages(stages)
    for where, absent in missing_layers([model for own in models.values() for model in own]).items():
        text = f"{where} has no {absent} here, and later ones; another file may hold what is absent"
        yield Problem(Code.MODEL_PART_MISSING, text, severity="warning")
    if in_parts and not (world_stated or stages):
        text = "ranks hold parameters of their own, and nothing states how many ranks there were"
        yield Problem(Code.MODEL_PART_MISSING, text, severity="warning")
    # Ranks with the same parameters, while other parameters are on fewer ranks: a file may be another's copy.
    same: dict[tuple[str, ...], list[int]] = {}
    for rank, of_rank in models.items() if in_parts else ():
        same.setdefault(tuple(sorted(name for model in of_rank for name in model)), []).append(rank)
    if len(set(map(len, same.values()))) > 1:
        several_ranks = few([f"ranks {spans(ranks)}" for ranks in same.values() if len(ranks) > 1], MAX_NAMED)
        text = f"{several_ranks} hold the same parameters, and others are on fewer ranks; a file may be a copy"
        yield Problem(Code.MODEL_PART_MISSING, text, severity="warning")


def _models(tree: Any) -> list[Mapping[str, Any]]:
    return [section.value for section in find_sections(tree) if section.kind == "model"]


def _stage(tree: Any) -> tuple[int, int, str] | None:
    """`(number, count, key)` of the pipeline stage that a file states, at its root or in a dict there."""
    nodes = [tree, *tree.values()] if isinstance(tree, Mapping) else []
    for node in (n for n in nodes if isinstance(n, Mapping)):
        for number, count in STAGES:
            stage, stages = node.get(number), node.get(count)
            if type(stage) is int and type(stages) is int and 0 <= stage < stages > 1:
                return stage, stages, f"{number} and {count}"
    return None


def _missing_stages(claims: Collection[tuple[int, int, str]]) -> Iterator[Problem]:
    here, counts = {stage for stage, _, _ in claims}, sorted({count for _, count, _ in claims})
    said = next((why for _, _, why in claims), "")
    if len(counts) > 1:
        yield Problem(Code.WORLD_SIZES_DISAGREE, f"files speak of {counts[0]} and of {counts[1]} stages ({said})")
    elif counts and len(here) < counts[0]:
        text = f"holds stage {spans(here)} of {counts[0]} by its own account ({said}); the others are in no file here"
        yield Problem(Code.MODEL_PART_MISSING, text)


def missing_layers(models: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Absent numbers before the last of numbered modules, by the path of the modules: `{"blocks": "0, 1"}`.

    A module without parameters has a number and no tensors. State dicts list it in their `_metadata`; without
    `_metadata`, only modules that contain modules count, as layers do.
    """
    listed = [getattr(model, "_metadata", None) for model in models]
    numbers: dict[str, set[int]] = {}
    for name in (name for model in models for name, value in model.items() if isinstance(value, Tensor)):
        _add_numbers(numbers, name, 1 if all(listed) else 2)
    for name in (name for modules in listed for name in (modules if all(listed) and modules else ())):
        _add_numbers(numbers, str(name), 0)
    gaps = ((where, pairwise((-1, *sorted(found)))) for where, found in numbers.items())
    absent = {where: spans(n for a, b in pairs for n in range(a + 1, b)) for where, pairs in gaps}
    return {where: text for where, text in absent.items() if text}


def _add_numbers(numbers: dict[str, set[int]], name: str, behind: int) -> None:
    """Record the numbers in a name with at least `behind` more parts behind them."""
    parts = without_wrappers(name).split(".")
    for at in range(len(parts) - behind):
        if parts[at].isdecimal() and len(parts[at]) < 6:
            numbers.setdefault(".".join(parts[:at]) or "the model", set()).add(int(parts[at]))


def signs_in_rank_files(
    name: RankName, alone: bool, every: Ranked, sections: Sequence[Section], in_parts: bool, world_stated: bool
) -> Iterator[Problem]:
    """Yield evidence that the whole tensors of rank files are slices, or that other files have more.

    Args:
        name: one of the files.
        alone: whether it is the only file.
        every: the tree of each file, if all were read.
        sections: of the merged trees.
        in_parts: whether ranks have different parameters.
        world_stated: whether files or names state the number of ranks.
    """
    yield from () if in_parts else _slices(name.path, sections)
    yield from signs_of_more(every, in_parts, world_stated) if every else ()
    if every and alone and name.rank > 0 and not world_stated:
        text = f"rank {name.rank}'s file by its name, and no other rank's is here; they may hold more"
        yield Problem(Code.ONE_OF_SEVERAL, text, severity="warning")


def _slices(path: Path, sections: Sequence[Section]) -> Iterator[Problem]:
    parts = parts_with(path) if SLICE.search(path.stem) else None
    tensors = [t for s in sections if s.kind == "model" for _, t in tensors_in(s.value)]
    other = [t for t in tensors if not same_records(t.shards)]
    if parts is not None:
        yield Problem(Code.ONE_OF_SEVERAL, not_joined(parts))
    elif 2 * len(other) > len(tensors) and sum(t.numel for t in other) >= MIN_EQUAL:
        ranks = len({s.rank for t in other for s in t.shards})
        of_all = f"{len(other)} of {plural(len(tensors), 'tensor')}"
        why = f"slices, which {spelled('rules')} FILE joins, or copies that are not of one save"
        text = f"{of_all} of the model {SLICES} {ranks} ranks: {why}"
        yield Problem(Code.ONE_OF_SEVERAL, text, severity="warning")
