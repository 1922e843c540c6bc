import json

import pytest

from gemsmith.launch.providers.gcloud import (
    account_checks,
    bucket_checks,
    first_checks,
    image_check,
    secret_checks,
    subnet_check,
)

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
    assert not secret_checks(launched())


def test_a_secret_that_is_named_is_looked_for(launched):
    hub = ("checkpoint=google/gemma-4-31B-it",)
    request = launched(overrides=hub, stages="plan,data,train", machine="cloud-run-44", secret="mine")
    assert by_name(secret_checks(request), "secret mine")


@pytest.mark.parametrize(("given", "fine"), [("10.0.0.0/26", True), ("10.0.0.0/24", True), ("10.0.0.0/28", False)])
def test_a_subnet_must_be_large_enough(launched, given, fine):
    (check,) = subnet_check(launched(network="n", subnet="s"))
    assert (check.complaint(given + "\n") is None) is fine
    assert subnet_check(launched()) == []


def test_an_image_that_is_not_there_is_built_with_one_command(launched):
    make = (
        "gcloud artifacts repositories create gemsmith --repository-format docker --location us-east5 --project demo-"
    )
    check = image_check(launched("tpu-vm"))
    assert check.remedy.startswith(make) and "_STACK=train-tpu,_REGION=us-east5" in check.remedy
    assert image_check(launched(image="us-docker.pkg.dev/p/own/mine:1")).remedy.startswith("push it there")


def test_an_image_of_another_registry_is_asked_for_there_and_does_not_stop_a_launch(launched):
    check = image_check(launched("tpu-vm", image="ghcr.io/me/gemsmith:1"))
    assert check.command == ("docker", "manifest", "inspect", "ghcr.io/me/gemsmith:1") and not check.needed
