from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.opening import File, OpenFiles, Window, check_stays_inside, reading


@pytest.fixture
def path(tmp_path):
    (tmp_path / "f").write_bytes(bytes(range(200)))
    return tmp_path / "f"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=st.integers(-5, 210), length=st.integers(-5, 210))
def test_a_read_gives_exactly_what_was_asked_for_or_one_line(path, offset, length):
    with File(path) as file:
        if offset >= 0 and length >= 0 and offset + length <= 200:
            assert file.read(offset, length) == bytes(range(200))[offset : offset + length]
            assert file.bytes_read == length
        else:
            with pytest.raises(ReadError, match="ends at byte 200"):
                file.read(offset, length)


def test_short_reads_are_continued(path, monkeypatch):
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: pread(fd, min(n, 7), at))
    with File(path) as file:
        assert file.read(3, 100) == bytes(range(3, 103))


def test_a_disk_that_fails_is_one_line(path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    with File(path) as file, pytest.raises(ReadError, match="input/output error"):
        file.read(0, 5)


def test_a_file_that_becomes_shorter_is_named(path):
    with File(path) as file:
        os.truncate(path, 50)
        with pytest.raises(ReadError, match="became shorter while it was read: no byte 50"):
            file.read(40, 100)
        with pytest.raises(ReadError, match="became shorter"):
            file.read_all_into(60, memoryview(bytearray(10)))


def test_what_was_opened_is_what_is_read_even_when_the_name_changes_hands(path, tmp_path):
    with File(path) as file:
        (tmp_path / "g").write_bytes(b"x" * 200)
        (tmp_path / "g").replace(path)
        assert file.read(0, 3) == b"\0\1\2"


def test_reading_into_a_buffer_fills_what_there_is(path):
    buffer = bytearray(300)
    with File(path) as file, pytest.raises(ReadError, match="no byte 200"):
        file.read_all_into(150, memoryview(buffer))
    assert buffer[:50] == bytes(range(150, 200))


def test_nothing_but_regular_files_is_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "folder", "/dev/zero"):
        with pytest.raises(UnsafePathError, match="not a regular file"):
            File(tmp_path / name)


def test_a_socket_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        with pytest.raises(ReadError):
            File(tmp_path / "s")


@pytest.mark.parametrize("name", ["absent", "x" * 300, "f/below"])
def test_a_name_that_cannot_be_opened_is_one_line(path, name):
    with pytest.raises(ReadError) as told:
        File(path.parent / name)
    assert "\n" not in str(told.value)


def test_an_oserror_while_looking_is_one_line(tmp_path):
    with pytest.raises(ReadError, match="no such file"), reading(tmp_path):
        (tmp_path / "none").stat()


# -- links --------------------------------------------------------------------------------------------------------


def test_a_link_out_of_the_folder_is_refused_with_the_way_to_allow_it(tmp_path, path):
    folder = tmp_path / "ck"
    folder.mkdir()
    (folder / "rank0.pt").symlink_to(path)
    with pytest.raises(UnsafePathError, match="--follow-symlinks"):
        check_stays_inside(folder / "rank0.pt", folder)


def test_links_within_the_folder_and_plain_files_are_fine(tmp_path, path):
    (tmp_path / "latest").symlink_to("f")
    check_stays_inside(tmp_path / "latest", tmp_path)
    check_stays_inside(path, tmp_path)


def test_a_link_through_a_chain_is_followed_to_its_end(tmp_path, path):
    folder = tmp_path / "ck"
    folder.mkdir()
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("../f")
    with pytest.raises(UnsafePathError):
        check_stays_inside(folder / "a", folder)


def test_a_link_to_itself_is_one_line(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    check_stays_inside(tmp_path / "loop", tmp_path)
    with pytest.raises(ReadError, match="too many levels"):
        File(tmp_path / "loop")


# -- kept open ----------------------------------------------------------------------------------------------------


def test_a_file_is_opened_once_and_lent_again(path):
    with OpenFiles() as files:
        with files.open(path) as first:
            pass
        with files.open(path) as again:
            assert again is first
        with files.open(path) as one, files.open(path) as other:
            assert one is not other


def test_no_more_than_the_limit_stay_open(tmp_path):
    paths = [tmp_path / str(i) for i in range(6)]
    with OpenFiles(limit=2) as files:
        for path in paths:
            path.write_bytes(b"x")
            with files.open(path):
                pass
        assert descriptors(tmp_path) <= 2


def descriptors(below):
    """How many files below a folder this process has open."""
    count = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += str(fd.readlink()).startswith(str(below))
    return count


def test_many_readers_of_one_file_do_not_pile_up(path):
    with OpenFiles(limit=2) as files:
        lent = [files.open(path) for _ in range(10)]
        for one in lent:
            one.__enter__()
        for one in lent:
            one.__exit__(None, None, None)
        assert descriptors(path) <= 2


def test_a_file_that_failed_its_user_is_not_lent_again(path):
    with OpenFiles() as files:
        with pytest.raises(KeyError), files.open(path) as first:
            raise KeyError
        with files.open(path) as again:
            assert again is not first and again.read(0, 1) == b"\0"


def test_threads_share_it(path):
    wrong = []

    def work(files):
        for at in range(100):
            with files.open(path) as file:
                if file.read(at, 1) != bytes([at]):
                    wrong.append(at)

    with OpenFiles(limit=3) as files:
        threads = [threading.Thread(target=work, args=(files,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize(("start", "size"), [(-1, 5), (0, -1), (195, 6), (201, 0)])
def test_a_part_that_does_not_lie_in_its_file_is_one_line(path, start, size):
    with File(path) as file, pytest.raises(ReadError, match=f"ends at byte 200; expected {size} bytes at {start}$"):
        Window(file, start, size)


def test_a_part_reads_its_own_bytes_and_no_others(path):
    with File(path) as file:
        part = Window(file, 195, 5)
        assert part.read(1, 4) == bytes([196, 197, 198, 199])
        with pytest.raises(ReadError, match=r"expected 5 bytes at 1$"):
            part.read(1, 5)
