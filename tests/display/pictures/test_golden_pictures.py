"""Every place, colour and word of a picture, as it was looked at: `CKPTOOLS_REWRITE_GOLDEN=1` rewrites the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ckptools.display.drawing import Picture
from ckptools.model.problems import Code, Problem
from ckptools.model.records import Rows
from ckptools.model.regions import Box, chunk
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.pictures.heat_map import HeatCell, heat_map
from ckptools.pictures.rank_map import bytes_by_section, rank_map
from ckptools.pictures.run_steps import run_steps
from ckptools.pictures.tensor_layout import tensor_layout
from ckptools.pictures.value_bars import norm_bars, value_histogram
from ckptools.stats.record import Statistics, Stats
from tests.display.made import checkpoint, composer_tree, files, plain, source
from tests.display.pictures.test_run_steps import saved


def shards(shape: Sequence[int], boxes: Sequence[Box], absent: Sequence[int] = (), note: str = "") -> Tensor:
    """A tensor whose rank R has the box R; the files of `absent` ranks were not read."""
    here = source((1,), "float32", "0")
    held = [Shard(box, rank, None if rank in absent else here) for rank, box in enumerate(boxes)]
    return Tensor(tuple(shape), "float32", tuple(held), "dtensor", ("Shard(0)",), (4,), world_size=9, note=note)


def ranks() -> Picture:
    problems = [
        Problem(Code.FILE_MISSING, "", 3),
        Problem(Code.FILE_CUT, "", 5),
        Problem(Code.MIXED_SAVES, "", ranks=(7, 40)),
        Problem(Code.NOT_FINITE, "", 5),
        Problem(Code.COPIES_DIFFER, "", 11),
        Problem(Code.RNG_STATES_EQUAL, "", ranks=tuple(range(41))),
    ]
    return rank_map(checkpoint({}, files=files(41, here=set(range(41)) - {3})), problems)


def strip() -> Picture:
    """Pieces of three rows of a strip, of which one is not here, one is no piece, and one lies outside."""
    cut = [Box((start, 0), (n, 3)) for start, n in (chunk(100, 40, r) for r in range(40))]
    return tensor_layout(shards((100, 3), [*cut, Box((100, 0), (4, 3))], absent=[2]), "up.weight")


def grid() -> Picture:
    cells = [Box((16 * i, 10 * j), (16, 10)) for i in range(2) for j in range(2)]
    return tensor_layout(shards((40, 20), [*cells, *cells[:3], Box((8, 0), (16, 10))], absent=[1, 5]), "qkv")


def heat() -> Picture:
    named = [(f"model.h.{n}.{role}", n + 0.5) for n in range(50) for role in ("attn.w", "mlp.w")]
    letters = {"model.h.1.attn.w": "N", "model.h.2.mlp.w": "0", "model.h.49.mlp.w": "?"}
    return heat_map("rms", [HeatCell(name, value, letters.get(name, ""), f"rms {value}") for name, value in named])


def values() -> Picture:
    counts = (1, 0, 4, 12)
    more = {"nan": 1, "inf": 2, "histogram": counts, "mean": 1.0, "std": 0.6}
    return value_histogram(Stats("w", "model", None, "float32", (4, 5), 20, 20, 1.5, 6.7, -2.0, 3.0, **more))


def norms() -> Picture:
    rows = [Stats(f"w{n}", "model", None, "float32", (2,), 2, 2, l2=l2) for n, l2 in enumerate((0.1, 3, 3.5, 70, 0.0))]
    rows += [Stats("i", "model", None, "int64", (2,), 2, 2, l2=5.0), Stats("n", "model", None, "float32", (2,), 2, 1)]
    return norm_bars("norms", Statistics(Path("a.pt"), "values", 7, 0, None, 0, 0, 0, 0.0, Rows(rows)))


def sections() -> Picture:
    more = {f"extra{n}": {"buffer": plain(n + 1, dtype="uint8", record=f"x{n}")} for n in range(45)}
    return bytes_by_section(checkpoint({**composer_tree(4), **more}))


PICTURES: dict[str, Callable[[], Picture]] = {
    "ranks": ranks,
    "strip": strip,
    "grid": grid,
    "no-layout": lambda: tensor_layout(shards((8, 3), [], note="no layout is stated"), "w"),
    "many-dims": lambda: tensor_layout(
        shards((4, 4, 4), [Box((0, 0, 2 * r), (4, 2 + 2 * r, 2)) for r in range(2)]), "w"
    ),
    "heat": heat,
    "values": values,
    "norms": norms,
    "sections": sections,
}


def compared(golden: Callable[[str, str], None], name: str, picture: Picture) -> None:
    golden(f"pictures/{name}.svg", picture.svg.replace("><", ">\n<"))


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_as_it_was(name, golden):
    compared(golden, name, PICTURES[name]())


def test_a_run_is_drawn_as_it_was(tmp_path, golden):
    run = saved(tmp_path / "run", (10, 3e-4, 3e-5), (20, 2e-4, 2e-5), (30, 1e-2, 1e-5), (20, 9e-3), (25,))
    compared(golden, "run", run_steps(run))
