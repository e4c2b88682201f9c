"""A store that fails: either what is read is right, or one line says which file of which bucket could not be read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.files.opening import location
from ckptools.files.remote import path as remote_path
from tests import unreliable_store as store
from tests.object_store import BUCKET, Bucketful
from tests.truth import FIXTURES
from tests.unreliable_store import Fault, Proxy, failed, proxy_of

NAME = "torch2.13.0-fsdp1-sharded-w4"
URL = f"s3://{BUCKET}/{NAME}/rank0.pt"

PASSING = {
    "slow": store.slow,
    "dropped": store.dropped,
    "500": failed(500),
    "503": failed(503),
}
"""What is tried again."""

LASTING = {
    "slow": (store.slow, "no answer after"),
    "dropped": (store.dropped, "response body error"),
    "shorter": (store.shorter, "Requested 0..4096, got 0..2048"),
    "of another place": (store.elsewhere, "Requested 0..4096, got 1..4097"),
    "whole": (store.without_range, "non-partial response when range requested"),
    "another version": (store.another_version, "was replaced by another version"),
    "403": (failed(403), "access denied by the store"),
    "404": (failed(404), "was removed meanwhile"),
    "416": (failed(416), "416 Range Not Satisfiable"),
    "500": (failed(500), "500"),
}
"""What is not, or does not end; and what is said of it."""


@pytest.fixture
def proxy(bucket: Bucketful, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    bucket.put(FIXTURES / NAME)
    monkeypatch.setattr(remote_path, "_stores", {})  # those know the address that they were made with
    with proxy_of(bucket.address) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.address)
        monkeypatch.setenv("CKPTOOLS_TIMEOUT", "0.5")
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_fails_once_is_tried_again(fault: Fault, proxy: Proxy):
    here = ckptools.open(FIXTURES / NAME / "rank0.pt").model
    proxy.faults = [fault]
    there = ckptools.open(URL).model
    proxy.faults.append(fault)
    assert [there[key].numpy().tobytes() for key in here] == [here[key].numpy().tobytes() for key in here]
    assert not proxy.faults


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "said"), LASTING.values(), ids=LASTING)
def test_what_goes_on_failing_is_one_line_with_bucket_and_key(fault: Fault, said: str, proxy: Proxy):
    proxy.always = fault
    done = CliRunner().invoke(app, ["inspect", URL])
    assert done.exit_code == 3 and not done.stdout
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"error: {URL}: ") and said in done.stderr


@pytest.mark.slow
def test_every_range_is_asked_for_in_the_version_that_was_listed(proxy: Proxy):
    ckptools.open(URL.rpartition("/")[0], all_ranks=True)
    listed = {file.store.status(file.key).version for file in location(URL).parent.iterdir()}
    assert set(proxy.versions) == listed
