import json

import pytest

from gemsmith.launch.commands import preflight
from gemsmith.launch.providers import TARGETS

MEMBER = "serviceAccount:gemsmith@demo-project.iam.gserviceaccount.com"


def checks_of(request, on="cloud-run", part=""):
    return [check for check in preflight(request, on, TARGETS[on].values(request)) if part in check.name]


def by_name(request, part, on="cloud-run"):
    (found,) = checks_of(request, on, part)
    return found


def test_an_api_that_is_not_enabled_is_named(launched):
    check = by_name(launched(), "APIs")
    assert check.complaint("run.googleapis.com\n") == "not enabled: storage.googleapis.com"
    assert check.complaint("run.googleapis.com\nstorage.googleapis.com\n") is None


@pytest.mark.parametrize(("location", "complaint"), [("US-CENTRAL1", None), ("US", None), ("EU", "it is in eu")])
def test_the_bucket_must_be_near_the_machine(launched, location, complaint):
    check = by_name(launched(), "gs://runs in us-central1")
    assert check.complaint(f"{location}\n") == complaint
    assert by_name(launched(), "gs://weights in").remedy.startswith("copy the weights")


def test_the_service_account_has_exactly_the_roles_on_the_buckets(launched):
    check = by_name(launched(), "roles/storage.objectUser on gs://runs")
    bindings = {"bindings": [{"role": "roles/storage.objectUser", "members": [MEMBER]}]}
    assert check.complaint(json.dumps(bindings)) is None
    assert "does not have it" in check.complaint(json.dumps({"bindings": []}))
    assert check.complaint("not json") == "its policy cannot be read"
    assert by_name(launched(), "objectViewer on gs://weights")
    assert not checks_of(launched(), part="secret")


def test_a_secret_that_is_named_is_looked_for(launched):
    hub = ("checkpoint=google/gemma-4-31B-it",)
    request = launched(overrides=hub, stages="plan,data,train", machine="cloud-run-44", secret="mine")
    assert by_name(request, "secret mine")


@pytest.mark.parametrize(("given", "fine"), [("10.0.0.0/26", True), ("10.0.0.0/24", True), ("10.0.0.0/28", False)])
def test_a_subnet_must_be_large_enough(launched, given, fine):
    check = by_name(launched(network="n", subnet="s"), "subnet s")
    assert (check.complaint(given + "\n") is None) is fine
    assert not checks_of(launched(), part="subnet")


def test_an_image_that_is_not_there_is_built_with_one_command(launched):
    make = (
        "gcloud artifacts repositories create gemsmith --repository-format docker --location us-east5 --project demo-"
    )
    check = by_name(launched("tpu-vm"), "image", "tpu-vm")
    assert check.remedy.startswith(make) and "_STACK=train-tpu,_REGION=us-east5" in check.remedy
    assert by_name(launched(image="us-docker.pkg.dev/p/own/mine:1"), "image").remedy.startswith("push it there")


def test_an_image_of_another_registry_is_asked_for_there_and_does_not_stop_a_launch(launched):
    check = by_name(launched("tpu-vm", image="ghcr.io/me/gemsmith:1"), "image", "tpu-vm")
    assert check.command == ("docker", "manifest", "inspect", "ghcr.io/me/gemsmith:1") and not check.needed
