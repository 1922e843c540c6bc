import json

import pytest
import yaml

from gemsmith.errors import InputError
from gemsmith.launch.commands import follow_command, preflight, resources
from gemsmith.launch.providers import cloud_run
from gemsmith.launch.submit import ask


def test_weights_are_mounted_read_only_and_results_are_not(launched):
    task = yaml.safe_load(cloud_run.render(launched())["job.yaml"])["spec"]["template"]["spec"]["template"]["spec"]
    (volume,) = task["volumes"]
    assert volume["csi"]["readOnly"] is True and volume["csi"]["volumeAttributes"] == {"bucketName": "weights"}
    assert task["timeoutSeconds"] == str(launched().bill.timeout_s.value) and task["maxRetries"] == 3
    assert task["containers"][0]["args"][2] == "gs://runs/team/big"


def test_a_hub_base_needs_its_token_and_no_mount(launched):
    hub = ("checkpoint=google/gemma-4-31B-it",)
    options = {"overrides": hub, "stages": "plan,data,train", "machine": "cloud-run-44"}
    assert "secretKeyRef" not in cloud_run.render(launched(**options))["job.yaml"], "a public one needs none"
    request = launched(**options, secret="hf-token")
    text = cloud_run.render(request)["job.yaml"]
    assert "secretKeyRef" in text and "volumes" not in text


