"""Files of `tools.simulated` have the metadata of a large model, are cut as FSDP2 cuts it, and pass for no values."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

import ckptools
from ckptools.errors import NotWholeError
from tests.training.rank_files import ckptools as command
from tests.training.rank_files import load
from tests.truth import FIXTURES
from tools import simulated
from tools.simulated import LLAMA3_70B, HollowDcp, HollowRun, create, llama3

LARGE = {"emb.weight": (1000, 4096), "norm.weight": (4096,), "start": (2, 3)}
"""Rows that three ranks do not share evenly, and fewer rows than ranks."""


AS_ZEROS: dict[str, Any] = {"allow_missing": True, "fill": "zero"}
"""How a plan is made of what nobody wrote."""


def hollow(out: Path, layout: str = "composer") -> list[Path]:
    return create(out, LARGE, 3, layout)


def run_of(world_size: int, shapes: dict[str, tuple[int, ...]] = LARGE) -> HollowRun:
    return HollowRun(shapes, world_size)


@pytest.mark.parametrize("rank", [2, 77, 255, 299])
def test_a_file_made_of_another_ranks_is_what_torch_saves_for_this_rank(rank: int, tmp_path: Path) -> None:
    (made,) = (made for made, ranks in simulated.rank_files(run_of(300)) if rank in ranks)
    made.write(tmp_path / "hollow.pt", rank)
    pickled, records = simulated._saved(run_of(300), rank)
    sizes = [(name, content if isinstance(content, int) else len(content)) for name, content in records]
    with zipfile.ZipFile(tmp_path / "hollow.pt") as archive:
        assert archive.read("hollow/data.pkl") == pickled
        assert [(name, archive.getinfo(f"hollow/{name}").file_size) for name, _ in sizes] == sizes


def test_pickles_that_differ_in_more_than_the_rank_are_not_patched() -> None:
    assert simulated._places(b"K\x04.K\x04.", b"K\x05.K\x05.", 4, 1) == (1, 4)
    assert simulated._places(b"M\xff\x01.", b"M\x00\x02.", 511, 2) == (1,)
    with pytest.raises(RuntimeError, match="rank 4 and 5 differ in more than the rank, at byte 1"):
        simulated._places(b"K\x04.", b"K\x07.", 4, 1)


def test_a_rank_of_the_mesh_finds_itself_and_all_others_in_its_file(tmp_path: Path) -> None:
    weight = load(hollow(tmp_path / "run")[2])["state"]["model"]["emb.weight"]
    assert (weight.shape, weight._local_tensor.shape) == ((1000, 4096), (332, 4096))
    mesh = weight.device_mesh
    assert (list(mesh.get_coordinate()), mesh.mesh.tolist()) == ([2], [0, 1, 2])


@pytest.mark.parametrize("layout", ["composer", "dcp", "huggingface"])
def test_a_hollow_checkpoint_is_covered_exactly_and_said_to_hold_nothing(layout: str, tmp_path: Path) -> None:
    files = [path.stat() for path in hollow(tmp_path / "run", layout)]
    assert sum(file.st_size for file in files) > 8_000_000 > 10 * sum(file.st_blocks * 512 for file in files)
    found = ckptools.verify(tmp_path / "run", values=True)
    (problem,) = found.problems
    assert (problem.code, problem.severity) == ("CK017", "error")
    assert "take no space on the disk (holes, which read as zeros: never written" in problem.message
    checks = {check.name: check.result for check in found.checks}
    assert (checks["files"], checks["layout"], checks["finite values"]) == ("FAIL", "ok", "ok")


def test_no_record_of_a_hole_states_a_checksum(tmp_path: Path) -> None:
    hollow(tmp_path / "run")
    done = ckptools.consolidate(tmp_path / "run", tmp_path / "model.safetensors", dry_run=True, check=True, **AS_ZEROS)
    assert done.checksums is not None
    assert (done.checksums.right, done.checksums.without) == (0, 8)  # `start` is on two ranks of three


def test_the_metadata_of_a_hollow_dcp_is_that_of_real_ranks() -> None:
    folder = FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt"
    real = pickle.loads((folder / ".metadata").read_bytes())
    tensors = {k: v for k, v in real.state_dict_metadata.items() if k.startswith("model.") and len(v.chunks) == 3}
    assert len(tensors) > 5
    mine: Any = HollowDcp(run_of(3, {key[6:]: tuple(v.size) for key, v in tensors.items()})).metadata()
    for key, theirs in tensors.items():
        assert sorted(mine.state_dict_metadata[key].chunks, key=str) == sorted(theirs.chunks, key=str)
        assert mine.planner_data[key] == real.planner_data[key]
        assert places(mine, key) == places(real, key)


def places(metadata: Any, key: str) -> dict[Any, str]:
    """In which file each shard of a tensor is, by its offsets."""
    return {at.offset: info.relative_path for at, info in metadata.storage_data.items() if at.fqn == key}


def test_every_item_of_a_hollow_dcp_begins_where_metadata_says(tmp_path: Path) -> None:
    hollow(tmp_path / "run", "dcp")
    model = ckptools.open(tmp_path / "run").model
    assert {name: tensor.shape for name, tensor in model.items()} == LARGE
    assert [int(tensor.load().count_nonzero()) for tensor in model.values()] == [0, 0, 0]


def test_llama_3_70b_is_planned_as_141_gb_of_bfloat16(tmp_path: Path) -> None:
    create(tmp_path / "run", llama3(*LLAMA3_70B), 2, "huggingface")
    with pytest.raises(NotWholeError, match="CK017"):
        ckptools.consolidate(tmp_path / "run", tmp_path / "model.safetensors", dry_run=True)
    done = ckptools.consolidate(tmp_path / "run", tmp_path / "model.safetensors", dry_run=True, **AS_ZEROS)
    assert done.planned is not None
    assert (done.tensors, done.planned.nbytes) == (723, 141_107_412_992)
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


@pytest.mark.slow
def test_several_processes_write_what_one_does(tmp_path: Path) -> None:
    one, two = (create(tmp_path / f"{jobs} jobs", LARGE, 3, "dcp", jobs) for jobs in (1, 2))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_a_dry_run_shows_its_plan_before_it_says_that_there_is_no_room(tmp_path: Path) -> None:
    # Each tensor of 4 TiB gets a file of its own.
    create(tmp_path / "run", {f"w{n}": (1 << 31, 1 << 10) for n in range(9)}, 1, "huggingface", max_shard_size="1GB")
    plan = ["--dry-run", "--allow-missing", "--fill", "zero"]
    done = command("consolidate", tmp_path / "run", "-o", tmp_path / "model.safetensors", *plan)
    assert (done.returncode, "9 tensors, 36.0 TiB" in done.stdout) == (4, True)
    assert re.search(r"bytes free; the output needs 39582418\d+ and 1.0 MiB to spare; -o", done.stderr)
