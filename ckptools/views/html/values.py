"""Plain values as HTML: mappings of a checkpoint's tree, and objects of foreign classes by their fields."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from ckptools.dtypes import short
from ckptools.model.tensor import Tensor
from ckptools.model.values import Opaque
from ckptools.text import plural, shape, size
from ckptools.training_state.sections import Section
from ckptools.views.html.page import MAX_LINE, MAX_ROWS, MAX_TEXT, Page
from ckptools.views.tables import Column
from ckptools.views.value_text import key_name, value_text

COLUMNS = (Column("key", name=True), Column("value"), Column("dtype"), Column("size", right=True))


def values_html(values: Mapping[Any, Any]) -> str:
    """A mapping of a checkpoint's tree: a row for each key, with its value, dtype and size."""
    page = Page("dict(...) of this")
    value_table(page, plural(len(values), "key"), values)
    return page.html()


def section_html(section: Section) -> str:
    """A section of a checkpoint: what it is, and what it holds."""
    page = Page(f"ckptools.open(...).records({section.name!r})")
    page.line(repr(section))
    if isinstance(section.value, Mapping):
        value_table(page, plural(len(section.value), "key"), section.value)
    else:
        page.line(value_text(section.value, MAX_LINE))
    return page.html()


def opaque_html(value: Opaque) -> str:
    """An object of a foreign class, which was never made: what the file says of it."""
    page = Page(".fields of this")
    page.line(f"an object of {value.name}, kept as data: its class is not imported and nothing of it was run")
    value_table(page, plural(len(value.fields), "field"), value.fields)
    return page.html()


def value_table(page: Page, title: str, values: Mapping[Any, Any], opened: bool = True) -> None:
    """A row for each key of a mapping, of which the first are made."""
    rows = [_cells(key, value) for key, value in islice(values.items(), MAX_ROWS)]
    columns = COLUMNS if any(row[2] for row in rows) else COLUMNS[:2]
    page.table(title, columns, [row[: len(columns)] for row in rows], len(values), opened)


def _cells(key: Any, value: Any) -> tuple[str, ...]:
    if isinstance(value, Tensor):
        return key_name(key), f"tensor {shape(value.shape)}", short(value.dtype), size(value.nbytes)
    return key_name(key), value_text(value, MAX_TEXT), "", ""
