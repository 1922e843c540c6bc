import pytest
import yaml

from gemsmith.launch.commands import preflight, resources
from gemsmith.launch.provider import write_launch
from gemsmith.launch.providers import skypilot as sky
from gemsmith.launch.submit import ask, clean, stop
from gemsmith.system.console import open_console

QUEUE = "ID  TASK  NAME   STATUS\n1   -     big    RUNNING\n2   -     bigger RUNNING\n"


def task(request):
    return yaml.safe_load(sky.render(request)["task.yaml"])


def test_any_machine_that_fits_is_taken_and_the_bill_is_the_dearest_one_s(launched):
    request = launched("sky")
    rows = task(request)["resources"]["any_of"]
    assert [row["accelerators"] for row in rows] == ["tpu-v6e-4", "tpu-v5p-8", "tpu-v6e-8"]
    assert rows[2]["infra"] == "gcp/us-central1" and rows[2]["accelerator_args"]["runtime_version"] == "v2-alpha-tpuv6e"
    dearest = launched("sky", machine="v6e-8").bill
    assert request.bill.usd_per_hour == 21.60 and request.bill.hours == dearest.hours
    assert "on v6e-4 or v5p-8 or v6e-8 in us-central1; up to 21.60 USD/h" in sky.render(request)["task.yaml"]
    assert "a preemption begins an attempt that is not counted" in sky.render(request)["task.yaml"]
    assert request.bill.max_usd > launched("sky", machine="v5p-8").bill.max_usd


def test_a_region_or_zone_is_that_of_every_machine(launched):
    rows = task(launched("sky", region="us-east5"))["resources"]["any_of"]
    assert [(row["accelerators"], row["infra"]) for row in rows] == [
        ("tpu-v5p-8", "gcp/us-east5"),
        ("tpu-v6e-8", "gcp/us-east5"),
    ]
    (row,) = task(launched("sky", zone="us-east5-a", machine="v5p-8"))["resources"]["any_of"]
    assert row["infra"] == "gcp/us-east5/us-east5-a"


def test_an_image_of_artifact_registry_is_pulled_as_the_machines_account(launched):
    request = launched("sky", machine="v5p-8")
    login = {"USERNAME": "", "PASSWORD": "", "SERVER": "us-central1-docker.pkg.dev"}
    assert task(request)["envs"] == {f"SKYPILOT_DOCKER_{key}": value for key, value in login.items()}
    names = [check.name for check in preflight(request, "sky", sky.values(request))]
    assert f"image {request.image.value}" in names
    account = "skypilot-v1@demo-project.iam.gserviceaccount.com"
    assert f"service account {account}" in names and "roles/artifactregistry.reader in the project" in names
    assert "roles/storage.objectUser on gs://runs" in names
    assert "envs" not in task(launched("sky", machine="v5p-8", image="ghcr.io/me/gemsmith:1"))


def test_a_machine_that_is_named_is_the_only_one(launched):
    assert len(task(launched("sky", machine="v6e-8"))["resources"]["any_of"]) == 1


def test_gpus_are_counted(launched):
    trl = ("train.backend=trl", "train.dtype=nf4")
    (row,) = task(launched("sky", machine="1xh100", spot=True, overrides=trl))["resources"]["any_of"]
    assert row == {"infra": "gcp/us-east4", "accelerators": "H100:1"}


def test_the_job_ends_by_itself_and_has_room_for_the_weights(launched):
    found = task(launched("sky", machine="v5p-8", timeout_hours=2))
    assert found["run"].startswith(
        "timeout --signal=TERM --kill-after=120 7200 gemsmith launch worker gs://runs/team/big "
    )
    assert found["resources"]["disk_size"] == 300


@pytest.fixture
def sky_record(launch_record):
    return launch_record.model_copy(update={"target": "sky"})


def test_the_job_is_found_by_its_whole_name(sky_record, fake_tools, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = fake_tools(("jobs queue", 0, QUEUE))
    (resource,) = resources(sky_record, "running")
    assert ask(resource.list).stdout == "big\n"
    stop(sky_record, assume_yes=True, console=open_console())
    assert calls()[-1] == ["sky", "jobs", "cancel", "--name", "big", "--yes"]
    fake_tools(("jobs queue", 0, QUEUE.replace(" big ", " small ")))
    write_launch(sky_record)
    clean(sky_record, assume_yes=True, console=open_console())


def test_a_queue_that_cannot_be_read_is_not_taken_for_empty(sky_record, fake_tools):
    fake_tools(("jobs queue", 1, "no server"))
    assert ask(resources(sky_record, "running")[0].list).returncode
