"""Does the installed torch have the names that a pickle mentions? Modules not yet imported are searched as text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path


def torch_version() -> str:
    """Version of the installed torch, such as `2.13.0`."""
    import torch

    return str(torch.__version__)


def names_that_torch_lacks(names: Iterable[str]) -> list[str]:
    """Find the names, such as `torch.distributed._mesh_layout._MeshLayout`, that the installed torch lacks."""
    import torch

    home = Path(torch.__path__[0])
    return sorted({name for name in names if name.startswith("torch.") and not _has(home, name)})


def _has(home: Path, dotted: str) -> bool:
    """Whether an imported module of torch, or the text of a module not imported, has a name.

    A name inside a class, such as a field, is searched as a word in the module's text. A module with `import *`, such
    as `torch/distributed/_tensor/api.py`, also has the names of the imported module.
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
