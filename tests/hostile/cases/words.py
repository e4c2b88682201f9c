"""Keys and names that act on a terminal, a page or a reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.hostile.cases.build import Build
from tests.pickles.forge import number, tensor, text, with_pickle

WORDS = {
    "terminal colours": "\x1b[31mred\x1b[0m",
    "a title": "\x1b]0;owned\x07", "C1": "\x9b31m", "carriage return": "ok\rbad",
    "newlines": "a\nerror: all is well\nb", "markup": "[bold]x[/bold][/]", "HTML": "<script>alert(1)</script>",
    "bidi": "a\u202egnp.exe", "surrogate": "a\udc80b", "zero width": "a\u200bb", "NUL": "a\0b",
    "a megabyte": "k" * 1_000_000,
    "a number": "1e5", "a path": "../../etc/passwd", "nothing": "", "dots": "a..b", "backspace": "good\b\b\b\bevil",
}  # fmt: skip


def cases() -> Iterator[tuple[str, Build]]:
    for name, word in WORDS.items():
        yield f"key: {name}", _key(text(word))
        yield f"class: {name}", _class(word)
    for name, value in (("NaN", float("nan")), ("infinity", float("-inf"))):
        yield f"value: {name}", _value(value)
    yield "keys that fall together", lambda folder: _torch(folder, {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    yield "keys 1 and '1'", lambda folder: _torch(folder, {"m": {1: torch.ones(1), "1": torch.ones(1)}})
    yield "key of 300 kB of an int", _key(number(1 << 2_400_000))


def _key(key: bytes) -> Build:
    data = b"\x80\x02}" + key + tensor() + b"s" + text("plain") + tensor() + b"s."
    return lambda folder: with_pickle(folder / "x.pt", data, bytes(16))


def _class(word: str) -> Build:
    name = text(word) + text(word) + b"\x93" + b")R"
    return lambda folder: with_pickle(
        folder / "x.pt", b"\x80\x02}" + text("o") + name + b"s" + text("w") + tensor() + b"s.", bytes(16)
    )


def _value(value: float) -> Build:
    return lambda folder: _torch(folder, {"optimizer": {"state": {}, "param_groups": [{"lr": value, "params": []}]}})


def _torch(folder: Path, tree: Any) -> Path:
    torch.save(tree, folder / "x.pt")
    return folder / "x.pt"
