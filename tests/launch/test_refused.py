"""What stands in the way of a launch is told in a line by the command line, and nothing is created."""

import json
import shutil
from pathlib import Path

import pytest

ACCOUNT = "serviceAccount:gemsmith@demo-project.iam.gserviceaccount.com"
ROLES = ("storage.objectUser", "storage.objectViewer", "secretmanager.secretAccessor")
POLICY = json.dumps({"bindings": [{"role": f"roles/{role}", "members": [ACCOUNT]} for role in ROLES]})
FINE = [
    ("auth list", 0, "me@example.com\n"),
    ("services list --enabled", 0, "run.googleapis.com\nstorage.googleapis.com\n"),
    ("get-iam-policy", 0, POLICY),
    ("buckets describe", 0, "US-CENTRAL1\n"),
]
WHERE = ("--project", "demo-project", "--bucket", "gs://runs/team", "--submit", "--yes")
CHANGES = {"replace", "execute", "cp", "create", "delete", "apply"}
UNPRICED = """\
machines:
  cloud-run-20: {chip: rtx-pro-6000, chips: 1, source: mine, date: "2026", prices: []}
"""


@pytest.fixture
def refused(launched, fake_tools, gemsmith):
    """Launches big.yaml; returns what the preflight said and the error, once nothing is seen to be created."""

    def launch(*options, answers=()):
        calls = fake_tools(*answers, *FINE)
        code, _, err = gemsmith("launch", "big.yaml", *("--provider", "cloud-run", *WHERE, *options))
        *lines, error = err.splitlines()
        assert code == 2 and error.startswith("error: ") and "Traceback" not in err, err
        assert not [call for call in calls() if CHANGES & {*call}] and not Path("launches").exists()
        return lines, error

    return launch


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            ("gcloud", 127, "broken"),
            r"fails gcloud is here: broken; install it: https://cloud.google.com/sdk/docs/install",
        ),
        (("auth list", 0, ""), "fails gcloud is logged in: no account is active; gcloud auth login"),
        (("projects describe", 1, "no such project"), "fails project demo-project: no such project; check --project"),
        (("services list", 0, "storage.googleapis.com"), "not enabled: run.googleapis.com; gcloud services enable"),
        (
            ("buckets describe gs://runs", 0, "EU"),
            "fails gs://runs in us-central1: it is in eu; gcloud storage buckets",
        ),
        (("get-iam-policy gs://runs", 0, "{}"), "fails roles/storage.objectUser on gs://runs: gemsmith@demo-project"),
        (("buckets describe gs://runs", 1, "does not have storage.buckets.get access"), "get access; gcloud storage"),
        (("images describe", 1, "not found"), "not found; gcloud artifacts repositories create gemsmith --repository-"),
        (("images describe", 1, "not found"), "and: gcloud builds submit --config docker/cloudbuild.yaml --region us-"),
        (("jobs list", 0, "big\n"), "fails no other job named big: there is big; choose another --name, or remove it"),
    ],
)
def test_what_is_not_there_is_named_with_what_to_do(refused, answer, line):
    lines, error = refused(answers=[answer])
    assert [told for told in lines if line in told], lines
    assert error.startswith("error: preflight: ") and "nothing was created" in error


