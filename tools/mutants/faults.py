"""Every fault that a line of a module can be given: mutmut's operators, and guards that are dropped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation.mutators import mutation_operators

LOOKUPS = {"get", "pop", "startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split"}
"""Methods whose texts decide something; most other texts are only shown."""

LEFT_OUT = {"strict", "encoding"}
"""Arguments whose change rarely changes anything: `zip` over sides of one length, UTF-8 where it is the default."""


def dropped_clause(node: cst.BooleanOperation) -> Iterator[cst.BaseExpression]:
    """`a and b` becomes `a`, or `b`."""
    for kept in (node.left, node.right):
        yield kept.with_changes(lpar=[*node.lpar, *kept.lpar], rpar=[*kept.rpar, *node.rpar])


def dropped_guard(node: cst.If | cst.CompIf) -> Iterator[cst.CSTNode]:
    """`if a:` becomes `if False:`, or `if True:`; in a comprehension too."""
    for value in ("False", "True"):
        yield node.with_changes(test=cst.Name(value), whitespace_before_test=cst.SimpleWhitespace(" "))


OPERATORS = (*mutation_operators, (cst.BooleanOperation, dropped_clause), ((cst.If, cst.CompIf), dropped_guard))


class Places(cst.CSTVisitor):
    """Collect what can be changed in a module, by line and operator.

    Left out are annotations, decorators, imports, `__repr__`, what only the type checker reads, and texts for people.
    """

    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider)

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, dict[str, list[tuple[cst.CSTNode, cst.CSTNode]]]] = defaultdict(lambda: defaultdict(list))

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_left_out(node):
            return False
        position: Any = self.get_metadata(PositionProvider, node, None)
        for types, operator in OPERATORS if position else ():
            if isinstance(node, types):
                changes = [(node, changed) for changed in self._changed(node, operator)]
                if changes:
                    self.found[position.start.line][operator.__name__] += changes
        return True

    def _changed(self, node: Any, operator: Callable[[Any], Iterable[cst.CSTNode]]) -> Iterator[cst.CSTNode]:
        """What an operator makes of a node, but for texts that are only shown."""
        if isinstance(node, cst.SimpleString):
            if self._is_looked_up(node) and not _is_text(node):
                yield from (c for c in operator(node) if isinstance(c, cst.SimpleString) and "XX" in c.value)
        elif isinstance(node, cst.Assign | cst.AnnAssign):
            if node.value and not _is_text(node.value):
                yield from operator(node)
        elif isinstance(node, cst.Call):
            kept = {id(a) for a in node.args if _is_text(a.value) or (a.keyword and a.keyword.value in LEFT_OUT)}
            yield from (c for c in operator(node) if kept <= {id(a) for a in c.args})  # type: ignore[attr-defined]
        else:
            yield from operator(node)

    def _is_looked_up(self, node: cst.CSTNode) -> bool:
        parent: Any = self.get_metadata(ParentNodeProvider, node)
        if isinstance(parent, cst.Arg):
            call: Any = self.get_metadata(ParentNodeProvider, parent)
            return isinstance(getattr(call, "func", None), cst.Attribute) and call.func.attr.value in LOOKUPS
        return isinstance(parent, cst.Comparison | cst.ComparisonTarget | cst.Index)


def faults_by_line(source: str) -> Mapping[int, Mapping[str, list[Callable[[], str]]]]:
    """Of each line that can be given a fault the module's texts with one, by operator, made when called."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    places = Places()
    wrapper.visit(places)
    module = wrapper.module

    def maker(old: cst.CSTNode, new: cst.CSTNode) -> Callable[[], str]:
        return lambda: cst.ensure_type(module.deep_replace(old, new), cst.Module).code

    return {
        line: {kind: [maker(*change) for change in changes] for kind, changes in sorted(kinds.items())}
        for line, kinds in sorted(places.found.items())
    }


def _is_left_out(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.FunctionDef):
        return node.name.value == "__repr__"
    if isinstance(node, cst.If):
        return isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING"
    if isinstance(node, cst.Assign):
        name = getattr(node.targets[0].target, "value", "")
        return isinstance(name, str) and name.lstrip("_")[:1].isupper() and (name != name.upper() or len(name) == 1)
    if isinstance(node, cst.Arg):
        return node.keyword is not None and node.keyword.value in LEFT_OUT
    return isinstance(node, cst.Annotation | cst.Decorator | cst.Import | cst.ImportFrom)


def _is_text(node: cst.CSTNode) -> bool:
    """Whether an expression is a text for people: one with a blank in it."""
    if isinstance(node, cst.ConcatenatedString):
        return True
    if isinstance(node, cst.FormattedString):
        return any(isinstance(part, cst.FormattedStringText) and " " in part.value for part in node.parts)
    return isinstance(node, cst.SimpleString) and (" " in node.value or len(node.value) <= 3)
