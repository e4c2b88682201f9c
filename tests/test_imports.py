"""What importing costs, what is public, and that imports point one way."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckptools
from ckptools.formats.registry import FORMATS
from tests.truth import FIXTURES

PACKAGE = Path(ckptools.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# From the bottom up: a file imports nothing from the layers above it, at the top of the file.
LAYERS = (
    ("errors", "dtypes", "text", "_version"),
    ("model", "files", "pickles", "tensor_io", "training_state", "torch_engine"),
    ("formats",),
    ("consolidate", "views", "training", "checks"),
    ("api",),
    ("cli",),
    ("__init__", "__main__"),
)  # fmt: skip
"""Every module and package; one that is not here would be checked against nothing."""


def imported(path: Path) -> set[str]:
    """First parts of the ckptools modules that a file imports when it is imported itself."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ckptools"):
            rest = node.module.split(".")[1:2]
            found |= set(rest) if rest else {a.name for a in node.names}
    return found


def layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def test_every_module_is_in_one_layer():
    modules = sorted({path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES})
    listed = [name for names in LAYERS for name in names]
    assert [name for name in modules if listed.count(name) != 1] == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    own = layer(path.relative_to(PACKAGE).with_suffix("").parts[0])
    assert {name for name in imported(path) if layer(name) > own} == set()


SIDE_BY_SIDE = ("checks", "consolidate", "views")
"""Rooms that know nothing of each other; what two of them need lies below both."""


@pytest.mark.parametrize("room", SIDE_BY_SIDE)
def test_checks_consolidate_and_views_do_not_import_each_other_even_inside_of_functions(room):
    others = tuple(f"ckptools.{other}" for other in SIDE_BY_SIDE if other != room)
    nodes = [(path, node) for path in (PACKAGE / room).rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    found = [(path, f"{n.module}.{a.name}") for path, n in nodes if isinstance(n, ast.ImportFrom) for a in n.names]
    assert [(path.name, name) for path, name in found if name.startswith(others)] == []


OPENERS = ("opening.py", "resolver.py")
"""What finds the format of a path; a format is handed what its options tell, and opens nothing by itself."""


def test_no_format_imports_what_opens_any_format_not_even_inside_of_a_function():
    folder = PACKAGE / "formats"
    files = [path for path in folder.rglob("*.py") if path.relative_to(folder).as_posix() not in OPENERS]
    nodes = [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text()))]
    found = [(path, f"{n.module}.{a.name}") for path, n in nodes if isinstance(n, ast.ImportFrom) for a in n.names]
    assert [(path.name, name) for path, name in found if name.startswith("ckptools.formats.opening")] == []
    assert len(ast.parse((folder / "__init__.py").read_text()).body) == 1, (
        "importing a format runs this; it is text only"
    )


def test_importing_ckptools_imports_neither_torch_nor_numpy_nor_rich():
    code = "import sys, ckptools, ckptools.cli; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_ckptools_imports_nothing_before_it_is_asked_for():
    code = "import sys, ckptools; print(sorted(m for m in sys.modules if 'ckptools' in m), callable(ckptools.open))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ckptools', 'ckptools._version', 'ckptools.consolidate'] True"


def test_the_function_has_its_name_whatever_is_imported_of_the_package_before_it():
    code = "import ckptools.consolidate.plan, ckptools; print(type(ckptools.consolidate).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "function"


def test_verify_imports_neither_torch_nor_numpy_where_no_values_are_looked_at():
    sample = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
    checked = "import sys, ckptools; assert ckptools.verify(sys.argv[1], deep=True).ok"
    code = f"{checked}; print({{'torch', 'numpy'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code, str(sample)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_all_is_what_is_public():
    public = {n for n in dir(ckptools) if not n.startswith("_")}
    modules = {n for n in public if isinstance(getattr(ckptools, n), type(sys))}
    assert set(ckptools.__all__) == public - modules - {"annotations"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_in_the_package_could_run_what_a_file_names(path):
    text = path.read_text()
    if path.name == "registry.py":  # imports formats by names that are its own constants, as the next test holds it to
        text = text.replace("import_module", "")
    forbidden = r"pickle\.loads?\(|import_module|(?<![\w.])eval\(|(?<![\w.])exec\(|np\.load\(|__import__|torch\.hub"
    assert not re.search(forbidden, re.sub(r'"[^"\n]*"|`[^`\n]*`', "", text))
    if path.name not in ("offline.py", "demo.py"):
        assert "torch.load(" not in re.sub(r'"[^"\n]*"|`[^`\n]*`|""".*?"""', "", text, flags=re.DOTALL)


def test_the_registry_imports_only_the_formats_that_its_own_table_names():
    tree = ast.parse((PACKAGE / "formats/registry.py").read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    made = [n.args[0] for n in calls if ast.unparse(n.func) == "OnDemand"]
    assert {ast.literal_eval(n) for n in made} == {f.NAME for f in FORMATS}
    assert [ast.unparse(n) for n in calls if ast.unparse(n.func) == "import_module"] == [
        "import_module(f'ckptools.formats.{self.NAME}')"
    ]


@pytest.mark.parametrize("format_", FORMATS, ids=lambda f: f.NAME)
def test_a_format_is_called_as_its_module(format_):
    assert importlib.import_module(f"ckptools.formats.{format_.NAME}").NAME == format_.NAME
