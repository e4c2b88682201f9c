"""An output in a bucket: its files are uploaded in bounded memory while they are written, and appear at the end.

Each file is an upload of many parts, which has no name in the store until it is completed. All files together are one
stream of bytes (`InOrder`): threads write tensors into it at their offsets. One upload after the other takes its bytes
from the stream, in order, and adds the headers between tensors. An upload that has sent all its parts waits for the
others before it is completed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from threading import Event, Thread

from ckptools.cluster.team import current
from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.output_place import Replaced
from ckptools.consolidate.writers.layout import Framing, OutputLayout
from ckptools.errors import CkptoolsError, UsageError, WriteError
from ckptools.files.opening import WINDOW, InOrder, OpenFiles, StoppedError
from ckptools.files.remote.path import RemotePath, refreshed
from ckptools.option import spelled
from ckptools.tensor_io.checksums import crc32
from ckptools.tensor_io.fetch_ahead import Progress


def check_can_upload(out: Path, options: ConsolidateOptions) -> None:
    """Refuse options that need random access to an unfinished output."""
    if options.resume:
        raise UsageError(out, f"{spelled('resume')} needs an output on a disk; of one in a bucket nothing is kept")
    if options.manifest:
        raise UsageError(out, f"{spelled('manifest')} needs an output on a disk, which is read again for it")
    if current().world_size > 1:
        raise UsageError(out, "several processes need an output on a disk; in a bucket one process writes it")


class _Target:
    def __init__(self, whole: MultipartOutput, start: int) -> None:
        self._whole, self._start = whole, start

    def write(self, offset: int, data: bytes | memoryview) -> None:
        self._whole.write(self._start + offset, data)

    def stop(self) -> None:
        self._whole.stop()


class MultipartOutput:
    """Output files that appear in a store together; files not published by the end of a `with` block are removed.

    A killed process may leave parts without a name, which the store keeps until the upload is aborted. Methods raise a
    WriteError if the store fails or refuses.

    Attributes:
        crcs: CRC-32 of the bytes sent for each job.
        descriptors: always empty, as no file is open on this machine.
    """

    def __init__(self, layout: OutputLayout) -> None:
        self._layout = layout
        self._paths = [remote(path) for path, _ in layout.files]
        *self._starts, self._nbytes = accumulate((size for _, size in layout.files), initial=0)
        self._bytes = InOrder(WINDOW)
        self._may_end = [Event() for _ in self._paths]
        self._threads: list[Thread] = []
        self._there: list[RemotePath] = []
        self._error: WriteError | None = None
        self._stopped = False
        self.descriptors: Sequence[int] = ()
        self.targets = [_Target(self, start) for start in self._starts]
        self.crcs = [0] * len(layout.jobs)

    def __enter__(self) -> MultipartOutput:
        self._begin(0)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()
        there, self._there, self._threads = self._there, [], []
        _delete(there)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes of a tensor at an offset in the stream of all files."""
        try:
            self._bytes.write(offset, data)
        except StoppedError:
            raise self._error or CkptoolsError(None, "stopped") from None

    def stop(self) -> None:
        """Abort all uploads."""
        self._stopped = True
        self._bytes.stop()
        for event in self._may_end:
            event.set()

    def finish(self, crcs: Sequence[int]) -> None:
        """Wait until the uploads have sent every byte; compare the CRC-32 of each tensor as it was read and as sent."""
        try:
            self._bytes.wait_for(self._nbytes)
        except StoppedError:
            raise self._error or CkptoolsError(None, "stopped") from None
        for job, read, sent in zip(self._layout.jobs, crcs, self.crcs, strict=True):
            if read != sent:
                raise CkptoolsError(self._paths[job.file], f"{job.fqn}: other bytes were sent than were read")

    def publish(self, texts: Mapping[Path, str | bytes], earlier: Replaced | None) -> None:
        """Let the files appear: the last file after the others, then small text files.

        They replace the `earlier` files. If this is None, no file may have any of the names.
        """
        index = [remote(path) for path in texts]
        if earlier is None:
            refreshed(self._paths[0])
            for path in (*self._paths, *index):
                if RemotePath(str(path)).exists():
                    raise WriteError(
                        path, f"has appeared meanwhile; nothing was written, {spelled('force', True)} overwrites it"
                    )
        else:
            # Without the index or metadata, old and new files cannot pass for one output. Each path is looked up in a
            # fresh listing.
            metadata = self._paths[-1:] if self._layout.folder is not None else []
            _delete([path for path in (*map(remote, earlier.first), *metadata) if RemotePath(str(path)).exists()])
        for some in (slice(0, -1), slice(-1, None)):
            for event in self._may_end[some]:
                event.set()
            for thread in self._threads[some]:
                thread.join()
            if self._error is not None:
                raise self._error
        for path, text in zip(index, texts.values(), strict=True):
            data = text if isinstance(text, bytes) else text.encode("utf-8")
            try:
                path.store.upload(path.key, len(data), iter([data]))
            except OSError as error:
                raise _not_written(path, error) from error
            self._there.append(path)
        if self._layout.folder is not None:
            folder, new = refreshed(remote(self._layout.folder)), {path.name for path in self._paths}
            _delete([path for path in folder.iterdir() if path.name not in new])
        _delete(list(map(remote, earlier.last if earlier else ())))
        self._there, self._threads = [], []

    def compare(self, files: OpenFiles, threads: int, progress: Progress) -> str:
        """Compare the published files with their sources; return a summary. Files that differ are removed."""
        from ckptools.consolidate.publishing.read_back import compare_uploaded

        refreshed(self._paths[0])
        try:
            return compare_uploaded(self._layout, self.crcs, files, threads, progress)
        except WriteError:
            _delete(self._paths)
            raise

    def _begin(self, number: int) -> None:
        if number < len(self._paths):
            self._threads.append(Thread(target=self._upload, args=(number,), daemon=True))
            self._threads[-1].start()

    def _upload(self, number: int) -> None:
        path = self._paths[number]
        try:
            path.store.upload(path.key, self._layout.files[number][1], self._pieces(number))
            self._there.append(path)
        except StoppedError:
            pass
        except BaseException as error:  # also errors of obstore's Rust code: waiting threads must be woken
            if self._error is None:
                self._error = _not_written(path, error)
            self.stop()

    def _pieces(self, number: int) -> Iterator[bytes]:
        """Yield the bytes of a file in order, then wait until the file may appear."""
        start, at, jobs = self._starts[number], 0, self._layout.jobs
        first, end = (bisect_left(jobs, file, key=lambda job: job.file) for file in (number, number + 1))
        framings: Iterator[tuple[int, Framing | int]] = ((one.offset, one) for one in self._layout.framing(number))
        tensors: Iterator[tuple[int, Framing | int]] = ((jobs[n].offset, n) for n in range(first, end))
        for offset, piece in merge(framings, tensors, key=itemgetter(0)):
            if offset != at:
                raise CkptoolsError(self._paths[number], f"no job writes bytes {at} to {offset}")
            for data in self._framing(piece) if isinstance(piece, Framing) else self._tensor(piece, start + at):
                yield data
                at += len(data)
        self._begin(number + 1)
        self._may_end[number].wait()
        if self._stopped:
            raise StoppedError

    def _framing(self, piece: Framing) -> Iterator[bytes]:
        data = piece.data(self.crcs.__getitem__)
        yield data
        self._bytes.pass_over(len(data))

    def _tensor(self, number: int, start: int) -> Iterator[bytes]:
        for data in self._bytes.take(start, start + self._layout.jobs[number].nbytes):
            self.crcs[number] = crc32(data, self.crcs[number])
            yield data


def remote(path: Path) -> RemotePath:
    """Cast a path that is in a store."""
    assert isinstance(path, RemotePath)
    return path


def _delete(paths: list[RemotePath]) -> None:
    if not paths:
        return
    try:
        paths[0].store.delete([path.key for path in paths])
    except OSError as error:
        raise WriteError(paths[0], f"cannot be removed: {error.strerror}; remove it") from error


def _not_written(path: Path, error: BaseException) -> WriteError:
    if isinstance(error, CkptoolsError):
        return WriteError(path, error.reason)
    said = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    return WriteError(path, f"cannot be written: {said}")
