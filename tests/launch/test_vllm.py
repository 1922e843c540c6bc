"""What the service of a tuned model tells vLLM."""

import json
import subprocess

import pytest

from gemsmith.hardware import load_catalog
from gemsmith.launch.render import make_service
from gemsmith.serve.settings import find_vllm, server_environment


def words(request) -> list[str]:
    return [str(getattr(argument, "value", argument)) for argument in make_service(request, request.machine).arguments]


def test_it_serves_the_merged_weights_from_the_mounted_bucket(launched):
    found = words(launched())
    assert found[:4] == ["/mnt/weights/team/big/run/merged", "--served-model-name=big", "--host=0.0.0.0", "--port=8000"]
    assert "--language-model-only" in found and not any("/model" in word for word in found)


def test_streamed_weights_need_no_folder_and_what_a_gpu_compiled_is_kept_in_the_bucket(launched):
    request = launched(load="stream")
    service = make_service(request, request.machine)
    found = words(request)
    assert found[0] == "gs://runs/team/big/run/merged" and "--load-format=runai_streamer" in found
    assert not [word for word in found if "/mnt" in word or "distributed" in word]
    (volume,) = service.volumes
    assert volume.read_only.value is False and service.deployment.environment["VLLM_CACHE_ROOT"] == volume.path
    assert volume.options == "implicit-dirs,only-dir=team/big/compiled"
    (mounted,) = make_service(launched(), request.machine).volumes
    assert (
        mounted.read_only.value is True
        and "VLLM_CACHE_ROOT" not in make_service(launched(), request.machine).deployment.environment
    )


def test_several_gpus_stream_a_share_each(launched):
    request = launched(load="stream", overrides=("serve.max_model_len=4096",))
    service = make_service(request, load_catalog(None).machines["2xh100"])
    options = [str(getattr(argument, "value", argument)) for argument in service.arguments]
    assert '--model-loader-extra-config={"distributed": true}' in options and "--tensor-parallel-size=2" in options


def test_a_tpu_keeps_no_compiled_programs_in_the_bucket_and_its_stream_is_said_to_be_untried(launched):
    request = launched(load="stream")
    service = make_service(request, load_catalog(None).machines["v6e-8"])
    assert service.volumes == [] and "VLLM_CACHE_ROOT" not in service.deployment.environment
    warnings = [choice.why for choice in service.deployment.choices if choice.what == "warning"]
    assert [why for why in warnings if "no stream of weights into a TPU was tried here" in why]
    assert not [why for why in warnings if "refused a local folder" in why]


def test_a_template_of_this_machine_is_read_where_the_launch_put_it(launched, tmp_path):
    (tmp_path / "my.jinja").write_text("{{ messages }}")
    found = words(launched(overrides=(f"data.template={tmp_path / 'my.jinja'}",)))
    assert "--chat-template=/mnt/weights/team/big/launched/inputs/data-template/my.jinja" in found
    streamed = launched(overrides=(f"data.template={tmp_path / 'my.jinja'}",), load="stream")
    assert [volume.name for volume in make_service(streamed, streamed.machine).volumes] == ["weights", "compiled"]


def test_a_model_of_images_is_served_with_as_many_soft_tokens_as_it_was_trained_with(launched):
    found = words(launched(overrides=("serve.images=true", "data.image_tokens=140")))
    assert '--mm-processor-kwargs={"max_soft_tokens": 140}' in found and "--language-model-only" not in found
    assert "--chat-template-content-format=openai" in found and "--allowed-media-domains=none.invalid" in found


def test_every_chosen_argument_has_its_reason(launched):
    request = launched(overrides=("serve.max_model_len=20000",), load="stream")
    chosen = ("--max-model-len", "--gpu-memory", "--quantization", "--load-format")
    for argument in make_service(request, request.machine).arguments:
        if str(getattr(argument, "value", argument)).startswith(chosen):
            assert getattr(argument, "reason", "")


PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.model_executor.model_loader import get_model_loader
from vllm.config.load import LoadConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
parsed = parser.parse_args(json.loads(sys.argv[1]))
validate_parsed_serve_args(parsed)
loader = LoadConfig(load_format=parsed.load_format, model_loader_extra_config=parsed.model_loader_extra_config)
print(parsed.model_tag, type(get_model_loader(loader)).__name__, parsed.mm_processor_kwargs, parsed.limit_mm_per_prompt)
"""


@pytest.mark.vllm
@pytest.mark.parametrize(("load", "machine", "loader"), [
    ("mount", "cloud-run-20", "DefaultModelLoader"), ("stream", "2xh100", "RunaiModelStreamerLoader"),
    ("stream", "v6e-8", "RunaiModelStreamerLoader"),
])  # fmt: skip
def test_vllm_reads_every_argument(launched, load, machine, loader):
    request = launched(overrides=("serve.images=true",), load=load)
    arguments = make_service(request, load_catalog(None).machines[machine]).arguments
    found = [str(getattr(argument, "value", argument)) for argument in arguments]
    engine = find_vllm()
    command = [str(engine.python), "-c", PARSE, json.dumps(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=server_environment(engine))
    assert done.returncode == 0 and "max_soft_tokens" in done.stdout and loader in done.stdout, done.stderr
