"""What `--break` does to a checkpoint is what it says, and the command that it names shows it."""

from __future__ import annotations

import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.errors import UsageError
from ckptools.training import create, damage, launch
from ckptools.training.damage import KINDS
from ckptools.training.options import CreateOptions
from ckptools.training.output import Created
from tests.training.conftest import Command
from tests.training.forked import ckptools_forked, create_forked
from tests.training.rank_files import ckptools, load, local_tensors

ASKED = tuple(
    f"{name}:{'1-2' if kind.others == 'second rank' else '1'}"
    for name, kind in KINDS.items()
    if "run" not in kind.others
)
"""Every kind that needs no other run."""


@pytest.fixture
def ranks(fsdp1: Command, tmp_path: Path) -> Path:
    """Three rank files, to be damaged."""
    return Path(shutil.copytree(fsdp1.out, tmp_path / "run", ignore=shutil.ignore_patterns("full.pt")))


def verified(path: Path, broken: damage.Broken) -> str:
    """What the command says that the run names; its exit code is that of a problem found."""
    values = ["--values"] if broken.asked.kind == "nan" else []
    done = CliRunner().invoke(app, ["verify", str(path), "--deep", *values])
    warned = all("warning" in code for code in broken.shown) and not broken.refused
    assert done.exit_code == (0 if warned else 3 if broken.refused else 1)
    return done.output


def named(broken: damage.Broken, told: str) -> bool:
    """Whether every code that the run names is told beside the rank, or a file, of what is broken."""
    files = [re.escape(name) for name in re.findall(r"[\w.-]+\.(?:pt|distcp)", f"{broken.files} {broken.what}")]
    whose = "|".join([*(rf"ranks? (?:\d+, )*{rank}\b" for rank in broken.asked.ranks), *files, "as files are lost"])
    lines = told.splitlines()
    return all(any(code[:5] in line and re.search(whose, line) for line in lines) for code in broken.shown)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED)
def test_every_damage_of_rank_files_is_shown_with_its_rank(asked: str, ranks: Path) -> None:
    (broken,) = damage.apply(ranks, asked, 0, {})
    assert broken.shown
    assert named(broken, verified(ranks, broken))


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("layout", ["dcp_of_three", "verl_of_three"])
def test_every_damage_of_other_layouts_is_shown_with_its_rank(
    asked: str, layout: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    created: Created = request.getfixturevalue(layout)
    shutil.copytree(created.out, tmp_path / "run")
    (broken,) = damage.apply(tmp_path / "run", asked, 0, {})
    assert broken.shown
    assert named(broken, verified(tmp_path / "run", broken))


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "code"), [("nan:0", "CK201"), ("bitflip:0", "CK004"), ("truncate:0", "")])
def test_damage_of_a_file_that_is_no_ranks_is_shown(asked: str, code: str, snapshot: Created, tmp_path: Path) -> None:
    shutil.copytree(snapshot.out, tmp_path / "run")
    (broken,) = damage.apply(tmp_path / "run", asked, 0, {})
    assert (broken.shown, bool(broken.refused)) == ((code,) if code else (), not code)
    assert code in verified(tmp_path / "run", broken)


def test_a_file_is_cut_at_half_its_size(ranks: Path) -> None:
    before = (ranks / "ep0-ba5-rank2.pt").read_bytes()
    damage.apply(ranks, "truncate:2", 0, {})
    assert (ranks / "ep0-ba5-rank2.pt").read_bytes() == before[: len(before) // 2]


def test_one_bit_of_a_tensor_is_flipped_and_the_seed_says_which(ranks: Path, fsdp1: Command) -> None:
    (broken,) = damage.apply(ranks, "bitflip:1", 3, {})
    sound, found = (folder / "ep0-ba5-rank1.pt" for folder in (fsdp1.out, ranks))
    pairs = list(zip(sound.read_bytes(), found.read_bytes(), strict=True))
    ((at, changed),) = [(at, a ^ b) for at, (a, b) in enumerate(pairs) if a != b]
    assert broken.what.startswith(f"bit {changed.bit_length() - 1} of byte {at} flipped, in state.")
    assert changed.bit_count() == 1
    differing = [k for (k, a), (_, b) in zip(parts(sound), parts(found), strict=True) if not same_bits(a, b)]
    assert len(differing) == 1


def parts(path: Path) -> list[tuple[str, torch.Tensor]]:
    return list(local_tensors(load(path)))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)))


@pytest.mark.slow
def test_another_seed_breaks_another_place(ranks: Path, fsdp1: Command) -> None:
    places = []
    for seed in (0, 0, 1):
        shutil.copytree(fsdp1.out, ranks, dirs_exist_ok=True, ignore=shutil.ignore_patterns("full.pt"))
        places.append(damage.apply(ranks, "bitflip:1", seed, {})[0].what)
    assert places[0] == places[1] != places[2]


def test_a_nan_is_one_value_under_a_checksum_that_is_right(ranks: Path) -> None:
    damage.apply(ranks, "nan:1", 0, {})
    path = ranks / "ep0-ba5-rank1.pt"
    counts = [int(t.isnan().sum()) for _, t in local_tensors(load(path)) if t.is_floating_point()]
    assert sum(counts) == 1
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


