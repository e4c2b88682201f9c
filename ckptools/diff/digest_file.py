"""Digest files: the keys of a checkpoint with digests for values, to compare checkpoints on two machines.

A tensor has the SHA-256 of its values in row-major, little-endian order, however it is sharded; a plain value has a
digest and a short text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptools.cluster.team import current
from ckptools.diff.plain_values import form_of
from ckptools.diff.record import SUBJECTS, Side
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
from ckptools.diff.tensor_values import Reading, with_digests
from ckptools.display.record_json import to_json
from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.opening import File, OpenFiles, read_json
from ckptools.files.partial_files import check_place_of_file, write_text
from ckptools.keys.value_digests import Content
from ckptools.model.checkpoint import Checkpoint
from ckptools.tensor_io.fetch_ahead import Progress, no_progress, thread_count

SCHEMA = "ckptools/digests/2"
"""Name of the schema, in the first bytes of a digest file."""


def is_digest_file(path: Path) -> bool:
    """Whether a path names a digest file."""
    if path.suffix != ".json" or not path.is_file():
        return False
    with File(path) as file:
        head = file.read(0, min(file.size, 200))
    return f'"{SCHEMA.rpartition("/")[0]}/'.encode() in head and b'"schema"' in head


def write_digest_file(
    ck: Checkpoint, out: Path, force: bool, jobs: int | None = None, progress: Progress | None = None
) -> Contents:
    """Compute the digests of a checkpoint opened with all ranks, write them, and return them.

    Raises:
        OutputExistsError: the file exists and `force` was not given.
        UsageError: its folder does not exist.
        WriteError: the file cannot be written.
    """
    check_place_of_file(out, force)
    with OpenFiles() as files:
        contents = contents_of(ck, files)
        tensors = list(contents.tensors.values())
        how = Reading(files, thread_count(jobs), progress=progress or no_progress)
        contents.tensors = {one.identity: one._replace(tensor=None) for one in with_digests(tensors, how)}
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
            "model": contents.model,
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
    """Read the keys and digests of a checkpoint from its digest file.

    Raises:
        ReadError: the file cannot be read, or is not a digest file.
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
            set(map(_identity, data["by_rank"])),
            bool(data.get("text_keys", True)),
            str(data["written_by"]),
            dict(map(_container, data["containers"])),
            str(data["left_out"]),
            str(data.get("model", "")),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ReadError(path, f"is no file of digests as diff --hash writes it: {type(error).__name__}") from error


def _tensor(data: Mapping[str, Any]) -> SideTensor:
    made = SideTensor(
        _identity(data["identity"]), str(data["name"]), _subject(data), str(data["dtype"]),
        tuple(map(int, data["shape"])), str(data["layout"]), bool(data["number"]), bool(data["assumed"]),
        str(data["problem"]), None, str(data["sha256"]), str(data["traits"]),
    )  # fmt: skip
    if made.dtype not in ITEMSIZE or not (made.problem or re.fullmatch("[0-9a-f]{64}", made.sha256)):
        raise ValueError(made.dtype)
    return made


def _value(data: Mapping[str, Any]) -> SideValue:
    contents = {_int(one["rank"]): _content(one) for one in data["contents"]}
    if not contents:
        raise ValueError("contents")
    return SideValue(_identity(data["identity"]), str(data["name"]), _subject(data), contents, bool(data["number"]))


def _group(data: Mapping[str, Any]) -> SideGroup:
    settings = {str(key): _content(one) for key, one in data["settings"].items()}
    ordered = bool(data.get("ordered"))
    return SideGroup(str(data["section"]), int(data["number"]), _texts(data["params"]), settings, ordered)


def _container(data: Mapping[str, Any]) -> tuple[tuple[Identity, int | None], SideContainer]:
    form = ContainerForm(*(str(data[name]) for name in ContainerForm._fields))
    rank = _int(data["rank"])
    made = SideContainer(str(data["name"]), _subject(data), rank, bool(data["by_name"]), None, form)
    return (_identity(data["identity"]), rank), made


def _content(data: Mapping[str, Any]) -> Content:
    made = Content(str(data["digest"]), str(data["text"]), str(data["problem"]), exact=str(data["exact"]))
    if not (made.digest or made.problem):
        raise ValueError("digest")
    return made


def _identity(parts: Sequence[Any]) -> Identity:
    identity = _texts(parts)
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
