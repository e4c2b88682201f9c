"""Files that each hold one rank's part of a model, in the forms of frameworks whose parts are not joined here.

Names that say so:

    model-rank-0-part-0.safetensors     vLLM, SGLang (sharded_state)
    model0-mp4.safetensors              DeepSeek's own inference code
    rank0.safetensors                   TensorRT-LLM, with `mapping` in config.json
    model_0.safetensors                 torch's own examples, and others
    tp_00_00.pt, mp_rank_00/model_weights.ckpt, dp_rank_00_tp_rank_01_pp_rank_00.pt    NeMo and its like

A rank alone, as in `ep0-ba5-rank3.pt`, is `rank_names`' matter. Names such as `lora_rank_64` count something else.

Other signs are the content (fairseq's `shard_metadata`, FSDP's `flat_param_0`), and files beside: TensorRT-LLM's
`config.json` with a mapping of several ranks, or a `metadata.pkl` or `metadata.yaml` with words for ranks. Slices look
like whole tensors, so there are no more.
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
from ckptools.files.opening import File, content_of, head_at, head_of, is_remote, read_json, reading
from ckptools.files.safetensors_header import read_header
from ckptools.files.zip_archive import Container
from ckptools.formats.rank_search.rank_names import numbers_in, parse, with_digits
from ckptools.formats.shared.several_checkpoints import several
from ckptools.model.checkpoint import KEY
from ckptools.model.problems import Code, Problem
from ckptools.model.rank_vote import same_records
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.pickles import reader
from ckptools.pickles.reader import Saved
from ckptools.text import few, plural, spans
from ckptools.training_state.optimizers import without_wrappers
from ckptools.training_state.sections import Section, find_sections

DIGITS = re.compile(r"\d+")
OF_ONE_RANK = re.compile(r"(?<![A-Za-z])part[-_]?\d+")
"""A number that counts the files of one rank."""

WRITERS = (
    (r"model-rank-\*-part-\*\.safetensors", "vLLM or SGLang (sharded_state)", "start from the weights it was made of"),
    (r"model\*-mp\*\.safetensors", "DeepSeek's inference code", "start from the Hugging Face weights it was made of"),
    (r"rank\*\.safetensors", "TensorRT-LLM", "start from the weights it was converted from"),
    (r"rank_\*\.safetensors", "Fast-LLM", "export it with `fast-llm convert`"),
    (r".*mp_rank_\*.*", "NeMo or Megatron", "convert it with its own script"),
)
"""Whose files have a name, and what to do instead of joining them."""

SMP = re.compile(r".+_partial")
"""Folder of a partial checkpoint of SageMaker's model parallelism: `model_RANKINFO.pt`, `fp16_states_RANKINFO.pt` …
Source: docs.aws.amazon.com, "Checkpointing a distributed PyTorch model" of smp 1.10."""

BY_RULES = "--rules FILE joins them where you know along which dimensions they were cut"


class PartFiles(NamedTuple):
    """The files that are parts of one model, in the order of their numbers, and their name with `*` for these."""

    files: tuple[Path, ...]
    pattern: str


def not_joined(parts: PartFiles) -> str:
    """One line that says what a file of these is, and that it is unknown how they join."""
    text = f"part of {len(parts.files)} files by their names ({parts.pattern})"
    if len(parts.files) == 1:
        text = f"part of several files by its name ({parts.pattern}), of which this one is here"
    depth = 1 + parts.pattern.count("/")
    names = few(["/".join(path.parts[-depth:]) for path in parts.files])
    return f"{text}: {names}; how they join is not known{_instead(parts)}; {BY_RULES}"


def _instead(parts: PartFiles) -> str:
    """Whose files these look like and what to do; "" for names that many use."""
    if SMP.fullmatch(parts.files[0].parent.name):
        return " (they look like a partial checkpoint of SageMaker's smp: save it with partial=False)"
    named = ((writer, advice) for name, writer, advice in WRITERS if re.fullmatch(name, parts.pattern))
    writer, advice = next(named, ("", ""))
    return f" (they look like those of {writer}: {advice})" if writer else ""


def ranks_of(parts: PartFiles) -> dict[Path, int] | None:
    """The rank of each file: the one number in which their names differ, that of a `part` left out; None for others."""
    folders = "/" in parts.pattern
    words = [OF_ONE_RANK.sub("", path.parent.name if folders else path.stem) for path in parts.files]
    numbers = [tuple(map(int, DIGITS.findall(word))) for word in words]
    if len(set(map(len, numbers))) != 1:
        return None
    varying = [column for column in zip(*numbers, strict=True) if len(set(column)) > 1]
    return dict(zip(parts.files, varying[0], strict=True)) if len(varying) == 1 else None


SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

WORD = r"(?<![A-Za-z])(?:rank|shard|part|mp|tp|pp)[-_]?\d{1,5}(?!\d)(?:_\d{1,5}(?=\.|$))?"
"""A word that counts ranks, with its number, or two as in `tp_00_00`."""

PART = re.compile(rf"{WORD}|(?<![A-Za-z])model\d{{1,4}}-mp\d")
COUNTED = re.compile(r"model_\d+")
"""Names of ranks, of the models of one run (Accelerate), of steps, and of our outputs: see `_counts_ranks`."""

FIRST_MODEL = "model.safetensors"
"""Accelerate's name for the first of several models; the second is `model_1.safetensors`."""

