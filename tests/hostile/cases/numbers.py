"""Tensors whose sizes, strides, offsets and storages lie."""

from __future__ import annotations

from collections.abc import Iterator

from tests.hostile.cases.build import BIG, Build
from tests.pickles.forge import storage, tensor, text, with_pickle


def cases() -> Iterator[tuple[str, Build]]:
    forms: dict[str, bytes] = {
        "storage shorter than its tensor": tensor(size=(5,)),
        "storage of 2^62 elements": tensor(of=storage(numel=BIG)),
        "storage of -1 elements": tensor(of=storage(numel=-1)),
        "storage that is missing": tensor(of=storage(key="7")),
        "storage key that leads out": tensor(of=storage(key="../../etc/passwd")),
        "size of -4": tensor(size=(-4,)),
        "size of 2^62": tensor(size=(BIG,)),
        "sizes whose product wraps to 0": tensor(size=(1 << 32, 1 << 32), stride=(0, 0)),
        "stride of -1": tensor(stride=(-1,)),
        "stride of 2^62": tensor(stride=(BIG,)),
        "stride times size wraps": tensor(size=(2, 2), stride=(1 << 63, 1)),
        "offset of -1": tensor(offset=-1),
        "offset of 2^62": tensor(offset=BIG),
        "expanded to 2^50 elements": tensor(size=(1 << 50,), stride=(0,)),
        "more strides than sizes": tensor(size=(4,), stride=(1, 1)),
        "100 000 dimensions": tensor(size=(1,) * 100_000, stride=(1,) * 100_000),
        "sizes of 5000 digits": tensor(size=(10**5000,)),
    }
    for name, form in forms.items():
        yield f"tensor: {name}", _with_tensor(form)


def _with_tensor(form: bytes) -> Build:
    data = b"\x80\x02}" + text("w") + form + b"s."
    return lambda folder: with_pickle(folder / "x.pt", data, bytes(16))
