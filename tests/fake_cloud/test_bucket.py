"""The bucket of this machine, through the client that launches use."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from fake_cloud.bucket import FAULTS, bucket_server

# In a process of its own: tensorstore reads the address once.
CLIENT = """
import json, sys, tensorstore
from gemsmith.system import storage as bucket
bucket._PAUSES_S = (0.0,) * 9
context = tensorstore.Context({"gcs_request_retries": {"initial_delay": "1ms", "max_delay": "5ms"}})
patient = tensorstore.KvStore.open
tensorstore.KvStore.open = lambda spec, **given: patient(spec, **({"context": context} | given))
store = bucket.Bucket("gs://drill/x")
for number in range(10):
    store.write(f"a/{number}", b"ab" * number)
store.write("a/1", b"again")
store.delete("a/2")
store.delete("never")
store.write("a/folder/", b"")
texts = {name: store.read(name).decode() for name in store.names("a/")}
print(json.dumps({"texts": texts, "gone": store.read("a/2")}))
"""


def seen_by_a_client(bucket) -> dict:
    command = [sys.executable, "-c", CLIENT]
    done = subprocess.run(command, env=os.environ | bucket.environment, capture_output=True, check=True, timeout=60)
    return json.loads(done.stdout)


@pytest.mark.parametrize("fault_share", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
def test_a_client_sees_what_it_wrote_whatever_fails(fault_share):
    with bucket_server(fault_share=fault_share, seed=2) as bucket:
        seen = seen_by_a_client(bucket)
    written = {f"a/{number}": "ab" * number for number in range(10) if number != 2} | {"a/1": "again"}
    assert seen == {"texts": written, "gone": None}
    assert {name.removeprefix("x/") for name in bucket.objects} == written.keys() | {"a/folder/"}
    assert (bucket.faults.keys() == {*FAULTS}) is (fault_share > 0)


def test_a_bucket_that_refuses_is_asked_once_and_told_with_its_answer():
    with bucket_server() as bucket:
        bucket.next_fault = lambda: bucket.faults.update(["403"]) or "403"
        command = [sys.executable, "-c", CLIENT]
        done = subprocess.run(
            command, env=os.environ | bucket.environment, capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == 1 and bucket.faults["403"] == 1 and not bucket.objects
    assert ".MachineError: gs://drill/x: cannot be reached (PERMISSION_DENIED: " in done.stderr.splitlines()[-1]


def test_a_range_behind_the_end_is_refused():
    with bucket_server() as bucket:
        bucket.objects["a"] = (1, b"123")
        request = urllib.request.Request(
            f"{bucket.url}/storage/v1/b/drill/o/a?alt=media", headers={"Range": "bytes=3-"}
        )
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=60)
    assert error.value.code == 416
    error.value.close()
