import pytest

from gemsmith.errors import InputError
from gemsmith.recipe_file import load_recipe


def test_the_first_machine_that_holds_the_run_is_taken(launched):
    assert launched().machine.name == "cloud-run-30"
    assert launched(stages="plan,data,train").machine.name == "cloud-run-20"
    assert launched("tpu-vm").machine.name == "v5p-8"


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
    own = "hardware.catalogue=own.yaml"
    request = launched("tpu-vm", machine="v5p-16", overrides=(own, "train.rows_per_step=8"))
    assert request.recipe.train.checkpoint_folder == "gs://runs/team/big/checkpoints"
    assert launched("tpu-vm").recipe.train.checkpoint_folder is None


@pytest.mark.parametrize(
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
        ({"stages": "serve"}, "--stages serve: needs vLLM.*--image"),
        ({"machine": "v5p-8"}, "--machine v5p-8: --on cloud-run does not have it; it has cloud-run-20"),
        ({"machine": "v5q-8"}, "'v5q-8' is not in the catalogue"),
        ({"machine": "cloud-run-20"}, "--machine cloud-run-20: 80 GiB of memory do not hold 103 GB: merged weights 63"),
        ({"overrides": ("train.backend=tunix",)}, r"train\.backend: tunix was given.*trains with trl"),
        ({"overrides": ("train.dtype=float32",)}, r"does not fit by the plan: needs .* GiB a chip"),
        ({"region": "us-east1"}, "--region us-east1: the catalogue has no on-demand price of cloud-run"),
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


def test_a_zone_is_asked_for_with_the_command_that_lists_them(launched):
    with pytest.raises(InputError, match=r"--zone: is missing; .*us-central1.*accelerator-types list"):
        launched("tpu-vm", zone=None)