STEPS = 100
"""Numbers that are all multiples of it count steps, not ranks."""

OTHER_RANKS = re.compile(r"lora|adapter", re.IGNORECASE)
"""Words before `rank` that mean the rank of a matrix."""

FOLDER = re.compile(r"(?:(?:^|_)(?:mp|tp|pp|dp|ep|cp)_rank_\d+)+|(?:rank|mp|tp)[-_]?\d+")
"""A folder that holds one rank's part; the file in it has a name that all ranks share."""

SLICE = re.compile(r"(?<![A-Za-z])(?:(?:mp|tp)[-_]?(?:rank)?[-_]?\d|(?:ep|cp)[-_]rank[-_]?\d)")
"""Words that count slices of tensors: a data-parallel rank holds all of them, a stage some of them whole."""

MAX_ENTRIES = 1 << 16
MAX_COMPARED = 8
MAX_BYTES = 1 << 16
"""Files whose headers are compared, and bytes of their tensors."""

FLAT = re.compile(r"_?flat_param(_\d+)?")
SHARDED = "shard_metadata"
"""Key that fairscale's users write beside the shards of FSDP; files with a rank in their names are joined by it."""

CONFIG = "config.json"
BESIDE = ("metadata.pkl", "metadata.yaml", CONFIG)
RANKS = re.compile(rb"world_?size|tensor_?parallel|tp_size|num_ranks|shard|device_?mesh", re.IGNORECASE)
MAX_READ = 1 << 20
MAPPING = ("world_size", "tp_size", "pp_size")
"""Numbers of ranks in the `mapping` of TensorRT-LLM's configuration."""


def parts_with(path: Path) -> PartFiles | None:
    """The parts beside a file, with itself; None where its name is not that of a part."""
    if path.suffix not in SUFFIXES or OTHER_RANKS.search(path.name):
        return None
    if PART.search(path.stem):
        return _found(path.parent, _pattern(path.name), path)
    if COUNTED.fullmatch(path.stem) and path.suffix == ".safetensors":
        found = _found(path.parent, "model_*.safetensors", path)
        return found if _counts_ranks(found.files, path) else None
    folder = path.parent if path.parent.name else path.absolute().parent
    if FOLDER.fullmatch(folder.name):
        return _found(folder.parent, f"{_pattern(folder.name)}/{path.name}", path)
    return None


def is_slice(path: Path) -> bool:
    """Whether a name counts slices of a model, as `tp_rank_00` does; a rank alone may hold all of it."""
    return SLICE.search(path.stem) is not None


