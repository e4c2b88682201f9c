"""Files of digests: the keys of one side without its values, to compare checkpoints of two separate places.

A tensor has the SHA-256 of its values in row-major, little-endian order, whatever its layout; a plain value has a
digest and a short text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ckptools.cluster.team import current
from ckptools.diff.plain_values import NUMBERED, form_of
from ckptools.diff.record import DIFFERENT, NOT_FINITE, SUBJECTS, Side, TensorDifference, Verdict
from ckptools.diff.sides import (
    ContainerForm,
    Contents,
    Identity,
    SideContainer,
    SideGroup,
    SideTensor,
    SideValue,
    contents_of,
)
from ckptools.diff.tensor_values import OWN_COPIES, Measured, Reading, compare_tensors, copies_differ, read_for_digest
from ckptools.display.record_json import to_json
from ckptools.dtypes import ITEMSIZE, short
from ckptools.errors import CkptoolsError, ReadError
from ckptools.files.opening import File, OpenFiles, read_json
from ckptools.files.partial_files import check_place_of_file, write_text
from ckptools.keys.value_digests import Content, once
from ckptools.model.checkpoint import Checkpoint
from ckptools.tensor_io.fetch_ahead import Part, Progress, in_ranks, no_progress, thread_count
from ckptools.tensor_io.stream import tensor_digest
from ckptools.text import plural, shape

# -- comparison of tensors: names, shapes, dtypes, and if they are asked for values, or SHA-256 of a side without them


def structure_row(a: SideTensor | None, b: SideTensor | None) -> TensorDifference:
    """Compare a tensor of both sides without its values."""
    tensor = a or b
    assert tensor is not None
    row = TensorDifference(
        tensor.name, tensor.subject, "not compared", "", b.name if b else None,
        a.shape if a else None, b.shape if b else None, a.dtype if a else None, b.dtype if b else None,
        a.layout if a else None, b.layout if b else None,
    )  # fmt: skip
    if a is None or b is None:
        return row._replace(verdict="only in A" if b is None else "only in B")
    verdict, detail = _structure(a, b)
    return row._replace(verdict=verdict, detail=detail)


def _structure(a: SideTensor, b: SideTensor) -> tuple[Verdict, str]:
    if a.shape != b.shape:
        return "differs", f"shape {shape(a.shape)} → {shape(b.shape)}"
    problems = [f"{side}: {tensor.problem}" for side, tensor in (("A", a), ("B", b)) if tensor.problem]
    if problems:
        return "cannot be compared", "; ".join(problems)
    if a.dtype != b.dtype:
        return "differs", "; ".join([f"{short(a.dtype)} → {short(b.dtype)}", *_codes(a, b)])
    if a.traits != b.traits:
        return "differs", traits_words(a, b)
    return ("cannot be compared", NUMBERED) if a.number or b.number else ("not compared", "")


def _codes(a: SideTensor, b: SideTensor) -> list[str]:
    """What is said of codes of quantized weights, which are no values: `A: codes of fp8, block scales 16 x 16`."""
    # A tensor that users hold has no truth value, so that `if one.tensor` raises.
    tensors = [(side, one.tensor) for side, one in (("A", a), ("B", b)) if one.tensor is not None]
    return [f"{side}: {t.coded.words}" for side, t in tensors if t.are_codes and t.coded is not None]


def traits_words(a: SideTensor, b: SideTensor) -> str:
    """How two tensors differ beside their values: `Parameter, requires_grad → plain`."""
    return f"{a.traits or 'plain'} → {b.traits or 'plain'}"


def value_rows(
    pairs: Sequence[tuple[SideTensor | None, SideTensor | None]], how: Reading
) -> tuple[list[TensorDifference], int, int]:
    """A row for each pair, values compared if both sides have them; then the bytes read and the bytes not read."""
    rows = [structure_row(a, b) for a, b in pairs]
    both = {n: (a, b) for n, (a, b) in enumerate(pairs) if a and b and a.shape == b.shape}
    both = {n: (a, b) for n, (a, b) in both.items() if not (a.problem or b.problem)}
    both = {n: (a, b) for n, (a, b) in both.items() if a.dtype == b.dtype or not _codes(a, b)}
    direct = {
        n: (a.name, a.tensor, b.tensor) for n, (a, b) in both.items() if a.tensor is not None and b.tensor is not None
    }
    measured = dict(zip(direct, compare_tensors(direct.values(), how), strict=True))
    hashed = [one for n, pair in both.items() if n not in direct for one in pair]
    digests = iter(digests_of(hashed, how))
    for n, (a, b) in both.items():
        row = with_measures(rows[n], measured[n], how) if n in measured else _by_digest(rows[n], *islice(digests, 2))
        rows[n] = _sure(row, a, b)
    read = sum(found.nbytes for found in measured.values()) + sum(map(_nbytes, hashed))
    return rows, read, sum(found.nbytes_skipped for found in measured.values())


def _sure(row: TensorDifference, a: SideTensor, b: SideTensor) -> TensorDifference:
    """Doubt a row where only a number matches, and mention an assumed name."""
    if a.traits != b.traits:
        words = traits_words(a, b)
        detail = row.detail if words in row.detail else "; ".join(filter(None, (row.detail, words)))
        row = row._replace(verdict=row.verdict if row.verdict in DIFFERENT else "differs", detail=detail)
    if a.number or b.number:
        alike = "values are " + ("equal" if row.verdict in ("same", "same checksum") else "not equal")
        return row._replace(verdict="cannot be compared", detail=f"{NUMBERED}; {alike}")
    if row.verdict == "differs" and (codes := _codes(a, b)):  # distances between codes are none between weights
        row = row._replace(change=None, max=None, cosine=None, detail="; ".join(filter(None, [row.detail, *codes])))
    if a.assumed or b.assumed:
        return row._replace(detail="; ".join(filter(None, (row.detail, "name assumed"))))
    return row


def with_measures(row: TensorDifference, found: Measured, how: Reading) -> TensorDifference:
    """Add the measured values to the row of two tensors of one shape."""
    if found.problem:
        return row._replace(verdict="cannot be compared", detail=found.problem)
    same_dtype = row.dtype_a == row.dtype_b
    m = found.measures
    if m is None or not m.differing:
        verdict: Verdict = "same checksum" if found.skipped else "same"
        if not same_dtype:
            verdict = "within tolerance" if how.tolerance else "differs"
        words = _words(row, found, same_dtype, "every value is equal")
        return row._replace(verdict=verdict, detail=words, compared=m.compared if m else 0, differing=0 if m else None)
    within = how.tolerance is not None and not m.outside
    return row._replace(
        verdict="within tolerance" if within else "differs",
        detail=_words(row, found, same_dtype),
        compared=m.compared,
        differing=m.differing,
        change=m.change,
        max=m.max,
        cosine=m.cosine,
        first=m.first,
        value_a=m.values[0] if m.values else None,
        value_b=m.values[1] if m.values else None,
    )


def _words(row: TensorDifference, found: Measured, same_dtype: bool, equal: str = "") -> str:
    m = found.measures
    words = [] if same_dtype else [f"{row.detail}, compared by value in float64", equal]
    if found.skipped and m is not None:
        words.append(f"{plural(found.skipped, 'element')} with the same CRC-32 not read, measures are of the rest")
    elif found.skipped:
        words.append("same CRC-32 in both, not read")
    if found.damaged:
        words.append("both state the same CRC-32: one of them is damaged (verify --deep)")
    if found.by_rank:
        words.append("each rank has its own, compared rank by rank")
    if m is not None and m.nonfinite:
        words.append(f"{plural(m.nonfinite, 'element')} {NOT_FINITE}")
    if m is not None and m.differing and not m.max and not m.outside and not m.nonfinite:
        words.append("equal in value, not in bits")
    return "; ".join(filter(None, words))


def digests_of(entries: Sequence[SideTensor], how: Reading) -> list[str]:
    """The SHA-256 of the values of some tensors in row-major order; a reason stands for a missing one."""

    def reads(entry: SideTensor) -> list[Part]:
        return [] if entry.tensor is None else read_for_digest(entry.tensor)

    return in_ranks(lambda entry: _sha256_of(entry, how), entries, how.threads, _nbytes, reads=reads)


def _nbytes(entry: SideTensor) -> int:
    """Bytes to read for its digest; 0 if the digest is known."""
    return 0 if entry.tensor is None else entry.tensor.nbytes


def _sha256_of(entry: SideTensor, how: Reading) -> str:
    if entry.tensor is None or entry.problem:
        return entry.sha256 or entry.problem or "has no digest"
    try:
        if copies_differ(entry.tensor, how.files):
            return OWN_COPIES
        digest = tensor_digest(once(entry.tensor), how.files)
    except CkptoolsError as error:
        return str(error)
    how.progress(entry.tensor.nbytes, entry.name)
    return digest


def is_sha256(text: str) -> bool:
    """Whether a text is a SHA-256, not the reason for a missing one."""
    return len(text) == 64 and not text.strip("0123456789abcdef")


def _by_digest(row: TensorDifference, a: str, b: str) -> TensorDifference:
    if row.verdict in DIFFERENT and row.dtype_a != row.dtype_b:
        return row._replace(detail=f"{row.detail}; digests say nothing about values in another dtype")
    whys = [f"{side}: {text}" for side, text in (("A", a), ("B", b)) if not is_sha256(text)]
    if whys:
        return row._replace(verdict="cannot be compared", detail="; ".join(whys))
    return row._replace(verdict="same" if a == b else "differs", detail="SHA-256" if a == b else "another SHA-256")


SCHEMA = "ckptools/digests/2"
"""The schema name in the first bytes of such a file."""


def is_digest_file(path: Path) -> bool:
    """Whether a path names a file of digests."""
    if path.suffix != ".json" or not path.is_file():
        return False
    with File(path) as file:
        head = file.read(0, min(file.size, 200))
    return f'"{SCHEMA.rpartition("/")[0]}/'.encode() in head and b'"schema"' in head


def write_digest_file(
    ck: Checkpoint, out: Path, force: bool, jobs: int | None = None, progress: Progress | None = None
) -> Contents:
    """Compute the digests of a checkpoint that was opened with all ranks, write them, and return them.

    Raises:
        OutputExistsError: the file exists and `force` was not given.
        UsageError: there is no folder for it.
        WriteError: it cannot be written.
    """
    check_place_of_file(out, force)
    with OpenFiles() as files:
        contents = contents_of(ck, files)
        tensors = list(contents.tensors.values())
        digests = digests_of(tensors, Reading(files, thread_count(jobs), progress=progress or no_progress))
    for one, text in zip(tensors, digests, strict=True):
        sha256, problem = (text, "") if is_sha256(text) else ("", text)
        contents.tensors[one.identity] = one._replace(sha256=sha256, problem=problem, tensor=None)
    if current().rank == 0:
        data = {
            "schema": SCHEMA,
            "side": contents.facts._asdict() | {"digests": True},
            "sections": contents.sections,
            "lost_ranks": contents.lost_ranks,
            "damage": contents.damage,
            "notes": contents.notes,
            "by_rank": sorted(contents.by_rank),
            "text_keys": contents.text_keys,
            "tensors": [{k: v for k, v in one._asdict().items() if k != "tensor"} for one in contents.tensors.values()],
            "values": [_value_json(value) for value in contents.values.values()],
            "groups": [_group_json(group) for group in contents.groups],
            "written_by": contents.written_by,
            "containers": [_container_json(*one) for one in contents.containers.items()],
            "left_out": contents.left_out,
        }
        write_text(out, to_json(data, indent=1) + "\n", force)
    return contents


def _value_json(value: SideValue) -> dict[str, Any]:
    contents = [{"rank": rank, **_content_json(content)} for rank, content in value.contents.items()]
    return {**value._asdict(), "contents": contents}


def _content_json(content: Content) -> dict[str, str]:
    return {"digest": content.digest, "text": content.text, "problem": content.problem, "exact": content.exact}


def _container_json(key: tuple[Identity, int | None], container: SideContainer) -> dict[str, Any]:
    facts = {k: v for k, v in container._asdict().items() if k not in ("node", "form")}
    return {"identity": key[0], **facts, **(container.form or form_of(container.node))._asdict()}


def _group_json(group: SideGroup) -> dict[str, Any]:
    return {**group._asdict(), "settings": {key: _content_json(content) for key, content in group.settings.items()}}


def read_digest_file(path: Path) -> Contents:
    """Read the contents of a checkpoint from its file of digests.

    Raises:
        ReadError: the file cannot be read, or is not a file of digests.
    """
    data = read_json(path)
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        raise ReadError(path, f"is no file of digests that this version reads; expected schema {SCHEMA}")
    try:
        side = data["side"]
        tensors = [_tensor(one) for one in data["tensors"]]
        values = [_value(one) for one in data["values"]]
        return Contents(
            Side(
                str(side["path"]), str(side["name"]), str(side["saved_as"]),
                _int(side["step"]), _int(side["world_size"]), _texts(side["layout"]), True,
            ),
            {str(kind): list(_texts(names)) for kind, names in data["sections"].items()},
            {one.identity: one for one in tensors},
            {one.identity: one for one in values},
            [_group(one) for one in data["groups"]],
            tuple(int(rank) for rank in data["lost_ranks"]),
            _texts(data["damage"]),
            _texts(data["notes"]),
            {_texts(one) for one in data["by_rank"]},
            bool(data.get("text_keys", True)),
            str(data["written_by"]),
            dict(map(_container, data["containers"])),
            str(data["left_out"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ReadError(path, f"is no file of digests as diff --hash writes it: {type(error).__name__}") from error


def _tensor(data: Mapping[str, Any]) -> SideTensor:
    made = SideTensor(
        _identity(data), str(data["name"]), _subject(data), str(data["dtype"]), tuple(map(int, data["shape"])),
        str(data["layout"]), bool(data["number"]), bool(data["assumed"]), str(data["problem"]), None,
        str(data["sha256"]), str(data["traits"]),
    )  # fmt: skip
    if made.dtype not in ITEMSIZE or not (made.problem or is_sha256(made.sha256)):
        raise ValueError(made.dtype)
    return made


def _value(data: Mapping[str, Any]) -> SideValue:
    contents = {_int(one["rank"]): _content(one) for one in data["contents"]}
    if not contents:
        raise ValueError("contents")
    return SideValue(_identity(data), str(data["name"]), _subject(data), contents, bool(data["number"]))


def _group(data: Mapping[str, Any]) -> SideGroup:
    settings = {str(key): _content(one) for key, one in data["settings"].items()}
    ordered = bool(data.get("ordered"))
    return SideGroup(str(data["section"]), int(data["number"]), _texts(data["params"]), settings, ordered)


def _container(data: Mapping[str, Any]) -> tuple[tuple[Identity, int | None], SideContainer]:
    form = ContainerForm(*(str(data[name]) for name in ContainerForm._fields))
    rank = _int(data["rank"])
    made = SideContainer(str(data["name"]), _subject(data), rank, bool(data["by_name"]), None, form)
    return (_identity(data), rank), made


def _content(data: Mapping[str, Any]) -> Content:
    made = Content(str(data["digest"]), str(data["text"]), str(data["problem"]), exact=str(data["exact"]))
    if not (made.digest or made.problem):
        raise ValueError("digest")
    return made


def _identity(data: Mapping[str, Any]) -> tuple[str, ...]:
    identity = _texts(data["identity"])
    if len(identity) < 2:
        raise ValueError("identity")
    return identity


def _subject(data: Mapping[str, Any]) -> Any:
    return SUBJECTS[SUBJECTS.index(data["subject"])]


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise TypeError("a text")
    return tuple(map(str, values))
