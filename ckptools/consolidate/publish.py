"""Running a plan to its end: copy, prove, and only then give the output its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptools.consolidate.execute import Executor
from ckptools.consolidate.output import check_unchanged
from ckptools.consolidate.writers.layout import Layout
from ckptools.errors import WriteError
from ckptools.files.opening import OpenFiles
from ckptools.files.partial_files import PartialFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.tensor_io.progress import Progress, not_told
from ckptools.tensor_io.records import Record


@dataclass(frozen=True)
class Proofs:
    """What is done to an output before it gets its name.

    Attributes:
        sources: compare the sources with the checksums that they state, on the way.
        compare: read it back and compare it with the shards.
        manifest: where its digests go; None for nowhere.
    """

    sources: bool
    compare: bool
    manifest: Path | None

    @property
    def paths(self) -> list[Path]:
        """Files that this adds."""
        return [self.manifest] if self.manifest is not None else []


@dataclass(frozen=True)
class Seen:
    """What was seen while an output was written.

    Attributes:
        right: source records that have the CRC-32 that they state; None when they were not compared.
        odd: fqns of tensors in which NaN or infinity was seen, in order.
        read_back: how the output was read back and compared; empty when it was not.
    """

    right: frozenset[Record] | None
    odd: tuple[str, ...] = ()
    read_back: str = ""


def write(
    checkpoint: Checkpoint,
    layout: Layout,
    new_folder: Path | None,
    texts: Mapping[Path, str],
    files: OpenFiles,
    proofs: Proofs,
    jobs: int,
    progress: Progress | None,
) -> Seen:
    """Write a planned output; it appears whole, or not at all. `new_folder` is made for it.

    Raises:
        DamagedError: a source is not what its checksum says.
        ReadError: a source cannot be read, or changed meanwhile.
        WriteError: the output cannot be written, or is not what was written.
    """
    with PartialFiles() as partial:
        if new_folder is not None:
            partial.make_folder(new_folder)
        if layout.folder is not None:
            partial.create_folder(layout.folder)
        targets = [partial.create(path, size) for path, size in layout.files]
        executor = Executor(targets, files, layout.checksums, proofs.sources, progress)
        crcs = executor.run(layout.jobs, jobs)
        try:
            layout.finish(targets, crcs)
            told = ""
            if proofs.compare:
                from ckptools.consolidate.read_back import compare

                paths = [partial.place(path) for path, _ in layout.files]
                told = compare(layout, targets, paths, files, jobs, progress or not_told)
            for path, text in {**texts, **_manifest(layout, targets, proofs, jobs)}.items():
                partial.add_text(path, text)
        except OSError as error:
            raise WriteError(layout.files[0][0], f"cannot write: {(error.strerror or '').lower()}") from error
        check_unchanged(checkpoint)
        partial.publish()
    right = None if executor.records is None else frozenset(executor.records.right)
    return Seen(right, tuple(dict.fromkeys(job.fqn for job in layout.jobs if job.fqn in executor.odd)), told)


def _manifest(layout: Layout, targets: Sequence[int], proofs: Proofs, jobs: int) -> dict[Path, str]:
    """The output's manifest, if it is asked for."""
    if proofs.manifest is None:
        return {}
    from ckptools.consolidate.manifest import manifest_json

    return {proofs.manifest: manifest_json(layout, targets, jobs)}