def parts_in(folder: Path) -> PartFiles | None:
    """The one model whose parts a folder holds, by their names; None where it holds other files of weights too.

    Raises:
        SeveralError: it holds parts of several.
    """
    families: dict[str, PartFiles] = {}
    for file in _weights_in(folder):
        found = None if parse(file) is not None and not is_slice(file) else parts_with(file)
        if found is None or (found.files[0].parent == folder) is ("/" in found.pattern):
            return None  # also of a folder that is a part itself
        families.setdefault(found.pattern, found)
    return _only(folder, list(families.values()))


def _only(folder: Path, found: Sequence[PartFiles]) -> PartFiles | None:
    if len(found) > 1:
        raise several(folder, [parts.files[0] for parts in found])
    return found[0] if found else None


def _weights_in(folder: Path) -> list[Path]:
    with reading(folder):
        entries = sorted(islice(folder.iterdir(), MAX_ENTRIES))
        ranks = [e for e in entries if e.is_dir() and FOLDER.fullmatch(e.name)]
        files = [e for e in entries if e.suffix in SUFFIXES and e.is_file()]
        return files or [f for rank in ranks for f in sorted(rank.iterdir()) if f.suffix in SUFFIXES and f.is_file()]


def _pattern(name: str) -> str:
    """A name with `*` for the numbers of its ranks; other numbers, such as a step, stay."""
    return re.sub(WORD, lambda m: DIGITS.sub("*", m[0]), re.sub(r"(?<![A-Za-z])model\d+(?=-mp)", "model*", name))


def _found(folder: Path, pattern: str, path: Path) -> PartFiles:
    """The files of a pattern below a folder; for a single remote file only that one, because only it was named."""
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
    """Whether the numbers in `model_0.safetensors` and its like are those of ranks.

    They are, unless each file is proven whole: `consolidate` wrote it, by its own record; the first model of Accelerate
    lies beside it; the numbers are those of steps; or the files are copies of each other.
    """
    numbers = [_numbers(f)[0][-1] for f in files]
    first = path.with_name(FIRST_MODEL)
    if math.gcd(*numbers) >= STEPS or (0 not in numbers and not is_remote(path) and first.is_file()):
        return False
    begun = []
    with suppress(ReadError):
        for one in [path, *(f for f in files if f != path)][:MAX_COMPARED]:
            with File(one) as file:
                header = read_header(file)
                begun.append((*header.tensors, file.read(header.size, min(file.size - header.size, MAX_BYTES))))
                if KEY in header.metadata:
                    return False
    return len(begun) < 2 or len(set(begun)) > 1


def _numbers(path: Path) -> tuple[list[int], str]:
    return [int(n) for n in DIGITS.findall(f"{path.parent.name}/{path.name}")], path.name


def signs_of_a_part(path: Path, tree: Any, beside: bool = True) -> Iterator[Problem]:
    """Yield the first sign that a file is a part: its name, its content without any shard, or a file `beside` it."""
    lora = isinstance(tree, Mapping) and any("lora" in str(key).lower() for key in tree)
    parts = None if lora else parts_with(path)
    why = not_joined(parts) if parts else _by_content(tree) or (_by_what_is_beside(path) if beside else "")
    if why:
        yield Problem(Code.ONE_OF_SEVERAL, why)


def parts_by_content(folder: Path) -> PartFiles | None:
    """The files in a folder that are parts by their own content, numbered from 0; None where it holds others too.

    Raises:
        SeveralError: it holds parts of several models.
    """
    families: dict[str, list[Path]] = {}
    for path in _weights_in(folder):
        numbers = list(DIGITS.finditer(path.stem))
        if not numbers or path.suffix == ".safetensors":
            return None
        last = numbers[-1]
        families.setdefault(f"{path.name[: last.start()]}*{path.name[last.end() :]}", []).append(path)
    found = [PartFiles(tuple(sorted(files, key=_last_number)), pattern) for pattern, files in families.items()]
    return _only(folder, found) if all(map(_are_parts, found)) else None