def test_tasks_of_predict_share_the_rows(launched, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a"}\n')
    options = {"stages": "predict", "rows": "mine.jsonl", "timeout_hours": 2, "sampling": {"model": "tuned"}}
    one, four = (launched(**options, tasks=tasks) for tasks in (1, 4))
    files = cloud_run.render(four)
    job = yaml.safe_load(files["job.yaml"])["spec"]["template"]["spec"]
    assert (job["taskCount"], job["parallelism"]) == (4, 4)
    arguments = job["template"]["spec"]["containers"][0]["args"]
    assert arguments[-4:-1] == ["--stages", "predict", "--asked"]
    assert json.loads(arguments[-1]) == {"rows": "inputs/rows/mine.jsonl", "model": "tuned"}
    assert f"{tmp_path}/mine.jsonl gs://runs/team/big/launched/inputs/rows/" in files["submit.sh"]
    assert four.bill.max_usd == pytest.approx(4 * one.bill.max_usd) and "predict of gemma4-31b on 4 x " in job_head(
        files
    )
    assert four.image.value.partition(":")[0].endswith("train-gpu-vllm")
    # But for the tasks and their bill it is the job of one.
    changes = {"taskCount: 4  # each answers its part of the rows": "taskCount: 1  # one GPU trains the whole run"}
    changes["parallelism: 4"] = "parallelism: 1"
    text = files["job.yaml"].partition("apiVersion")[2]
    for new, old in changes.items():
        text = text.replace(new, old)
    assert text == cloud_run.render(one)["job.yaml"].partition("apiVersion")[2]


def job_head(files):
    return files["job.yaml"].partition("apiVersion")[0]


def test_images_of_rows_to_answer_are_packed(launched, tmp_path):
    (tmp_path / "a.png").write_bytes(b"an image")
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a", "image": "a.png"}\n')
    request = launched(stages="predict", rows="mine.jsonl", timeout_hours=2)
    (images,) = request.inputs.images
    assert images.place == "rows" and [*images.sums] == ["a.png"]
    assert request.inputs.rows == "inputs/rows/mine.jsonl"


def test_the_service_waits_for_the_weights_and_costs_nothing_unasked(launched):
    service = yaml.safe_load(cloud_run.render(launched())["service.yaml"])["spec"]["template"]
    assert service["metadata"]["annotations"]["autoscaling.knative.dev/minScale"] == "0"
    probe = service["spec"]["containers"][0]["startupProbe"]
    # 62 GB at 1 Gbit/s are 8 minutes and more.
    assert probe["periodSeconds"] * probe["failureThreshold"] > 2 * 8 * 60
    assert "/mnt/weights/team/big/run/merged" in service["spec"]["containers"][0]["args"]


def arguments_of(request):
    service = yaml.safe_load(cloud_run.render(request)["service.yaml"])
    return service["spec"]["template"]["spec"]["containers"][0]["args"]


def test_weights_are_served_in_fp8_only_where_bfloat16_does_not_fit(launched, monkeypatch):
    assert "--dtype=auto" in arguments_of(launched()) and "--quantization=fp8" not in arguments_of(launched())
    long = ("serve.max_model_len=262144",)
    assert "--quantization=fp8" not in arguments_of(launched(overrides=long)), "89.8 of 91.8 GB"
    monkeypatch.setattr("gemsmith.serve.command.UTILIZATION", 0.85)
    assert "--quantization=fp8" in arguments_of(launched(overrides=long))
    small_cache = arguments_of(launched(overrides=(*long, "serve.kv_cache_dtype=fp8")))
    assert "--kv-cache-dtype=fp8" in small_cache and "--quantization=fp8" not in small_cache


def test_only_those_who_are_asked_in_reach_the_service(launched):
    files = cloud_run.render(launched())
    assert not [word for text in files.values() for word in ("allUsers", "allow-unauthenticated") if word in text]
    assert "invoker-iam-disabled" not in files["service.yaml"]


def test_without_export_there_is_nothing_to_serve(launched):
    assert "service.yaml" not in cloud_run.render(launched(stages="plan,data,train"))


def test_a_timeout_that_may_be_refused_is_said_so(launched):
    assert "may be refused with a GPU" in cloud_run.render(launched(timeout_hours=20))["job.yaml"]
    assert "may be refused" not in cloud_run.render(launched(timeout_hours=12))["job.yaml"]


def test_direct_vpc_is_rendered_as_the_annotation_that_cloud_run_reads(launched):
    job = yaml.safe_load(cloud_run.render(launched(network="n", subnet="s"))["job.yaml"])
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    interfaces = json.loads(annotations["run.googleapis.com/network-interfaces"])
    assert interfaces == [{"network": "n", "subnetwork": "s"}]


def test_clean_removes_the_job_and_the_service_by_their_label(launch_record):
    kinds = {resource.kind: resource for resource in resources(launch_record, "created")}
    assert kinds.keys() == {"execution", "service", "job"}
    assert "--filter=metadata.labels.gemsmith-run=big" in kinds["job"].list
    assert {resource.kind for resource in resources(launch_record, "running")} == {"execution", "service"}


QUOTA = "NvidiaRtxPro6000GpuAllocNoZonalRedundancyPerProjectRegion"


def quota(name=QUOTA, **details):
    infos = [{"applicableLocations": ["us-central1"], "details": details, "dimensions": {"region": "us-central1"}}]
    return {"quotaId": name, "dimensionsInfos": infos}


@pytest.mark.parametrize(
    ("quotas", "complaint"),
    [
        ([quota(value="3")], None),
        ([quota(value="-1")], None),
        ([quota(value="0")], "it is 0"),
        ([quota()], "it is 0"),
        ([quota(value="3") | {"dimensionsInfos": []}], "none is listed for this GPU"),
        ([quota("NvidiaRtxPro6000GpuAllocPerProjectRegion", value="3")], "none is listed for this GPU"),
        ([quota("NvidiaL4GpuAllocNoZonalRedundancyPerProjectRegion", value="3")], "none is listed for this GPU"),
        ([], "none is listed for this GPU"),
        ({"error": 1}, "the quotas cannot be read"),
    ],
)
def test_the_quota_is_its_value_in_the_region(launched, quotas, complaint):
    request = launched()
    (check,) = [check for check in preflight(request, "cloud-run", cloud_run.values(request)) if "quota" in check.name]
    assert check.complaint(json.dumps(quotas)) == complaint
    elsewhere = json.dumps([quota(value="3")]).replace("us-central1", "europe-west4")
    assert check.complaint(elsewhere) == "none is listed for this GPU"


def test_logs_are_the_last_lines_and_in_order(launch_record, fake_tools):
    calls = fake_tools(("logging read", 0, "third\nsecond\nfirst\n"))
    assert ask(follow_command(launch_record, "logs")).stdout == "first\nsecond\nthird\n"
    assert "--order=desc" in calls()[0] and "--limit=1000" in calls()[0]
    fake_tools(("logging read", 1, "no"))
    assert ask(follow_command(launch_record, "logs")).returncode


def test_the_service_is_for_users_and_not_for_a_load_test(launched):
    found = arguments_of(launched(overrides=("bench.input_tokens=[64]", "data.max_length=128", "eval.max_tokens=8")))
    assert "--enable-prefix-caching" in found and "--max-model-len=17408" in found
    assert "--max-model-len=4096" in arguments_of(launched(overrides=("serve.max_model_len=4096",)))
    assert "--max-model-len=30256" in arguments_of(launched(overrides=("bench.input_tokens=[30000]",)))
    service = yaml.safe_load(cloud_run.render(launched())["service.yaml"])
    assert service["spec"]["template"]["spec"]["containerConcurrency"] == 256


def test_an_image_that_cloud_run_cannot_pull_is_refused(launched):
    for fine in ("docker.io/me/gemsmith:1", "me/gemsmith:1", "us-docker.pkg.dev/p/r/i:1", "eu.gcr.io/p/i"):
        assert launched(image=fine).image.value == fine
    with pytest.raises(
        InputError, match=r"^--image ghcr\.io/me/gemsmith:1: Cloud Run pulls from Artifact Registry and"
    ):
        launched(image="ghcr.io/me/gemsmith:1")
    with pytest.raises(InputError, match=r"^serve\.container_image quay\.io/me/vllm:v1: Cloud Run pulls"):
        launched(overrides=("serve.container_image=quay.io/me/vllm:v1",))


def test_an_argument_with_a_line_s_end_stays_one_argument(launched):
    found = arguments_of(launched(overrides=('serve.arguments=["--x", "a\\nb\\u2028c"]',)))
    assert found[-1] == "--x=a\nb\u2028c"
