import yaml

from gemsmith.launch import sky
from gemsmith.launch.follow import clean, stop
from gemsmith.launch.record import write_launch
from gemsmith.launch.runner import ask
from gemsmith.terminal import open_console

QUEUE = "ID  TASK  NAME   STATUS\n1   -     big    RUNNING\n2   -     bigger RUNNING\n"


def task(request):
    return yaml.safe_load(sky.render(request)["task.yaml"])


def test_any_machine_that_fits_is_taken_and_the_bill_is_the_dearest_one_s(launched):
    request = launched("sky")
    rows = task(request)["resources"]["any_of"]
    assert [row["accelerators"] for row in rows] == ["tpu-v5p-8", "tpu-v6e-8"]
    assert rows[1]["infra"] == "gcp/us-central1" and rows[1]["accelerator_args"]["runtime_version"] == "v2-alpha-tpuv6e"
    assert request.bill.usd_per_hour == 21.60
    assert "a preemption begins an attempt that is not counted" in sky.render(request)["task.yaml"]
    assert request.bill.greatest_usd > launched("sky", machine="v5p-8").bill.greatest_usd


def test_a_machine_that_is_named_is_the_only_one(launched):
    assert len(task(launched("sky", machine="v6e-8"))["resources"]["any_of"]) == 1


def test_gpus_are_counted(launched):
    trl = ("train.backend=trl", "train.dtype=nf4")
    (row,) = task(launched("sky", machine="1xh100", spot=True, overrides=trl))["resources"]["any_of"]
    assert row == {"infra": "gcp/us-east4", "accelerators": "H100:1"}


def test_the_job_ends_by_itself_and_has_room_for_the_weights(launched):
    found = task(launched("sky", machine="v5p-8", timeout_hours=2))
    assert found["run"].startswith(
        "timeout --signal=TERM --kill-after=120 7200 gemsmith launch here gs://runs/team/big "
    )
    assert found["resources"]["disk_size"] == 300


def test_the_job_is_found_by_its_whole_name(launch_record, fake_tools, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = fake_tools(("jobs queue", 0, QUEUE))
    (resource,) = sky.running(launch_record)
    assert ask(resource.list).output == "big\n"
    stop(launch_record, sky, agreed=True, console=open_console())
    assert calls()[-1] == ["sky", "jobs", "cancel", "--name", "big", "--yes"]
    fake_tools(("jobs queue", 0, QUEUE.replace(" big ", " small ")))
    write_launch(launch_record)
    clean(launch_record, sky, agreed=True, console=open_console())


def test_a_queue_that_cannot_be_read_is_not_taken_for_empty(launch_record, fake_tools):
    fake_tools(("jobs queue", 1, "no server"))
    assert ask(sky.running(launch_record)[0].list).code
