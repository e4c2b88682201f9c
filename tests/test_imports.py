"""What importing costs, what is public, and that imports point one way."""

from __future__ import annotations

import ast
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

# From the bottom up: a file imports only from its own room and from those in the layers below it, wherever in the file
# it does so: at its top, in a function, or for its annotations alone.
LAYERS = (
    ("_version", "dtypes", "errors", "option", "text"),
    ("model",),
    ("files",),
    ("pickles",),
    ("cluster",),
    ("tensor_io",),
    ("training_state",),
    ("rules",),
    ("formats",),
    ("torch_engine",),
    ("keys",),
    ("display",),
    ("explain", "stats"),
    ("inspect", "verify", "diff", "match", "consolidate"),
    ("contents", "ls"),
    ("pictures",),
    ("doctor", "watch"),
    ("report",),
    ("api",),
    ("browse",),
    ("loading",),
    ("training",),
    ("cli",),
    ("__init__", "__main__"),
)
"""Every room; one that is not here would be checked against nothing."""

ONE_FILE = ("_version", "dtypes", "errors", "option", "text", "__init__", "__main__")
"""Rooms of one file each, which may use those that stand before them in their layer."""


HELD_BY_USERS = ("model.checkpoint", "model.tensor", "contents.record", "diff.record", "ls.record")
"""What users hold, and everything passes around: their methods import rooms above them when they are called."""


def module_of(path: Path) -> str:
    """`formats.dcp.items`; of a package its own name, and `__init__` of ckptools itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts if path.is_relative_to(PACKAGE) else (path.stem,)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in FILES}


def imported(path: Path) -> set[str]:
    """The modules of ckptools that a file names in any import, however deep inside of it.

    Of modules whose methods import rooms above them, those that it imports at its top.
    """
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in tree.body if module_of(path) in HELD_BY_USERS else ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name[9:] in MODULES else str(node.module) for name in named}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name[9:] or "__init__" for name in found if f"{name}.".startswith("ckptools.")}


def graph() -> dict[str, set[str]]:
    """Every module with those that it imports; the registry with the formats that it names."""
    found = {name: imported(path) - {name} for name, path in MODULES.items()}
    found["formats.registry"] |= {f"formats.{known.NAME}" for known in FORMATS}
    return found


def room(module: str) -> str:
    return module.partition(".")[0]


def place(module: str) -> int:
    """The layer of a module, from the bottom up.

    Raises:
        StopIteration: its room is in none.
    """
    return next(n for n, rooms in enumerate(LAYERS) if room(module) in rooms)


def imported_from_above(module: str) -> set[str]:
    """The modules that a module imports from its own layer or from a higher one, and not from its own room."""
    own = room(module)
    beside = [name for name in LAYERS[place(module)] if own in ONE_FILE and name in ONE_FILE]
    return {m for m in imported(MODULES[module]) if place(m) >= place(module) and room(m) not in (own, *beside)}


def in_a_circle(edges: dict[str, set[str]]) -> set[str]:
    """The modules that are on a circle, or on a way from one to another."""
    back: dict[str, set[str]] = {name: set() for name in edges}
    for name, targets in edges.items():
        for target in targets & edges.keys():
            back[target].add(name)
    return set(_without_ends(edges)) & set(_without_ends(back))


def _without_ends(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left when modules that import none of the others are taken away, again and again."""
    left = {name: targets & edges.keys() for name, targets in edges.items()}
    while ends := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in ends:
            del left[name]
    return left


def test_every_room_is_in_one_layer_and_is_there():
    rooms, listed = {room(module) for module in MODULES}, [name for rooms in LAYERS for name in rooms]
    assert sorted(rooms) == sorted(listed)


def test_imports_point_one_way():
    assert {module: above for module in MODULES if (above := imported_from_above(module))} == {}
    assert in_a_circle(graph()) == set()


def test_an_import_in_a_function_or_for_annotations_counts(tmp_path):
    inside = "def f():\n    from ckptools.display import html\n"
    typed = "if TYPE_CHECKING:\n    from ckptools.api import Checkpoint\n"
    (tmp_path / "m.py").write_text(inside + typed + "import ckptools.cli.commands.inspect\n")
    assert imported(tmp_path / "m.py") == {"display.html", "api", "cli.commands.inspect"}


def test_a_circle_is_found():
    assert in_a_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"c"}, "e": set()}) == {"b", "c"}


def test_a_format_imports_neither_another_way_in_nor_what_opens_it():
    opening = {"formats", "formats.registry", "formats.shards_of_other_ranks"}
    named = {f"formats.{known.NAME}" for known in FORMATS} | {"formats.shared"}
    within = [m for m in MODULES if any(f"{m}.".startswith(f"{name}.") for name in named)]
    assert {m: found for m in within if (found := imported(MODULES[m]) & opening)} == {}


def test_the_page_of_the_architecture_tells_where_everything_is():
    told = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    paths = {name for name in re.findall(r"`([\w/]+(?:\.py|/))`", told) if not name.startswith("tests/")}
    inside = {name for name in paths if (PACKAGE / name).exists()}
    rooms = {room(module) for module in MODULES} - {"_version", "__init__", "__main__"}
    # A module of a room is told by its own name in the room's paragraph.
    assert {name for name in paths - inside if not any(PACKAGE.glob(f"*/{name}"))} == set()
    assert {f"{name}/" if (PACKAGE / name).is_dir() else f"{name}.py" for name in rooms} <= paths


OPENERS = ("open.py", "shards_of_other_ranks.py")
"""What finds the format of a path; a format is handed what its options tell, and opens nothing by itself."""


