"""Lists of hosts as SLURM and PBS write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptools.cluster import environment


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", ["login"]),
        ("a,b-1.site.example", ["a", "b-1.site.example"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("node[9-11]", ["node9", "node10", "node11"]),
        ("rack[1-2]n[01-02],login", ["rack1n01", "rack1n02", "rack2n01", "rack2n02", "login"]),
        ("gpu[1-2]-ib", ["gpu1-ib", "gpu2-ib"]),
    ],
)
def test_a_short_form_names_every_host_in_order(text: str, hosts: list[str]) -> None:
    assert environment.expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "node[1-", "node]1[", "a,,b", "node[x-y]", "node[]", "a b"])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        environment.expand_hosts(text)


def test_tasks_per_node_are_repeated_as_often_as_they_say() -> None:
    assert environment.expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="no list of tasks"):
        environment.expand_counts("2(y3)")


def test_a_node_file_has_a_line_for_every_process(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\n")
    assert environment.read_node_file(str(tmp_path / "nodes")) == ["a", "a", "b"]
    with pytest.raises(ValueError, match="cannot be read"):
        environment.read_node_file(str(tmp_path / "none"))
