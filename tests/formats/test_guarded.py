"""A format of another package that fails: what is said, word for word, and what is raised."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptools.errors import CkptoolsError, ReadError
from ckptools.formats.registry import Guarded, PluginWarning

PATH = Path("run/x.mine")


def guarded(error: Exception) -> Guarded:
    def fails(*_: object) -> None:
        raise error

    return Guarded(SimpleNamespace(NAME="mine", READS="", KNOWN_BY="", detect=fails, read=fails))


def test_a_detection_that_fails_is_a_warning_with_the_kind_of_error():
    with pytest.warns(PluginWarning) as told:
        assert guarded(KeyError("k")).detect(PATH) is False
    said = "format mine from another package: detect failed on x.mine: KeyError: 'k'; it is left out"
    assert [str(one.message) for one in told] == [said]


def test_a_reader_that_fails_is_named_with_the_kind_of_error():
    with pytest.raises(CkptoolsError) as error:
        guarded(ZeroDivisionError("by zero")).read(PATH, None)
    assert error.value.path == PATH
    assert error.value.reason == ("the format mine, which another package brings, failed: ZeroDivisionError: by zero")


def test_an_error_of_ours_passes_as_it_is():
    with warnings.catch_warnings(), pytest.raises(ReadError) as error:
        warnings.simplefilter("error")
        guarded(ReadError(PATH, "is cut")).read(PATH, None)
    assert (error.value.path, error.value.reason) == (PATH, "is cut")
