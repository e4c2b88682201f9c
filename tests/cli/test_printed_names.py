"""What a terminal prints can be used: names are whole, and `show` finds each of them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import ckptools
from ckptools.cli.printing import ROWS
from ckptools.contents.record import Keys
from ckptools.contents.show import entries_at
from ckptools.contents.text import TreeForm, tree_text
from ckptools.contents.tree import keys_of
from ckptools.display.page import PagedRecord, page_text
from ckptools.display.screen import Screen
from tests.truth import FIXTURES

NARROW = Screen(80, ROWS)

LONG_NAMES = [
    "hf-llama-safetensors-bf16/ckpt", "torchtitan-fsdp-tp/ckpt", "deepspeed-z3-bf16/ckpt", "nemo-automodel-fsdp2/ckpt",
    "torch2.13.0-fsdp1-sharded-w4", "megatron-tp2pp2-fp32/ckpt",
]  # fmt: skip


def opened(name: str) -> ckptools.Checkpoint:
    return ckptools.open(FIXTURES / name, all_ranks=True)


def rows_of(page: PagedRecord) -> list[str]:
    """The names in the first column of a table, whose last column has one line a row; with the prefix said above."""
    lines = page_text(page, NARROW._replace(rows=None)).splitlines()
    dashes = next(n for n, line in enumerate(lines) if line.startswith("----"))
    first, *_, last = (found.span() for found in re.finditer("-+", lines[dashes]))
    prefix = re.search(r"begins with (\S+?)(?:;|$)", " ".join(lines[:dashes]))
    names = list[str]()
    for line in lines[dashes + 1 :]:
        if not line:
            break
        if line[last[0] :].strip():
            names.append(prefix[1] if prefix else "")
        names[-1] += line[: first[1]].strip()
    return names


def spelled_out(label: str) -> list[str]:
    """The labels that the shell makes of a folded one: `{q,k}_proj`, `{0..2}`."""
    found = re.search(r"\{([^{}]*)\}", label)
    if found is None:
        return [label]
    words = list[str]()
    for word in found[1].split(","):
        first, dots, last = word.partition("..")
        words += map(str, range(int(first), int(last) + 1)) if dots else [word]
    return [one for word in words for one in spelled_out(label[: found.start()] + word + label[found.end() :])]


def leaves_of(keys: Keys) -> list[str]:
    """The names of a tree's leaves, put together from its lines; a name without cells has them in the next line."""
    above, found, deepest = dict[int, str](), list[str](), -1
    # The name of the checkpoint, above its keys, may take several lines.
    for line in tree_text(replace(keys, name="x"), TreeForm(), NARROW._replace(rows=None)).splitlines()[1:]:
        drawn = re.match(r"(?:│  |   |├─ |└─ )*", line)
        assert drawn is not None
        name = line[drawn.end() :].split("  ")[0]
        if not name or line.startswith("layout of a tensor") or (drawn[0] and drawn[0][-3:] not in ("├─ ", "└─ ")):
            continue
        depth = len(drawn[0]) // 3
        if depth > deepest:
            found = found[:-1]  # the line above is a branch
        above[depth], deepest = name, depth
        found.append(".".join(above[n] for n in range(depth + 1)))
    return found


@pytest.mark.parametrize("name", LONG_NAMES)
def test_each_name_in_a_table_is_whole_and_found_by_show(name):
    ck = opened(name if "torchtitan" not in name else f"{name}/step-6")
    shown = rows_of(ck.stats())
    assert shown == [row.name for row in ck.stats().rows]
    assert all(entries_at(ck, one) for one in shown)


@pytest.mark.parametrize("name", LONG_NAMES)
def test_each_name_in_a_tree_is_whole_and_found_by_show(name):
    ck = opened(name if "torchtitan" not in name else f"{name}/step-6")
    keys = keys_of(ck)
    named = [one for folded in leaves_of(keys) if " more" not in folded for one in spelled_out(folded)]
    assert len(named) > len(keys.rows) // 2
    found = {entry.name for one in named for entry in entries_at(ck, one)}
    assert found <= {row.name for row in keys.rows}
    assert found >= {row.name for row in keys.rows if row.type == "tensor"}