def _last_number(path: Path) -> int:
    return int(DIGITS.findall(path.stem)[-1])


def _are_parts(parts: PartFiles) -> bool:
    """Whether files are numbered from 0, and the first and the last hold one rank's part by their own content."""
    ends = (parts.files[0], parts.files[-1])
    if len(parts.files) < 2 or list(map(_last_number, parts.files)) != list(range(len(parts.files))):
        return False
    try:
        if not all(path.is_file() and not path.is_symlink() and _has_words_of_parts(path) for path in ends):
            return False
        trees = [reader.read(path).tree for path in ends]
    except ReadError:
        return False
    whole = [t for tree in trees for _, t in tensors_in(tree) if not t.sharded]
    return bool(whole) and all(map(_by_content, trees))


def _has_words_of_parts(path: Path) -> bool:
    """Whether the pickle of a file has a name that `_by_content` looks for; of what is no zip archive it may have."""
    with File(path) as file:
        if content_of(head_of(file)) != "zip":
            return True
        pickle = Container(file).read("data.pkl")
    return any(word.encode() in pickle for word in (SHARDED, "flat_param"))


def _by_content(tree: Any) -> str:
    """Why a file is one rank's by its own content; "" where that says nothing."""
    if isinstance(tree, Mapping) and SHARDED in tree:
        return f"holds one rank's shards by its {SHARDED}; open the files of all ranks (--ranks 'NAME-{{rank}}.pt')"
    for key, _ in tensors_in(tree):
        last = str(key[-1]).rpartition(".")[2] if key else ""
        if FLAT.fullmatch(last):
            return f"holds one rank's part of flattened parameters ({last}), without their shapes and names"
    return ""


def _by_what_is_beside(path: Path) -> str:
    if is_remote(path):  # in a store only files that were named are fetched
        return ""
    for file in (path.with_name(name) for name in BESIDE):
        with suppress(ReadError, OSError):
            if file.is_file() and not file.is_symlink() and (why := _words_of_ranks(file)):
                return why
    return ""


def _words_of_ranks(beside: Path) -> str:
    if beside.name != CONFIG:
        with File(beside) as file:
            found = RANKS.search(file.read(0, min(file.size, MAX_READ)))
        text = f"{beside.name} beside it speaks of several ranks, and what this file holds of them is not known"
        return text if found else ""
    config = read_json(beside)
    mapping = config.get("mapping") if isinstance(config, Mapping) else None
    numbers = (mapping.get(name) for name in MAPPING if isinstance(mapping, Mapping))
    ranks = max((n for n in numbers if type(n) is int), default=1)
    return f"part of {ranks} by the mapping in {CONFIG} beside it; how they join is not known" if ranks > 1 else ""


# -- signs in files with whole tensors that parts of the model lie in other files, or that the tensors are slices ------
# The file of one pipeline stage looks like that of a whole model. Signs of a stage: files name their stage; numbered
# layers are absent; ranks hold parameters of their own and no file states the number of ranks; or some of such files
# hold the same parameters. Only the first proves that something is missing; the others are reasons not to call it
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

SLICES = "slices, which --rules FILE joins, or copies that are not of one save"
MIN_TELLING = 16
"""Fewer elements than this prove nothing, whether their bytes are equal or not."""

MAX_NAMED = 3
"""At most this many ranks with the same parameters are named."""

Ranked = Sequence[tuple[int, Any]]
"""The tree of each rank's file, in rank order."""


def signs_of_more(ranked: Ranked, in_parts: bool, world_stated: bool) -> Iterator[Problem]:
    """Yield signs that other files hold, or may hold, parameters, beside those whose trees are given; none is sharded.

    With `in_parts` ranks hold parameters of their own; `world_stated` if files or names have the number of ranks.
    """
    models: dict[int, list[Mapping[str, Any]]] = {}
    for rank, tree in ranked:  # a rank may have several files
        models.setdefault(rank, []).extend(_models(tree))
    stages = {claim for _, tree in ranked if (claim := _stage(tree)) is not None}
    yield from _missing_stages(stages)
    for where, absent in missing_layers([model for own in models.values() for model in own]).items():
        text = f"{where} has no {absent} here, and later ones; another file may hold what is absent"
        yield Problem(Code.MODEL_PART_MISSING, text, severity="warning")
    if in_parts and not (world_stated or stages):
        text = "ranks hold parameters of their own, and nothing states how many ranks there were"
        yield Problem(Code.MODEL_PART_MISSING, text, severity="warning")
    yield from _copied(models) if in_parts else ()