def test_a_token_that_is_missing_is_named_with_what_to_do(refused):
    hub = ("--set", "checkpoint=google/gemma-4-31B-it", "--machine", "cloud-run-44", "--stages", "plan,data,train")
    hub += ("--secret", "hf-token")
    lines, _ = refused(*hub, answers=[("secrets versions", 1, "NOT_FOUND")])
    assert [
        told for told in lines if "fails secret hf-token, the Hugging Face token: NOT_FOUND; gcloud secrets" in told
    ]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ("--region", "us-east1"),
            "--region us-east1: the catalog has no on-demand price of cloud-run-20 there; it has",
        ),
        (
            ("--machine", "v5p-8"),
            "--machine v5p-8: --provider cloud-run does not have it; it has cloud-run-20, cloud-run-30",
        ),
        (("--name", "a" * 29), f"--name {'a' * 29}: must be 1 to 28 of a-z, 0-9 and -"),
        (("--stages", "predict"), "--rows and --stages predict: go together; give both, or neither"),
        (("--rows", "big.yaml"), "--rows and --stages predict: go together"),
        (("--rows", "no.jsonl", "--stages", "predict"), "--rows no.jsonl: does not exist; give a file or folder of"),
        (("--tasks", "2"), "--tasks 2: only --provider cloud-run --stages predict, without other stages, shares"),
        (("--rows", "gs://b/r.jsonl", "--stages", "predict"), "--timeout-hours: is missing, and nothing tells how"),
        (("--stages", "predict,train"), "--stages predict,train: must name stages in their order: plan,data,train"),
        (
            ("--load", "stream", "--stages", "plan,data,train"),
            "--load stream: the service is of the merged weights, and",
        ),
        (
            ("--max-replicas", "2", "--stages", "plan"),
            "--max-replicas 2: the service is of the merged weights, and --st",
        ),
        (
            ("--load", "stream", "--set", "serve.container_image=vllm/vllm-openai:v0.11.0"),
            "serve.container_image: vllm/vllm-openai:v0.11.0 is older than vLLM 0.11.1 and cannot stream weights",
        ),
        (("--max-usd", "1"), "--max-usd 1: this launch can cost"),
        (
            ("--set", "hardware.catalog=unpriced.yaml", "--machine", "cloud-run-20", "--stages", "plan,data,train"),
            "--machine cloud-run-20: the catalog has no on-demand price of it at Google, so its greatest bill",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_is_asked(refused, options, error):
    Path("unpriced.yaml").write_text(UNPRICED)
    assert error in refused(*options)[1]


@pytest.mark.parametrize("on", ["tpu-vm", "sky"])
@pytest.mark.parametrize("option", [("--load", "stream"), ("--load", "mount"), ("--max-replicas", "1")])
def test_where_there_is_no_service_its_options_are_refused(refused, on, option):
    error = refused("--provider", on, "--zone", "us-east5-a", *option)[1]
    assert f"{' '.join(option)}: --provider {on} makes no service of the tuned model; leave it out, or choose" in error


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--load", "stream"), "--load stream: needs --serve-machine, the service's machine, such as v6e-8 or 1xh100"),
        (("--max-replicas", "2"), "--max-replicas 2: needs --serve-machine, the service's machine"),
        (("--serve-machine", "v6e-8", "--stages", "plan,data"), "--serve-machine v6e-8: the service is of the merged"),
        (("--serve-machine", "v7x-8"), "--serve-machine: 'v7x-8' is not in the catalog"),
        (("--serve-machine", "v6e-16"), "--serve-machine v6e-16: on Kubernetes a server has one host, of v5e-4"),
        (("--serve-machine", "cloud-run-20"), "--serve-machine cloud-run-20: on Kubernetes a server has one host"),
        (("--serve-machine", "cpu"), "--serve-machine cpu: on Kubernetes a server has one host"),
        (("--serve-machine", "2xv6e-8"), "--serve-machine 2xv6e-8: on Kubernetes a server has one host"),
        (("--serve-machine", "v6e-1"), "--serve-machine v6e-1: gemma4-31b needs "),
        (
            ("--serve-machine", "1xh100", "--set", "serve.dtype=float32"),
            "--serve-machine 1xh100: gemma4-31b needs ",
        ),
        (
            ("--serve-machine", "1xh100", "--set", "serve.arguments=[--api-key, x]"),
            "serve.arguments: --api-key: --api-key would be printed and recorded",
        ),
        (
            ("--serve-machine", "2xh100", "--load", "stream", "--set", "serve.container_image=me/vllm:v0.10.2"),
            "serve.container_image: me/vllm:v0.10.2 is older than vLLM 0.11.1",
        ),
    ],
)
def test_a_service_that_kubernetes_cannot_have_is_refused(refused, options, error):
    job = ("--provider", "gke", "--cluster", "c1", "--machine", "v6e-8", "--set", "train.backend=tunix")
    job += ("--set", "train.dtype=bfloat16", "--set", "train.global_batch_size=8")
    assert refused(*job, *options)[1].startswith(f"error: {error}")


def test_cloud_run_serves_on_no_other_machine(refused):
    said = "--serve-machine v6e-8: Cloud Run serves on an RTX PRO 6000 with 20 vCPU and 80 GiB, on no other; leave it"
    assert said in refused("--serve-machine", "v6e-8")[1]


@pytest.mark.parametrize(("option", "said"), [
    (("--load", "copy"), "'copy' is not one of 'mount', 'stream'"),
    (("--max-replicas", "0"), "0 is not in the range"),
    (("--max-replicas", "many"), "'many' is not a valid integer range"),
])  # fmt: skip
def test_an_option_of_the_service_that_means_nothing_is_refused(gemsmith, launched, option, said):
    code, _, err = gemsmith("launch", "big.yaml", "--provider", "cloud-run", *WHERE, *option)
    assert code == 2 and said in err and not Path("launches").exists()


def test_without_gcloud_the_line_says_where_it_is_from(refused, monkeypatch, tmp_path):
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert shutil.which("gcloud") is None
    lines, error = refused()
    assert "fails gcloud is here: gcloud is not on PATH; install it: https://cloud.google.com/sdk/docs/install" in lines
    assert error.startswith("error: preflight: 1 of")
