"""Files that are cut short, read up to the cut: what is behind it is a gap, and the checkpoint is not whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem, worst_first
from ckptools.pickles.reader import Saved
from ckptools.text import plural
from ckptools.training_state import modules


class SalvagingReader:
    """Reads a torch.save file as the inert reader does, and one that is cut short as far as it is here.

    Attributes:
        cut: files that were read so, with their sizes in bytes.
    """

    def __init__(self) -> None:
        self.cut: dict[Path, int] = {}

    def __call__(self, path: Path) -> Saved:
        """Read one file.

        Raises:
            ReadError: it is damaged, or cut in its pickle.
        """
        saved = modules.read_file(path, salvage=True)
        if saved.cut:
            self.cut[path] = saved.nbytes
        return saved

    def judged(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with each such file marked as cut, and its problem."""
        cut = [file for file in checkpoint.files if file.path in self.cut]
        if not cut:
            return checkpoint
        marked = {file.path: file._replace(status="cut") for file in cut}
        problems = [Problem(Code.FILE_CUT, self._words(file.path), file.rank) for file in cut]
        files = tuple(marked.get(file.path, file) for file in checkpoint.files)
        return replace(checkpoint, files=files, problems=worst_first([*checkpoint.problems, *problems]))

    def _words(self, path: Path) -> str:
        nbytes = plural(self.cut[path], "byte")
        return f"{path.name} is cut short: {nbytes}; what is in front of the cut is read (--salvage)"
