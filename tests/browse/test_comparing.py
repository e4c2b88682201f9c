"""With another checkpoint, what differs is listed with the largest change first."""

from __future__ import annotations

import torch

from tests.browse.driven import Driven, drive


def saved(path, **tensors):
    torch.save({key: torch.tensor(value) if isinstance(value, list) else value for key, value in tensors.items()}, path)
    return path


def test_what_differs_in_structure_is_listed_before_anything_is_read(tmp_path):
    a = saved(tmp_path / "a.pt", w=[1.0, 2.0], same=[1.0], gone=[1.0])
    b = saved(tmp_path / "b.pt", w=[1.0, 2.0, 3.0], same=[1.0], new=[1.0])

    async def script(driven: Driven):
        assert "[2 keys]" in driven.text("tabs")
        assert {row.split()[0] for row in driven.rows()} == {"w", "gone", "new"}
        assert any("only in B" in row for row in driven.rows())
        assert driven.text("message").startswith("different: weights")

    drive(a, script, other=b)


def test_the_largest_change_comes_first_once_values_are_compared(tmp_path):
    a = saved(tmp_path / "a.pt", little=[1.0, 1.0], much=[1.0, 1.0], same=[1.0], step=2)
    b = saved(tmp_path / "b.pt", little=[1.0, 1.001], much=[1.0, 9.0], same=[1.0], step=4)

    async def script(driven: Driven):
        await driven.press("o", "c")
        await driven.press("o", "o")
        assert [row.split()[0] for row in driven.rows()] == ["much", "little", "step"]
        assert any(row.split() == ["max", "8.0"] for row in driven.rows("right"))
        await driven.press("y")
        assert driven.text("message") == f"ckptools diff {a} {b} --values --filter much"

    drive(a, script, other=b)


def test_without_another_one_c_says_how_to_give_it(tmp_path):
    async def script(driven: Driven):
        await driven.press("c")
        assert "ckptools browse PATH OTHER" in driven.text("message")

    drive(saved(tmp_path / "a.pt", w=[1.0]), script)
