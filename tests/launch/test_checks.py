import json

import pytest

from gemsmith.launch.checks import account_checks, bucket_checks, first_checks, image_check, subnet_check

MEMBER = "serviceAccount:gemsmith@demo-project.iam.gserviceaccount.com"


def by_name(checks, part):
    (found,) = [check for check in checks if part in check.name]
    return found


def test_an_api_that_is_not_enabled_is_named(launched):
    check = by_name(first_checks(launched(), apis=("run.googleapis.com", "tpu.googleapis.com")), "APIs")
    assert check.complaint("run.googleapis.com\n") == "not enabled: tpu.googleapis.com"
    assert check.complaint("run.googleapis.com\ntpu.googleapis.com\n") is None


@pytest.mark.parametrize(("location", "complaint"), [("US-CENTRAL1", None), ("US", None), ("EU", "it is in eu")])
def test_the_bucket_must_be_near_the_machine(launched, location, complaint):
    check = by_name(bucket_checks(launched()), "gs://runs in us-central1")
    assert check.complaint(f"{location}\n") == complaint
    assert by_name(bucket_checks(launched()), "gs://weights").remedy.startswith("copy the weights")


def test_the_service_account_has_exactly_the_roles_on_the_buckets(launched):
    checks = account_checks(launched())
    check = by_name(checks, "roles/storage.objectUser on gs://runs")
    bindings = {"bindings": [{"role": "roles/storage.objectUser", "members": [MEMBER]}]}
    assert check.complaint(json.dumps(bindings)) is None
    assert "does not have it" in check.complaint(json.dumps({"bindings": []}))
    assert check.complaint("not json") == "its policy cannot be read"
    assert by_name(checks, "objectViewer on gs://weights")
    assert not [check for check in checks if "secret" in check.name]


def test_a_base_of_the_hub_needs_the_secret(launched):
    request = launched(
        overrides=("checkpoint=google/gemma-4-31B-it",), stages="plan,data,train", machine="cloud-run-44"
    )
    assert by_name(account_checks(request), "secret hf-token")


@pytest.mark.parametrize(("given", "fine"), [("10.0.0.0/26", True), ("10.0.0.0/24", True), ("10.0.0.0/28", False)])
def test_a_subnet_must_be_large_enough(launched, given, fine):
    (check,) = subnet_check(launched(network="n", subnet="s"))
    assert (check.complaint(given + "\n") is None) is fine
    assert subnet_check(launched()) == []


def test_an_image_that_is_not_there_is_built_with_one_command(launched):
    assert "_STACK=train-gpu" in image_check(launched()).remedy
