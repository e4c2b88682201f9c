"""What the torch that is installed has of the names that a checkpoint's pickles mention; nothing is imported for it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path


def torch_version() -> str:
    """The version of torch here, such as `2.13.0`."""
    import torch

    return str(torch.__version__)


def names_that_torch_lacks(names: Iterable[str]) -> list[str]:
    """Names in torch, such as `torch.distributed._mesh_layout._MeshLayout`, that the torch here does not have."""
    import torch

    home = Path(torch.__path__[0])
    return sorted({name for name in names if name.startswith("torch.") and not _has(home, name)})


def _has(home: Path, dotted: str) -> bool:
    """Whether a module file of torch, or one that is loaded, has a name; modules that are not loaded are only read.

    What is inside of a class, such as a field, is looked for as a word beside it. A file that takes all names of other
    modules, as `torch/distributed/_tensor/api.py` does, has those of these modules.
    """
    module, attributes = "torch", dotted.split(".")[1:]
    place = home
    while attributes and attributes[0].isidentifier():
        name, inner = attributes[0], f"{module}.{attributes[0]}"
        if inner in sys.modules or (place / name / "__init__.py").is_file() or (place / f"{name}.py").is_file():
            module, place, attributes = inner, place / name, attributes[1:]
            continue
        break
    if not attributes:
        return True
    loaded = sys.modules.get(module)
    if loaded is not None and not hasattr(loaded, attributes[0]):
        return False
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    words = attributes[1:] if loaded is not None else attributes
    text = file.read_text("utf-8", "replace") if words and file.is_file() else ""
    if all(re.search(rf"\b{re.escape(word)}\b", text) for word in words):
        return True
    others = re.findall(r"^from (torch\.[\w.]+) import \*", text, re.MULTILINE)
    return any(_has(home, ".".join([other, *attributes])) for other in others if other != module)