def test_no_format_imports_what_opens_any_format_not_even_inside_of_a_function():
    folder = PACKAGE / "formats"
    files = [path for path in folder.rglob("*.py") if path.relative_to(folder).as_posix() not in OPENERS]
    nodes = [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text()))]
    found = [(path, f"{n.module}.{a.name}") for path, n in nodes if isinstance(n, ast.ImportFrom) for a in n.names]
    assert [(path.name, name) for path, name in found if name.startswith("ckptools.formats.open")] == []
    # Importing a format runs this one, so that it must be text alone.
    assert len(ast.parse((folder / "__init__.py").read_text()).body) == 1


RANKS, DCP = "torch2.13.0-fsdp1-sharded-w4", "torchtitan-fsdp-tp/ckpt/step-5"
HEAVY = {"torch", "numpy", "rich", "fsspec", "obstore", "aiohttp", "huggingface_hub"}
LIGHT = {
    "the command line": "import ckptools, ckptools.cli",
    "match": "import ckptools.cli.commands.match, ckptools.match.run, ckptools.torch_engine.module_shapes",
    "offline": "import ckptools.torch_engine.offline, ckptools.torch_engine.describe",
    "stats, before it reads": "import ckptools.cli.commands.stats",
    "completion": "from ckptools.cli.arguments import keys_beginning; assert keys_beginning(sys.argv[1], '')",
    "opening": "import ckptools; repr(ckptools.open(sys.argv[1], all_ranks=True))",
    "verify": "import ckptools; assert ckptools.verify(sys.argv[1], deep=True).ok",
    "ls": "import ckptools; ckptools.checkpoints_in(sys.argv[1])",
}
"""Code that reads no values, with a checkpoint as its argument."""

COMMANDS = (
    "--help",
    "inspect {} --all-ranks",
    "tree {} --jsonl",
    "show {} optim.param_groups scheduler step rng",
    "diff {} {}",
)


@pytest.mark.parametrize("what", LIGHT)
@pytest.mark.parametrize("path", [RANKS, DCP])
def test_what_reads_no_values_imports_nothing_large(what, path):
    code = f"import sys; {LIGHT[what]}; print({HEAVY} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code, FIXTURES / path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_reads_no_values_imports_nothing_large(command):
    unwanted = HEAVY if "--" in command else HEAVY | {"typer"}
    code = f"import sys, ckptools.cli\ntry: ckptools.cli.run()\nfinally: print({unwanted} & {{*sys.modules}})"
    words = command.replace("{}", str(FIXTURES / RANKS)).split()
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_importing_ckptools_imports_nothing_before_it_is_asked_for():
    code = "import sys, ckptools; print(sorted(m for m in sys.modules if 'ckptools' in m), callable(ckptools.open))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    named = ["_version", "consolidate", "diff", "doctor", "match", "report", "stats", "verify", "watch"]
    assert done.stdout.strip() == f"{['ckptools', *(f'ckptools.{name}' for name in named)]} True"


@pytest.mark.parametrize(
    "module", ["consolidate.record", "diff.text", "doctor.answers", "report.html", "verify.record"]
)
def test_the_function_has_its_name_whatever_is_imported_of_the_package_before_it(module):
    code = f"import ckptools.{module}, ckptools; print(type(ckptools.{room(module)}).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "function"


def test_all_is_what_is_public():
    public = {n for n in dir(ckptools) if not n.startswith("_")}
    modules = {n for n in public if isinstance(getattr(ckptools, n), type(sys))}
    assert set(ckptools.__all__) == public - modules - {"annotations"}


def test_nothing_in_the_package_could_run_what_a_file_names():
    forbidden = r"pickle\.loads?\(|import_module|(?<![\w.])eval\(|(?<![\w.])exec\(|np\.load\(|__import__|torch\.hub"
    for path in FILES:
        text = path.read_text()
        if path.name in IMPORT_BY_NAME:
            text = text.replace("import_module", "")
        assert not re.search(forbidden, re.sub(r'"[^"\n]*"|`[^`\n]*`', "", text)), path
        if path.name != "offline.py":
            written = re.sub(r'"[^"\n]*"|`[^`\n]*`|""".*?"""', "", text, flags=re.DOTALL)
            assert "torch.load(" not in written, path


IMPORT_BY_NAME = ("registry.py", "start.py", "module_shapes.py")
"""The first two import by names of their own, the last what the user names, as the next three tests hold them to."""


def test_the_registry_imports_only_the_formats_that_its_own_table_names():
    tree = ast.parse((PACKAGE / "formats/registry.py").read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    made = [n.args[0] for n in calls if ast.unparse(n.func) == "Format"]
    assert {ast.literal_eval(n) for n in made} == {f.NAME for f in FORMATS}
    assert [ast.unparse(n) for n in calls if ast.unparse(n.func) == "import_module"] == [
        "import_module(f'ckptools.formats.{self.NAME}')"
    ]


def test_the_command_line_imports_only_the_commands_that_its_own_table_names():
    text = (PACKAGE / "cli/start.py").read_text()
    assert re.findall(r"import_module\(.*?\)", text) == ['import_module(f"ckptools.cli.commands.{name}")']
    assert [path.name for path in FILES if "function_of(" in path.read_text()] == ["start.py"]


def test_users_code_is_imported_by_the_name_that_the_user_gave_and_nowhere_else():
    calls = re.findall(r"import_module\(.*\)", (PACKAGE / "torch_engine/module_shapes.py").read_text())
    named = re.compile(r"shapes_from_function\(.*\)")
    found = {p.name: n for p in FILES for n in named.findall(p.read_text()) if p.name != "module_shapes.py"}
    assert (calls, found) == (["import_module(module)"], {"expected_names.py": "shapes_from_function(str(to))"})


def test_a_format_is_called_as_its_module_or_recipe():
    assert all(known._module().NAME == known.NAME for known in FORMATS)
