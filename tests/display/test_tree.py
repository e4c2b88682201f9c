"""The keys of a checkpoint as a tree of text."""

from __future__ import annotations

import pytest

from ckptools.contents.text import ASCII, BOXES, TreeForm, glyphs, tree_text
from ckptools.contents.tree import keys_of
from ckptools.display.screen import PIPE, Screen
from tests.display.made import checkpoint, composer_tree, hostile, plain, sharded


def layers(count: int, odd: int | None = None):
    model = {"emb.weight": sharded(32, 4, record="e")}
    for n in range(count):
        for m, name in enumerate(("q", "k", "v", "o")):
            dtype = "bfloat16" if n == odd else "float32"
            model[f"blocks.{n}.attn.{name}.weight"] = sharded(8, 4, record=f"{n}.{m}", dtype=dtype)
        model[f"blocks.{n}.norm1.weight"] = sharded(4, record=f"{n}.5")
        model[f"blocks.{n}.norm2.weight"] = sharded(4, record=f"{n}.6")
    return checkpoint({"model": model, "step": 5})


def text(ck, screen=PIPE, **form):
    return tree_text(keys_of(ck), TreeForm(**form), screen).splitlines()


def test_layers_are_folded_and_each_branch_has_its_totals():
    assert text(layers(24)) == [
        "model   145 tensors, 3392 params, 13.2 KiB; 1 other value",
        "model                        145 tensors  3392  13.2 KiB",
        "├─ emb.weight                    [32, 4]   128     512 B  fp32  dim 0 over 4 ranks",
        "└─ blocks.{0..23}            144 tensors  3264  12.8 KiB",
        "   ├─ attn.{q,k,v,o}.weight       [8, 4]    32     128 B  fp32  dim 0 over 4 ranks  x96",
        "   └─ norm{1,2}.weight               [4]     4      16 B  fp32  dim 0 over 4 ranks  x48",
        "step                         5",
    ]


def test_a_layer_of_another_dtype_or_layout_is_not_folded_with_the_others():
    assert any("{0,2,3}" in line for line in text(layers(4, odd=1)))
    one = {"model": {"l.0.w": sharded(8, 4), "l.1.w": plain(8, 4), "l.2.w": sharded(8, 4, ranks=2)}}
    assert sum("[8, 4]" in line for line in text(checkpoint(one))) == 3


def test_expanded_each_layer_has_its_lines():
    lines = text(layers(3), expand=True)
    assert sum("[8, 4]" in line for line in lines) == 12 and not any("{" in line for line in lines)


def test_depth_leaves_the_totals():
    assert [line.split()[0] for line in text(layers(3), depth=1)] == ["model", "model", "step"]
    assert any(line.startswith("└─ blocks.{0..2}") and "18 tensors" in line for line in text(layers(3), depth=2))


def test_values_that_differ_do_not_fold_as_siblings():
    lines = text(checkpoint({"model": {"w": plain(2)}, "seen": {"a1": 3, "a2": 4, "b1": 7, "b2": 7}}))
    assert [line.split() for line in lines[-3:]] == [["├─", "a1", "3"], ["├─", "a2", "4"], ["└─", "b{1,2}", "7", "x2"]]


def test_long_values_that_differ_do_not_fold_as_siblings():
    seen = {"a1": list(range(625)), "a2": list(range(1, 626)), "b1": list(range(700)), "b2": list(range(700))}
    lines = text(checkpoint({"model": {"w": plain(2)}, "seen": seen}))
    assert [line.split()[1:3] for line in lines[-3:]] == [["a1", "625"], ["a2", "625"], ["b{1,2}", "700"]]


def test_long_values_of_folded_branches_are_counted():
    seen = {n: {"state": list(range(n % 2, 625 + n % 2)), "same": list(range(625))} for n in range(3)}
    lines = text(checkpoint({"model": {"w": plain(2)}, "seen": seen}))
    assert lines[-2].endswith("  625 integers, 2 distinct of 3")
    assert lines[-1].endswith("  625 integers, 1 distinct of 3")


def test_keys_that_begin_like_their_section_keep_their_names():
    ck = checkpoint({"model": {"model.a": plain(2), "model.b": plain(3)}, "model.c": 1})
    lines = text(ck)
    assert lines[2].split()[:2] == ["└─", "model"] and [line.split()[1] for line in lines[3:5]] == ["a", "b"]
    assert lines[5].split() == ["model.c", "1"]


def test_tied_weights_say_so_and_count_once():
    tied = plain(4, 2, record="7")
    lines = text(checkpoint({"model": {"emb": tied, "x": plain(9), "head": tied}}))
    assert lines[-1].endswith("tied to emb") and "3 tensors" in lines[1] and "17" in lines[1]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_screen(width):
    for ck in (layers(30, odd=3), checkpoint(composer_tree()), hostile()):
        assert max(map(len, text(ck, Screen(width, 40)))) <= width


def test_a_terminal_has_so_many_lines_and_says_how_to_see_the_others():
    lines = text(layers(60), Screen(100, 40), expand=True)
    assert len(lines) == 42 and lines[-1].startswith("444 more lines: --limit 0 for all")
    assert len(text(layers(60), Screen(100, 40), expand=True, limit=0)) == 485
    assert len(text(layers(60), PIPE, expand=True, limit=3)) == 5


def test_five_thousand_tensors_fit_a_screen():
    model = {f"layers.{n}.w{m}.weight": plain(4, record=f"{n}.{m}") for n in range(100) for m in range(50)}
    assert len(model) == 5000 and len(text(checkpoint({"model": model}), Screen(80, 40))) <= 5


def test_it_is_drawn_with_what_the_stream_can_write():
    assert glyphs("utf-8") == BOXES and glyphs("ascii") == glyphs(None) == glyphs("latin-1") == glyphs("?") == ASCII
    assert all(line.isascii() for line in text(layers(3), glyphs=ASCII))
