"""Files of digests: what one side of a comparison holds, without its values, for places that do not see each other.

A tensor has the SHA-256 of its values in row-major, little-endian order, whatever its layout; a plain value a digest of
what it is, and a few words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptools.checks.difference.held_keys import contents_of
from ckptools.checks.difference.sides import Contents, HeldGroup, HeldTensor, HeldValue
from ckptools.checks.difference.tensor_digests import nbytes_of, parts_of, sha256_of
from ckptools.checks.difference.tensor_rows import is_sha256
from ckptools.cluster.team import current
from ckptools.contents.value_digests import Content
from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.json_file import read_json
from ckptools.files.opening import File, OpenFiles
from ckptools.files.partial_files import check_place_of_file, write_text
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.difference import SUBJECTS, Side
from ckptools.tensor_io.progress import Progress, not_told
from ckptools.tensor_io.shared_work import in_ranks
from ckptools.tensor_io.threads import thread_count

SCHEMA = "ckptools/digests/1"
"""What such a file says of itself, in its first bytes."""


def is_digest_file(path: Path) -> bool:
    """Whether a path is that of a file of digests."""
    if path.suffix != ".json" or not path.is_file():
        return False
    with File(path) as file:
        head = file.read(0, min(file.size, 200))
    return f'"{SCHEMA.rpartition("/")[0]}/'.encode() in head and b'"schema"' in head


# -- writing -----------------------------------------------------------------------------------------------------


def write_digest_file(
    ck: Checkpoint, out: Path, force: bool, jobs: int | None = None, progress: Progress | None = None
) -> Contents:
    """Take the digests of a checkpoint of which every rank was read, and write them; what was written is returned.

    Args:
        ck: the checkpoint.
        out: the file.
        force: overwrite it.
        jobs: threads; None for one per core, at most eight.
        progress: called with bytes read and the tensor they are of.

    Raises:
        OutputExistsError: the file is there, and `force` was not asked for.
        UsageError: there is no folder for it.
        WriteError: it cannot be written.
    """
    check_place_of_file(out, force)
    with OpenFiles() as files:
        contents = contents_of(ck, files)
        held = list(contents.tensors.values())
        count = thread_count(jobs)
        telling = progress or not_told
        digests = in_ranks(lambda one: sha256_of(one, files, telling), held, count, nbytes_of, reads=parts_of)
    for one, text in zip(held, digests, strict=True):
        sha256, problem = (text, "") if is_sha256(text) else ("", text)
        contents.tensors[one.identity] = one._replace(sha256=sha256, problem=problem, tensor=None)
    if current().rank == 0:
        write_text(out, _json(contents), force)
    return contents


def _json(contents: Contents) -> str:
    told = {
        "schema": SCHEMA,
        "side": contents.facts._asdict() | {"digests": True},
        "sections": contents.sections,
        "lost_ranks": contents.lost_ranks,
        "damage": contents.damage,
        "notes": contents.notes,
        "by_rank": sorted(contents.by_rank),
        "text_keys": contents.text_keys,
        "tensors": [_tensor_json(held) for held in contents.tensors.values()],
        "values": [_value_json(held) for held in contents.values.values()],
        "groups": [_group_json(group) for group in contents.groups],
    }
    return json.dumps(told, indent=1, allow_nan=False) + "\n"


def _tensor_json(held: HeldTensor) -> dict[str, Any]:
    return {key: value for key, value in held._asdict().items() if key != "tensor"}


def _value_json(held: HeldValue) -> dict[str, Any]:
    contents = [{"rank": rank, **_content_json(content)} for rank, content in held.contents.items()]
    return {**held._asdict(), "contents": contents}


def _content_json(content: Content) -> dict[str, str]:
    return {"digest": content.digest, "text": content.text, "problem": content.problem}


def _group_json(group: HeldGroup) -> dict[str, Any]:
    return {**group._asdict(), "settings": {key: _content_json(content) for key, content in group.settings.items()}}


# -- reading -----------------------------------------------------------------------------------------------------


def read_digest_file(path: Path) -> Contents:
    """What the checkpoint held that a file of digests was taken of.

    Raises:
        ReadError: it cannot be read, or is none.
    """
    told = read_json(path)
    if not isinstance(told, Mapping) or told.get("schema") != SCHEMA:
        raise ReadError(path, f"is no file of digests that this version reads; expected schema {SCHEMA}")
    try:
        return _contents(told)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ReadError(path, f"is no file of digests as diff --hash writes it: {type(error).__name__}") from error


def _contents(told: Mapping[str, Any]) -> Contents:
    side = told["side"]
    tensors = [_tensor(one) for one in told["tensors"]]
    values = [_value(one) for one in told["values"]]
    return Contents(
        Side(
            str(side["path"]), str(side["name"]), str(side["saved_as"]), _int(side["step"]), _int(side["world_size"]),
            _texts(side["layout"]), True,
        ),
        {str(kind): list(_texts(names)) for kind, names in told["sections"].items()},
        {one.identity: one for one in tensors},
        {one.identity: one for one in values},
        [_group(one) for one in told["groups"]],
        tuple(int(rank) for rank in told["lost_ranks"]),
        _texts(told["damage"]),
        _texts(told["notes"]),
        {_texts(one) for one in told["by_rank"]},
        bool(told.get("text_keys", True)),
    )  # fmt: skip


def _tensor(told: Mapping[str, Any]) -> HeldTensor:
    made = HeldTensor(
        _identity(told), str(told["name"]), _subject(told), str(told["dtype"]), tuple(map(int, told["shape"])),
        str(told["layout"]), bool(told["number"]), bool(told["assumed"]), str(told["problem"]), None,
        str(told["sha256"]),
    )  # fmt: skip
    if made.dtype not in ITEMSIZE or not (made.problem or is_sha256(made.sha256)):
        raise ValueError(made.dtype)
    return made


def _value(told: Mapping[str, Any]) -> HeldValue:
    contents = {_int(one["rank"]): _content(one) for one in told["contents"]}
    if not contents:
        raise ValueError("contents")
    return HeldValue(_identity(told), str(told["name"]), _subject(told), contents, bool(told["number"]))


def _group(told: Mapping[str, Any]) -> HeldGroup:
    settings = {str(key): _content(one) for key, one in told["settings"].items()}
    ordered = bool(told.get("ordered"))
    return HeldGroup(str(told["section"]), int(told["number"]), _texts(told["params"]), settings, ordered)


def _content(told: Mapping[str, Any]) -> Content:
    made = Content(str(told["digest"]), str(told["text"]), str(told["problem"]))
    if not (made.digest or made.problem):
        raise ValueError("digest")
    return made


def _identity(told: Mapping[str, Any]) -> tuple[str, ...]:
    identity = _texts(told["identity"])
    if len(identity) < 2:
        raise ValueError("identity")
    return identity


def _subject(told: Mapping[str, Any]) -> Any:
    return SUBJECTS[SUBJECTS.index(told["subject"])]


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise TypeError("a text")
    return tuple(map(str, values))
