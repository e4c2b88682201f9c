"""What is fuzzed: each takes bytes, and must read them or refuse them in one line.

Anything but a CkptoolsError with one line is a finding; so are ten seconds and a gigabyte, which the driver watches.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from ckptools.errors import CkptoolsError
from ckptools.files import File
from ckptools.formats.options import Options
from ckptools.formats.safetensors_header import read_header
from ckptools.pickles import container, reader
from ckptools.pickles.budgets import PickleError
from ckptools.pickles.machine import Machine
from ckptools.views import safety
from ckptools.views.words import printable

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
MAX_SEED = 64 << 10
"""Bytes; mutations of larger seeds are too slow to learn from."""

MEMORY = Path("/dev/shm")
_SCRATCH = Path(tempfile.mkdtemp(prefix="ckptools-fuzz-", dir=MEMORY if MEMORY.is_dir() else None))
atexit.register(shutil.rmtree, _SCRATCH, ignore_errors=True)


def one_line(error: Exception) -> None:
    """Check that an error is fit to be printed."""
    text = printable(str(error))
    assert text and "\n" not in text, f"not one line: {text!r}"


def as_file(data: bytes, name: str = "x.pt") -> Path:
    """The bytes as a file in memory."""
    path = _SCRATCH / name
    path.write_bytes(data)
    return path


def pickle(data: bytes) -> None:
    """The interpreter of pickles, with storages that all lie at the same place."""
    machine = Machine(data, lambda storage: (Path("x.pt"), 64, f"data/{storage.key}", 0))
    try:
        tree = machine.load()
        reader.check_budget(tree)
    except (PickleError, CkptoolsError) as error:
        one_line(error)
    else:
        safety.foreign_classes(tree)


def archive(data: bytes) -> None:
    """A whole torch.save file: the zip walk, the pickle in it, and the places of its storages."""
    try:
        reader.read(as_file(data))
    except CkptoolsError as error:
        one_line(error)


def header(data: bytes) -> None:
    """The header of a safetensors file."""
    try:
        with File(as_file(data, "x.safetensors")) as file:
            read_header(file)
    except CkptoolsError as error:
        one_line(error)


def metadata(data: bytes) -> None:
    """The `.metadata` of a DCP folder, and the folder that it describes, with whatever it says beside it."""
    from ckptools.formats.dcp.folder import read_folder

    folder = _SCRATCH / "dcp"
    folder.mkdir(exist_ok=True)
    as_file(data, "dcp/.metadata")
    as_file(bytes(4096), "dcp/__0_0.distcp")
    try:
        read_folder(folder, Options(all_ranks=True))
    except CkptoolsError as error:
        one_line(error)


def opening(data: bytes) -> None:
    """A file that is opened as whatever format recognises it, and reported on."""
    import ckptools
    from ckptools.views.report import inspect_report
    from ckptools.views.text import report_text

    try:
        report_text(inspect_report(ckptools.open(as_file(data, "x"), all_ranks=True)))
    except CkptoolsError as error:
        one_line(error)


def _pickles() -> Iterable[bytes]:
    for path in sorted(FIXTURES.rglob("*.pt")):
        try:
            with File(path) as file:
                yield container.Container(file).read("data.pkl")
        except CkptoolsError:
            continue


def _headers() -> Iterable[bytes]:
    for path in sorted(FIXTURES.rglob("*.safetensors")):
        data = path.read_bytes()
        yield data[: 8 + int.from_bytes(data[:8], "little")]
        yield data


def _metadata() -> Iterable[bytes]:
    return (path.read_bytes() for path in sorted(FIXTURES.rglob(".metadata")))


def _files() -> Iterable[bytes]:
    for path in sorted(FIXTURES.rglob("*")):
        if path.suffix in (".pt", ".pkl", ".safetensors", ".bin", ".ckpt") and path.stat().st_size <= MAX_SEED:
            yield path.read_bytes()


Target = Callable[[bytes], None]

TARGETS: dict[str, tuple[Target, Callable[[], Iterable[bytes]]]] = {
    "pickle": (pickle, _pickles),
    "archive": (archive, _files),
    "header": (header, _headers),
    "metadata": (metadata, _metadata),
    "opening": (opening, _files),
}
"""Each with what its seeds are made of."""


def seeds(name: str) -> list[bytes]:
    """Real inputs of a target, small enough to mutate."""
    _, make = TARGETS[name]
    return [data for data in make() if len(data) <= MAX_SEED]
