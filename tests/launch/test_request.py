import pytest
import yaml

from gemsmith.errors import InputError
from gemsmith.launch.providers import TARGETS
from gemsmith.recipe.load import load_recipe
from support.cases import each


def test_the_first_machine_that_holds_the_run_is_taken(launched):
    assert launched().machine.name == "cloud-run-30"
    assert launched(stages="plan,data,train").machine.name == "cloud-run-20"
    assert launched("tpu-vm").machine.name == "v5p-8"


SMALL = ("checkpoint=google/gemma-4-E2B-it", "model=null", "data.max_length=2048")


def test_the_cheapest_machine_that_fits_is_proposed_first(launched):
    request = launched("gke", overrides=SMALL, cluster="c1")
    assert (request.machine.name, request.bill.usd_per_hour) == ("v6e-1", 2.70)
    with pytest.raises(InputError, match=r"^--zone: is missing; v6e-1 has a price in us-central1"):
        launched("tpu-vm", overrides=SMALL, zone=None)
    own = ("hardware.machines=[v5p-8, v6e-8]", *SMALL)
    assert launched("gke", overrides=own, cluster="c1").machine.name == "v5p-8"
    assert launched("gke", overrides=own, cluster="c1", spot=True, region="us-east5").machine.name == "v5p-8"
    assert launched("gke", overrides=own, cluster="c1", spot=True, region="us-east1").machine.name == "v6e-8"


@pytest.mark.parametrize("on", ["gke", "sky"])
def test_no_machine_of_another_cloud_is_named(launched, on):
    with pytest.raises(
        InputError, match=rf"--machine sagemaker-g7e: --provider {on} does not have it; it has .*8xh100"
    ) as error:
        launched(on, machine="sagemaker-g7e", cluster="c1")
    assert "azure-nc144lds" not in str(error.value) and not str(error.value).endswith("sagemaker-g7e")


def test_a_token_is_asked_for_only_where_one_is_named(launched):
    hub = ("checkpoint=google/gemma-4-31B-it",)
    assert launched("tpu-vm", overrides=hub).options.secret is None
    assert launched("tpu-vm", overrides=hub, secret="mine").options.secret == "mine"
    with pytest.raises(
        InputError, match=r"^--secret mine: gs://weights/.* is not downloaded from the Hugging Face hub"
    ):
        launched("tpu-vm", secret="mine")


TALL = """\
machines:
  {name}:
    source: |
      a table,
      touch hacked
    date: "2026"
    prices:
    - provider: gcp
      region: {region}
      usd_per_hour: 3.0
      source: "public\\ntouch hacked\\rtouch hacked\\x85touch hacked\\u2028touch hacked\\n"
      date: "2026"
"""


@pytest.mark.parametrize(
    ("on", "name"), [("cloud-run", "cloud-run-30"), ("tpu-vm", "v5p-8"), ("gke", "v5p-8"), ("sky", "v5p-8")]
)
def test_what_a_catalog_says_never_leaves_its_comment(launched, tmp_path, on, name):
    region = "us-east5" if on == "tpu-vm" else "us-central1"
    (tmp_path / "own.yaml").write_text(TALL.format(name=name, region=region))
    request = launched(on, overrides=("hardware.catalog=own.yaml",), machine=name, cluster="c1")
    for file, text in TARGETS[on].render(request).items():
        lines = [line for line in text.splitlines() if "touch hacked" in line]
        assert all("#" in line.partition("touch hacked")[0] for line in lines), file
        assert file.endswith(".sh") or yaml.safe_load(text)


def test_the_launched_recipe_says_why_its_values_differ(launched, tmp_path):
    request = launched()
    (tmp_path / "there.yaml").write_text(request.recipe_text)
    assert load_recipe(tmp_path / "there.yaml") == request.recipe
    assert "# gs://weights/gemma-4-31B-it, mounted read-only" in request.recipe_text
    assert request.recipe.hardware.machines == ("cloud-run-30",)


TWO_HOSTS = """\
machines:
  v5p-16:
    {chip: v5p, chips: 8, hosts: 2, interconnect_bytes_per_s: 300.0e+9, source: mine, date: "2026", prices: [
      {provider: gcp, region: us-east5, usd_per_hour: 33.60, source: twice v5p-8, date: "2026"}]}
"""


