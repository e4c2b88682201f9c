"""Recognise a file by its first bytes; the suffix proves nothing.

What ckptools reads itself has a short name here (`zip`, `legacy`, `tar`, the compressions); what people often take
for a checkpoint has a sentence that says what it is.
"""

from __future__ import annotations

from pathlib import Path

from ckptools.files.opening import File, Window

HEAD = 512
"""Bytes at the start that are looked at: a tar's magic lies at 257."""

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
"""The first pickle of a file that torch.save wrote before torch 1.6. Source: torch/serialization.py."""

_BINARY_MAGIC = b"\x8a\x0a" + LEGACY_MAGIC.to_bytes(10, "little") + b"."
_TEXT_MAGIC = b"L%dL\n." % LEGACY_MAGIC

COMPRESSIONS: dict[bytes, str] = {
    b"\x1f\x8b\x08": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"]\0\0": "lzma",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x89LZO\0\r\n\x1a\n": "lzop",
}
"""First bytes of each compression. Sources: RFC 1952, 8878; the xz, lz4 and lzop formats' descriptions."""

_KNOWN: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs.", "a Git LFS pointer, not the file itself: fetch it with `git lfs pull`"),
    (b"GGUF", "a GGUF file (llama.cpp), not a PyTorch checkpoint"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras, h5py), not a PyTorch checkpoint"),
    (b"\x93NUMPY", "one numpy array (.npy), not a checkpoint"),
    (b"PAR1", "a Parquet table, not a checkpoint"),
    (b"\x7fELF", "a program or library, not a checkpoint"),
    (b"%PDF", "a PDF, not a checkpoint"),
    (b"\x89PNG\r\n\x1a\n", "a picture (PNG), not a checkpoint"),
    (b"\xff\xd8\xff", "a picture (JPEG), not a checkpoint"),
    (b"GIF8", "a picture (GIF), not a checkpoint"),
    (b"SQLite format 3\0", "an SQLite database, not a checkpoint"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it first"),
    (b"Rar!", "a RAR archive: unpack it first"),
)


def content_of(head: bytes) -> str:
    """Name what ckptools reads by itself: `zip`, `legacy`, `tar`, or a compression; "" for anything else."""
    if head.startswith(b"PK\3\4"):
        return "zip"
    # Protocols 2 to 5 begin with PROTO, 4 and 5 with a frame behind it; protocols 0 and 1 have neither.
    if (head[:1] == b"\x80" and _BINARY_MAGIC in head[:32]) or head.startswith(_TEXT_MAGIC):
        return "legacy"
    if head[257:262] == b"ustar":
        return "tar"
    return next((name for magic, name in COMPRESSIONS.items() if head.startswith(magic)), "")


def head_of(file: File | Window) -> bytes:
    """The bytes that `content_of` and `what_is` want."""
    return file.read(0, min(HEAD, file.size))


def head_at(path: Path, most: int = HEAD) -> bytes:
    """The first bytes of the file at a path.

    Raises:
        ReadError: it cannot be read.
    """
    with File(path) as file:
        return file.read(0, min(most, file.size))


def what_is(head: bytes) -> str:
    """Say what a file is that is no checkpoint, by its first bytes; "" when they are not known."""
    if not head:
        return "empty"
    if not any(head):
        return "zeros from its first byte on: it was never written, or its download did not finish"
    for magic, what in _KNOWN:
        if head.startswith(magic):
            return what
    return _text(head) or _binary(head)


def _text(head: bytes) -> str:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "a web page (HTML), probably an error message or a login page that was saved under this name"
    if start.startswith(b"<?xml"):
        return "XML, probably an error message of a storage service that was saved under this name"
    if start.startswith((b"{", b"[")) and _printable(start):
        return "JSON text, not a torch.save file"
    return "text, not a torch.save file" if _printable(head) else ""


def _binary(head: bytes) -> str:
    if b"onnx" in head[:64].lower() or (head[:1] == b"\x08" and b"pytorch" in head[:32]):
        return "an ONNX model, not a PyTorch checkpoint"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file, or one that begins like it"
    if head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5":
        return "a plain Python pickle, which torch.save did not write"
    if 0x81 <= head[0] <= 0x8F or head[:1] in (b"\xde", b"\xdf"):
        return "not written by torch; perhaps msgpack (Flax, JAX)"
    return ""


def _printable(data: bytes) -> bool:
    return all(byte >= 0x20 or byte in b"\t\r\n" for byte in data) and b"\x7f" not in data
