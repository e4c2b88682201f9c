"""Files that torch saved under the name of another: swapped with it, or a copy of it.

A torch.save archive keeps the name of the file that it was written to as that of its root folder (`root_of`). What a
file holds often fits every rank alike, above all flat partitions and random states, so that nothing else tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ckptools.formats.rank_search.rank_names import COUNTS_STEPS
from ckptools.model.problems import Code, Problem
from ckptools.pickles.reader import Saved

NUMBER = re.compile(r"[0-9]+")


def swapped_files(saved: Iterable[Saved], placed: bool = True) -> Iterator[Problem]:
    """Problems of files of one checkpoint whose archive has the name of another rank, stage, layer or part.

    Where the file of that name is here too, both cannot be what they are called: an error. Where it is not, somebody
    may have renumbered them: a warning, as it is where files are not `placed` by their names, since stages of a
    pipeline have names of their own in them; unless files have each other's names: a resume by rank loads a wrong one.
    Numbers of steps are nothing, since a whole checkpoint may be renamed, and a file whose content states its rank is
    judged by that.
    """
    read = list(saved)
    here = {one.path for one in read}
    others = {one.path: name for one in read if len(read) > 1 and (name := "" if one.claims else _other_name(one))}
    for path, other in others.items():
        both, text = path.with_name(other) in here, f"{path.name} was saved as {other}"
        text += ", which is here too: swapped with it, or a copy of it" if both else ""
        exchanged = path.name in {name for one, name in others.items() if one.parent == path.parent}
        kind = Code.NAMED_AS_ANOTHER_RANK if both and exchanged else Code.NAME_CONTRADICTS
        yield Problem(Code.STRAY_FILE if both and placed else kind, text, files=(path.name,))


def _other_name(saved: Saved) -> str:
    """The name that a file was saved under, where it differs in a number that counts no steps; else empty."""
    stem, dot, suffix = saved.path.name.rpartition(".")
    same = dot and NUMBER.sub("#", stem) == NUMBER.sub("#", saved.root)
    return saved.root + dot + suffix if same and _numbers(stem) != _numbers(saved.root) else ""


def _numbers(name: str) -> list[str]:
    return NUMBER.findall(COUNTS_STEPS.sub("", name))
