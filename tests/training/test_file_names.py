"""Names by template: what they become, and what is refused before any rank starts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ckptools.errors import UsageError
from ckptools.training import options
from ckptools.training.options import LAYOUTS, CreateOptions, FileOptions
from tests.training.forked import ckptools_forked, create_forked
from tests.training.rank_files import ckptools, load

VALUES = {
    "run_name": "gpt", "epoch": 2, "batch": 50, "rank": 3, "local_rank": 1, "node_rank": 1, "world_size": 4
}  # fmt: skip


def check(template: str, layout: str = "composer", one_writer: bool = False) -> None:
    for fault in options.name_faults(template, layout, one_writer, "gpt"):
        raise UsageError(None, fault)


def test_every_field_is_filled_in() -> None:
    template = "{run_name}/ep{epoch}-ba{batch:06d}-node{node_rank}-gpu{local_rank}-rank{rank}-of-{world_size}.pt"
    check(template)
    assert template.format(**VALUES) == "gpt/ep2-ba000050-node1-gpu1-rank3-of-4.pt"


def test_every_layout_has_a_name_that_passes_its_own_check() -> None:
    assert set(options.NAMES) == set(LAYOUTS)
    for layout, template in options.NAMES.items():
        if template:
            check(template, layout)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("rank{rnk}.pt", "{rnk} is not known; choose from {run_name}, {epoch}, {batch}, {rank}, "),
        ("rank{}.pt", "{} is not known"),
        ("rank{rank.real}.pt", "{rank.real} is not known"),
        ("rank{rank.pt", "a brace without its other half"),
        ("rank{rank!r}.pt", "how {rank} is to be written"),
        ("rank{rank:999999999}.pt", "how {rank} is to be written"),
        ("/tmp/rank{rank}.pt", "is an absolute path"),
        ("a/../rank{rank}.pt", "leads out of OUT by .."),
        ("a//rank{rank}.pt", "has an empty part"),
        ("", "has an empty part"),
        (".rank{rank}.pt", "would be hidden"),
        ("a/b/c/d/rank{rank}.pt", "has more than 4 parts"),
        ("rank{rank}\n.pt", "cannot be printed"),
        ("x" * 250 + "{rank}.pt", "has a part of more than 255 bytes"),
        ("rank{rank}", "names a file, expected .pt, .pth, .bin, .ckpt at its end"),
        ("ep{epoch}-ba{batch}.pt", "two ranks would write one file"),
        ("gpu{local_rank}.pt", "two ranks would write one file"),
        ("{node_rank}{local_rank}.pt", "two ranks would write one file"),
    ],
)
def test_a_template_that_cannot_work_is_refused(template: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        check(template)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("template", ["{rank}.pt", "{node_rank}-{local_rank}.pt", "node{node_rank}/gpu{local_rank}.pt"])
def test_ranks_are_told_apart_by_number_or_by_node_and_place(template: str) -> None:
    check(template)


def test_a_folder_of_all_ranks_has_no_rank_in_its_name() -> None:
    check("step-{batch}", "dcp")
    with pytest.raises(UsageError, match="all ranks write into one folder"):
        check("step-{batch}-{rank}", "dcp")


def test_one_file_of_rank_0_needs_no_rank_in_its_name() -> None:
    check("ep{epoch}.pt", one_writer=True)
    check("model.pt", "snapshot", one_writer=True)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "a\nb"])
def test_a_run_name_is_one_part_of_a_file_name(name: str) -> None:
    with pytest.raises(UsageError, match="--run-name"):
        options.check_options(CreateOptions(Path("run"), files=FileOptions(run_name=name)))


def test_the_gathered_state_keeps_its_name() -> None:
    with pytest.raises(UsageError, match=r"this is what --full writes"):
        options.check_options(CreateOptions(Path("run"), "ddp", files=FileOptions(name="full.pt")))


def test_any_rank_of_any_world_is_recognised() -> None:
    template = "{run_name}/ep{epoch}.{rank:02d}-of-{world_size}.pt"
    expression = options.name_of_any_rank(template, VALUES)
    assert expression == r"gpt/ep2\.\d+\-of\-\d+\.pt"


@pytest.mark.slow
def test_a_bad_template_is_one_line_and_nothing_is_made(tmp_path: Path) -> None:
    done = ckptools("create", tmp_path / "run", "--name", "model.pt")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "two ranks would write one file" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_sub_folders_are_filled_replaced_and_opened(tmp_path: Path) -> None:
    name = "{run_name}/ep{epoch}-ba{batch}/node{node_rank}-gpu{local_rank}-rank{rank}.pt"
    files = FileOptions(name, "gpt")
    made = [
        create_forked(CreateOptions(tmp_path, world_size=n, steps=1, files=files, force=force)).files
        for n, force in ((2, False), (1, True))
    ]
    here = tmp_path / "gpt" / "ep0-ba1"
    assert made == [tuple(here / f"node0-gpu{rank}-rank{rank}.pt" for rank in range(n)) for n in (2, 1)]
    assert list(here.iterdir()) == list(made[1])
    assert load(made[1][0])["state"]["run_name"] == "gpt"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["{rank}-of-{world_size}.pt", "{rank}/model.pt"])
def test_what_is_said_to_try_opens_names_that_do_not_say_rank(name: str, tmp_path: Path) -> None:
    done = ckptools_forked(2, "create", tmp_path / "run", "--steps", 1, "--name", name)
    command = shlex.split(done.stderr.removeprefix("try: ckptools "))
    opened = json.loads(ckptools(*command, "--json").stdout)
    assert (opened["whole"], opened["world_size"]["value"]) == (True, 2)