def _models(tree: Any) -> list[Mapping[str, Any]]:
    return [section.value for section in find_sections(tree) if section.kind == "model"]


def _stage(tree: Any) -> tuple[int, int, str] | None:
    """`(number, count, key)` of the stage that a file names, at its root or in a dict there."""
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
    """Absent numbers before the last of numbered modules, by the path of these: `{"blocks": "0, 1"}`.

    A module without parameters has a number and no tensors. State dicts list it in their `_metadata`; where one does
    not have that, modules count that have modules themselves, as layers do.
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


def other_parts_beside(path: Path, tree: Any, read_file: Callable[[Path], Saved]) -> Iterator[Problem]:
    """Yield files with the next or the previous number in their names, and with parameters that this one lacks.

    Saves of one model at several steps have the same names, and are no parts of each other.
    """
    own = {name for model in _models(tree) for name in model}
    for number in (found for found, counts_steps in numbers_in(path.name) if not counts_steps):
        for other in (n for n in (int(number[0]) - 1, int(number[0]) + 1) if n >= 0):
            beside = with_digits(path, number, str(other).zfill(len(number[0])))
            names = _names_in(beside, read_file)
            lacking = [name for name in names if name not in own]
            if lacking and own.difference(names):
                text = f"{beside.name} beside it holds parameters that it lacks ({few(lacking, 1)})"
                yield Problem(Code.ONE_OF_SEVERAL, f"{text}; name both to open them as one", severity="warning")


def _names_in(path: Path, read_file: Callable[[Path], Saved]) -> list[str]:
    """The names in the models of a file; none where it is no zip archive, the only form that is quick to read."""
    with suppress(ReadError, OSError):
        if path.is_file() and not path.is_symlink() and content_of(head_at(path)) == "zip":
            return [name for model in _models(read_file(path).tree) for name in model]
    return []


def _copied(models: Mapping[int, Sequence[Mapping[str, Any]]]) -> Iterator[Problem]:
    """Ranks with the same parameters, where other parameters are on fewer ranks: a file may be another's copy."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, own in models.items():
        ranks.setdefault(tuple(sorted(name for model in own for name in model)), []).append(rank)
    if len({len(same) for same in ranks.values()}) > 1:
        same = [f"ranks {spans(r)}" for r in ranks.values() if len(r) > 1]
        text = f"{few(same, MAX_NAMED)} hold the same parameters, and others are on fewer ranks; a file may be a copy"
        yield Problem(Code.MODEL_PART_MISSING, text, severity="warning")


def parts_by_rank(path: Path, sections: Sequence[Section]) -> Iterator[Problem]:
    """Yield signs that the plain tensors in the merged sections of rank files are slices, not replicas."""
    parts = parts_with(path) if is_slice(path) else None
    if parts is not None:
        yield Problem(Code.ONE_OF_SEVERAL, not_joined(parts))
        return
    tensors = [t for s in sections if s.kind == "model" for _, t in tensors_in(s.value)]
    other = [t for t in tensors if not same_records(t.shards)]
    if 2 * len(other) > len(tensors) and sum(t.numel for t in other) >= MIN_TELLING:
        ranks = len({s.rank for t in other for s in t.shards})
        text = (
            f"{len(other)} of {plural(len(tensors), 'tensor')} of the model have other bytes on each of {ranks} ranks"
        )
        yield Problem(Code.ONE_OF_SEVERAL, f"{text}: {SLICES}", severity="warning")