def test_several_hosts_save_to_the_bucket(launched, tmp_path):
    (tmp_path / "own.yaml").write_text(TWO_HOSTS)
    own = "hardware.catalog=own.yaml"
    request = launched("tpu-vm", machine="v5p-16", overrides=(own, "train.global_batch_size=8"))
    assert request.recipe.train.checkpoint_folder == "gs://runs/team/big/checkpoints"
    assert launched("tpu-vm").recipe.train.checkpoint_folder is None


@each(
    ("options", "message"),
    [
        ({"name": "a" * 29}, "--name .*: must be 1 to 28 of a-z, 0-9 and -"),
        ({"name": "Big_One"}, "--name Big_One: must be"),
        ({"bucket": "s3://b"}, "--bucket s3://b: must be gs://BUCKET or gs://BUCKET/FOLDER"),
        ({"bucket": "gs://runs/$(id)"}, "--bucket .*: must be gs://BUCKET"),
        ({"image": "x'; id; '"}, "--image .*: must be letters"),
        ({"project": "p\nq"}, "--project 'p.*q': must be letters"),
        ({"stages": "train,date"}, r"--stages date: is no stage \(did you mean data\?\)"),
        ({"stages": "train,data"}, "--stages train,data: must name stages in their order"),
        ({"on": "tpu-vm", "stages": "serve"}, "--stages serve: needs vLLM, which Gemsmith's image for TPUs .*--image"),
        ({"machine": "v5p-8"}, "--machine v5p-8: --provider cloud-run does not have it; it has cloud-run-20"),
        ({"machine": "v5q-8"}, "'v5q-8' is not in the catalog"),
        ({"machine": "cloud-run-20"}, "--machine cloud-run-20: 80 GiB of memory do not hold 103 GB: merged weights 63"),
        ({"overrides": ("train.backend=tunix",)}, r"train\.backend: tunix was given.*trains with trl"),
        (
            {"overrides": ("train.report_to=[wandb]",)},
            r"train\.report_to: wandb was given, which Gemsmith's images do not",
        ),
        ({"overrides": ("train.dtype=float32",)}, r"does not fit by the plan: needs .* GiB a chip"),
        ({"region": "us-east1"}, "--region us-east1: the catalog has no on-demand price of cloud-run"),
        ({"spot": True}, "no spot price"),
        ({"timeout_hours": 200}, "--timeout-hours 200: a Cloud Run task takes 168 h at most"),
        ({"network": "n"}, "--network and --subnet: go together"),
        ({"overrides": ("train.checkpoint_folder=/tmp/x",)}, r"train\.checkpoint_folder: /tmp/x is a folder of this"),
    ],
)
def test_what_cannot_be_launched_is_one_line(launched, options, message):
    with pytest.raises(InputError, match=message) as error:
        launched(**options)
    assert "\n" not in str(error.value)


HELD_OUT = ("data.eval={task: verilog, rows: 20, split: held-out}",)
OWN = ("eval.tasks=[{task: verilog, dataset: verilog-eval}]",)


@pytest.mark.parametrize(
    ("options", "stack"),
    [
        ({"overrides": HELD_OUT}, "train-gpu-vllm"),
        ({}, "train-gpu"),
        ({"overrides": (*HELD_OUT, *OWN)}, "train-gpu"),  # whose simulator is in no image
        ({"overrides": HELD_OUT, "image": "me/own:1"}, None),
        ({"overrides": HELD_OUT, "on": "tpu-vm"}, "train-tpu"),
        ({"overrides": HELD_OUT, "stages": "data,train"}, "train-gpu"),
    ],
)
def test_on_cloud_run_held_out_rows_are_scored_in_the_same_job_by_an_image_with_vllm(launched, options, stack):
    request = launched(**options)
    evaluates = stack == "train-gpu-vllm"
    assert ("eval" in request.options.stages) is evaluates
    assert stack is None or f"/{stack}:" in str(request.image.value)
    assert ("4 h for weights, compilation, export, verify and eval" in request.bill.timeout_s.reason) is evaluates


def test_a_zone_is_asked_for_with_the_command_that_lists_them(launched):
    with pytest.raises(InputError, match=r"--zone: is missing; .*us-central1.*accelerator-types list"):
        launched("tpu-vm", zone=None)
