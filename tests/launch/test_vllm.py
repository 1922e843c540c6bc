"""What the service of a tuned model tells vLLM."""

import json
import subprocess

import pytest

from gemsmith.launch.providers.cloud_run import deploy_service, service_arguments
from gemsmith.serve.settings import find_vllm, server_environment


def words(request) -> list[str]:
    return [str(getattr(argument, "value", argument)) for argument in service_arguments(deploy_service(request))]


def test_it_serves_the_merged_weights_from_the_mounted_bucket(launched):
    found = words(launched())
    assert found[:4] == ["/mnt/weights/team/big/run/merged", "--served-model-name=big", "--host=0.0.0.0", "--port=8000"]
    assert "--language-model-only" in found and not any("/model" in word for word in found)


def test_a_template_of_this_machine_is_read_where_the_launch_put_it(launched, tmp_path):
    (tmp_path / "my.jinja").write_text("{{ messages }}")
    found = words(launched(overrides=(f"data.template={tmp_path / 'my.jinja'}",)))
    assert "--chat-template=/mnt/weights/team/big/launched/inputs/data-template/my.jinja" in found


def test_a_model_of_images_is_served_with_as_many_soft_tokens_as_it_was_trained_with(launched):
    found = words(launched(overrides=("serve.images=true", "data.image_tokens=140")))
    assert '--mm-processor-kwargs={"max_soft_tokens": 140}' in found and "--language-model-only" not in found
    assert "--chat-template-content-format=openai" in found and "--allowed-media-domains=none.invalid" in found


def test_every_chosen_argument_has_its_reason(launched):
    for argument in service_arguments(deploy_service(launched(overrides=("serve.max_model_len=20000",)))):
        if str(getattr(argument, "value", argument)).startswith(("--max-model-len", "--gpu-memory", "--quantization")):
            assert getattr(argument, "reason", "")


PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
parsed = parser.parse_args(json.loads(sys.argv[1]))
validate_parsed_serve_args(parsed)
print(parsed.model_tag, parsed.mm_processor_kwargs, parsed.limit_mm_per_prompt)
"""


@pytest.mark.vllm
def test_vllm_reads_every_argument(launched):
    found = words(launched(overrides=("serve.images=true",)))
    engine = find_vllm()
    command = [str(engine.python), "-c", PARSE, json.dumps(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=server_environment(engine))
    assert done.returncode == 0 and "max_soft_tokens" in done.stdout, done.stderr
