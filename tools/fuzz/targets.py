"""What is fuzzed: each takes bytes, and must read them or refuse them in one line.

Anything but a CkptoolsError with one line is a finding; so are ten seconds and a gigabyte, which the driver watches.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import safe_open

from ckptools.errors import CkptoolsError
from ckptools.files import zip_archive
from ckptools.files.opening import File
from ckptools.files.safetensors_header import read_header
from ckptools.model.tree import TreeLimitError, check_tree_limits
from ckptools.pickles import reader
from ckptools.pickles.foreign_names import foreign_classes
from ckptools.pickles.machine import Machine
from ckptools.pickles.machine_state import PickleError
from ckptools.text import printable

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
MAX_SEED = 64 << 10
"""Bytes; mutations of larger seeds are too slow to learn from."""

MAX_OUTPUT = 1 << 20
"""Bytes that a consolidation may write; larger ones are planned only."""

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
        check_tree_limits(tree)
    except (PickleError, TreeLimitError, CkptoolsError) as error:
        one_line(error)
    else:
        foreign_classes(tree)


def archive(data: bytes) -> None:
    """A whole torch.save file: the zip walk, the pickle in it, and the places of its storages."""
    try:
        reader.read(as_file(data))
    except CkptoolsError as error:
        one_line(error)


def header(data: bytes) -> None:
    """The header of a safetensors file: what is taken here, the format's own library takes too."""
    path = as_file(data, "x.safetensors")
    try:
        with File(path) as file:
            read_header(file)
    except CkptoolsError as error:
        one_line(error)
    else:
        with safe_open(path, "numpy") as theirs:
            theirs.keys()


def metadata(data: bytes) -> None:
    """The `.metadata` of a DCP folder, and the folder that it describes, with whatever it says beside it."""
    folder = _SCRATCH / "dcp"
    folder.mkdir(exist_ok=True)
    as_file(data, "dcp/.metadata")
    as_file(bytes(4096), "dcp/__0_0.distcp")
    used(folder)


def used(path: Path) -> None:
    """Every command on a file or folder: each does its work or says one line why not."""
    import ckptools
    from ckptools.inspect.record import inspect_report, report_text

    out = _SCRATCH / "out.safetensors"

    def inspect() -> None:
        report_text(inspect_report(ckptools.open(path, all_ranks=True)))

    def verify() -> None:
        str(ckptools.verify(path, deep=True, values=True, jobs=1))

    def consolidate() -> None:
        planned = ckptools.consolidate(path, out, allow_missing=True, force=True, dry_run=True, jobs=1)
        if planned.nbytes < MAX_OUTPUT:
            ckptools.consolidate(path, out, allow_missing=True, force=True, check=True, jobs=1)

    for command in (inspect, verify, consolidate):
        try:
            command()
        except CkptoolsError as error:
            one_line(error)


def opening(data: bytes) -> None:
    """A file that is used as whatever format recognises it."""
    used(as_file(data, "x"))


def tree(data: bytes) -> None:
    """A whole file of torch around any pickle, with ten small storages."""
    path = _SCRATCH / "tree.pt"
    with zipfile.ZipFile(path, "w") as file:
        for name, content in {"data.pkl": data, "byteorder": b"little", "version": b"3\n"}.items():
            file.writestr(f"archive/{name}", content)
        for key in range(10):
            file.writestr(f"archive/data/{key}", bytes(range(256)) * 4)
    used(path)


def _pickles() -> Iterable[bytes]:
    for path in sorted(FIXTURES.rglob("*.pt")):
        try:
            with File(path) as file:
                yield zip_archive.Container(file).read("data.pkl")
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
    "tree": (tree, _pickles),
}
"""Each with what its seeds are made of."""


def seeds(name: str) -> list[bytes]:
    """Real inputs of a target, small enough to mutate."""
    _, make = TARGETS[name]
    return [data for data in make() if len(data) <= MAX_SEED]
