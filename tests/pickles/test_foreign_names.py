from __future__ import annotations

import pytest

from ckptools.inspect.record import inspect_report
from ckptools.model.tree import Opaque
from ckptools.pickles.foreign_names import foreign_classes
from tests.display.made import checkpoint


def suspicious(*names: str, tree: object = None) -> tuple[str, ...]:
    return inspect_report(checkpoint({"step": 1} if tree is None else tree, names=names)).suspicious


@pytest.mark.parametrize(
    "name",
    ["os.system", "posix.system", "nt.system", "subprocess.Popen", "builtins.eval", "__builtin__.exec",
     "runpy._run_code", "builtins.__import__", "builtins.getattr", "importlib.import_module", "torch.hub.load",
     "torch.load", "torch.storage._load_from_bytes", "pickle.loads", "my.pkg.os.system", "a.__class__.__subclasses__",
     "torch.jit.load", "sys.modules.get", "operator.attrgetter", "socket.socket", "shutil.rmtree", "webbrowser.open"],
)  # fmt: skip
def test_a_name_that_could_run_code_is_told(name):
    assert suspicious("collections.OrderedDict", name) == (name,)


@pytest.mark.parametrize(
    "name",
    ["collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch.FloatStorage", "builtins.set",
     "__builtin__.frozenset", "argparse.Namespace", "composer.core.time.Time", "my.code.Config", "pathlib.PosixPath",
     "__main__.Args", "numpy.dtype", "builtins.KeyError", "functools.partial", "__builtin__.xrange", "builtins.slice",
     "builtins.memoryview"],
)  # fmt: skip
def test_a_harmless_name_is_not(name):
    assert suspicious(name) == ()


def test_the_getattr_of_a_sharded_tensor_is_harmless_until_it_is_called_otherwise():
    names = ("__builtin__.getattr", "torch.distributed._shard.sharded_tensor.api.ShardedTensor.ProcessGroupState")
    assert suspicious(*names) == ()
    assert suspicious(*names, tree={"x": Opaque("__builtin__.getattr")}) == ("__builtin__.getattr",)


def test_foreign_classes_are_found_inside_each_other():
    outer = Opaque("pkg.Outer", (Opaque("pkg.Argument"),))
    outer.state = {"inner": [Opaque("pkg.Inner")]}
    outer.items = [(Opaque("pkg.Key"), 1)]
    found = foreign_classes({"state": {"args": outer}})
    assert set(found) == {"pkg.Outer", "pkg.Argument", "pkg.Inner", "pkg.Key"}
    assert found["pkg.Outer"] == [("state", "args")]


def test_a_foreign_object_that_holds_itself_ends():
    loop = Opaque("pkg.Loop")
    loop.state = {"me": loop}
    assert set(foreign_classes([loop, loop])) == {"pkg.Loop"}


def test_many_foreign_classes_are_one_calm_line():
    tree = {str(n): Opaque(f"pkg.Class{n}") for n in range(500)}
    (problem,) = inspect_report(checkpoint(tree)).problems
    assert "500 foreign classes, kept as data" in problem.message and len(problem.message) < 200
    assert problem.message.endswith("pkg.Class2 at 2 and 497 more")


def test_what_was_found_is_a_problem_with_a_code():
    report = inspect_report(checkpoint({"a": Opaque("pkg.A"), "b": Opaque("pkg.A")}, names=("os.system", "pkg.A")))
    assert [(p.code, p.severity) for p in report.problems] == [("CK302", "warning"), ("CK301", "note")]
    assert "a foreign class" in report.problems[1].message
    assert report.problems[1].message.endswith("pkg.A at a and 1 more place")
    assert report.problems[0].message == "the pickle names os.system, which could run code; ckptools ran nothing"
    assert (report.verdict.whole, report.verdict.headline) == (True, "whole, 1 warning: name that could run code")