@pytest.mark.slow
def test_what_verify_does_not_find_is_not_said_to_be_shown(ranks: Path, torchrun: Command) -> None:
    """The file of a run that is the same to the bit is no damage."""
    (broken,) = damage.apply(ranks, "mixed-run:1", 0, {"another run": torchrun.out})
    assert (broken.shown, broken.seen) == ((), "nothing: the files do not show it")


@pytest.mark.slow
def test_a_real_older_step_and_a_real_other_run_are_shown_with_their_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_start_ranks", lambda options, *_, **__: create_forked(replace(options, damage="")))
    created = create(CreateOptions(tmp_path / "run", world_size=3, steps=2, damage="stale:1,mixed-run:2"))
    assert [(broken.asked.kind, broken.asked.rank) for broken in created.damage] == [("stale", 1), ("mixed-run", 2)]
    assert all("CK006" in broken.shown for broken in created.damage)
    told = CliRunner().invoke(app, ["verify", str(created.out / "ep0-ba2-rank0.pt"), "--deep"]).stdout
    assert "(rank 1: 1, others: 2); they are not of one step" in told
    assert "rank_zero_seed: differs between ranks (rank 2: 1, others: 0); they are not of one run" in told


@pytest.mark.slow
def test_the_command_says_what_it_broke_and_which_command_shows_it(tmp_path: Path) -> None:
    done = ckptools_forked(2, "create", tmp_path / "run", "--steps", 1, "--break", "missing:0,nan:1")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["nan:1", "missing:0"]
    hint = f"try: ckptools verify {tmp_path / 'run'}/ep0-ba1-rank1.pt --deep --values\n"
    assert done.stderr == hint
    shown = ckptools(*hint.split()[2:])
    assert shown.returncode == 1
    assert {"CK001", "CK201"} <= set(re.findall(r"CK\d+", shown.stdout))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("truncat:2", "truncat is not a known damage; choose from nan, bitflip"),
        ("truncate", "truncate takes one rank, as in truncate:2"),
        ("truncate:2-3", "truncate takes one rank"),
        ("swap:1", "swap takes two ranks, as in swap:0-1"),
        ("truncate:-1", "truncate takes one rank"),
        ("truncate:1,bitflip:1", "rank 1 is named twice"),
        ("swap:1-1", "rank 1 is named twice"),
        ("missing:4", "there is no rank 4 in a world of 4"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        damage.check(CreateOptions(tmp_path, damage=text), 4)


@pytest.mark.parametrize("text", ["swap:0-1", "missing:0", "stale:0", "duplicate:0", "truncate:1"])
@pytest.mark.parametrize("layout", ["composer", "snapshot"])
def test_what_one_file_for_all_ranks_cannot_suffer_does_not_apply(text: str, layout: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not apply: .* with ddp is one file"):
        damage.check(CreateOptions(tmp_path, "ddp", layout=layout, damage=text), 4)


def test_an_older_step_and_another_run_must_be_there_to_be_had(tmp_path: Path) -> None:
    options = CreateOptions(tmp_path, steps=1, damage="stale:1")
    with pytest.raises(UsageError, match="--steps 2 or more"):
        damage.check(options, 4)
    with pytest.raises(UsageError, match="trains another run"):
        damage.check(replace(options, steps=2), 4, own_ranks=False)


@pytest.mark.slow
def test_a_refused_damage_trains_nothing(tmp_path: Path) -> None:
    done = ckptools("create", tmp_path / "run", "--break", "swap:0")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "run").exists()


def test_what_is_no_ranks_file_is_rank_0s_to_damage(trainers_ddp: Path, tmp_path: Path) -> None:
    """Accelerate's safetensors state no checksum: a flipped bit goes unseen, and that is said; a NaN does not."""
    shutil.copytree(trainers_ddp / "accelerate", tmp_path / "run")
    (flipped,) = damage.apply(tmp_path / "run", "bitflip:0", 0, {})
    (spoiled,) = damage.apply(tmp_path / "run", "nan:0", 0, {})
    assert (flipped.files, flipped.seen) == ("model.safetensors", "nothing: the files do not show it")
    assert (spoiled.files, spoiled.shown) == ("model.safetensors", ("CK201",))


def test_a_checkpoint_of_which_nothing_is_left_cannot_be_opened(snapshot: Created, tmp_path: Path) -> None:
    shutil.copytree(snapshot.out, tmp_path / "run")
    (broken,) = damage.apply(tmp_path / "run/snapshot.pt", "missing:0", 0, {})
    assert (broken.seen, "snapshot.pt" in broken.refused) == ("cannot be opened", True)


def test_a_rank_without_a_file_is_told_and_nothing_is_damaged(ranks: Path) -> None:
    before = {path.name: path.read_bytes() for path in ranks.iterdir()}
    with pytest.raises(UsageError, match=r"was saved and not damaged: --break missing:7 .* rank 7 has no file"):
        damage.apply(ranks, "truncate:1,missing:7", 0, {})
    assert {path.name: path.read_bytes() for path in ranks.iterdir()} == before
