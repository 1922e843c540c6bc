"""Every file beside the weights is the base's, and what is not is named, whatever export.json says."""

import json
import shutil

import pytest

from gemsmith.arch import find_variant
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.verify.checks import compare_other_files
from tiny_checkpoints import make_checkpoint, with_vision

FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = make_checkpoint(with_vision(find_variant("tiny-e2b")), tmp_path_factory.mktemp("beside") / "base")
    (folder / "LICENSE").write_text("Apache-2.0")
    return open_checkpoint(str(folder))


@pytest.fixture
def merged(base, tmp_path):
    return open_checkpoint(str(shutil.copytree(base.folder, tmp_path / "merged")))


def test_a_copy_has_no_problem_and_every_file_is_known(base, merged):
    assert compare_other_files(base, merged) == []
    assert {file.name for file in base.folder.iterdir() if file.suffix != ".safetensors"} == {*FILES, "LICENSE"}


@pytest.mark.parametrize("name", [*FILES, "LICENSE"])
def test_a_file_that_was_tampered_with_or_removed_is_named(base, merged, name):
    file = merged.folder / name
    file.write_bytes(file.read_bytes() + b"\n")
    assert compare_other_files(base, merged) == [f"{name} is not the base's"]
    file.unlink()
    assert compare_other_files(base, merged) == [f"{name} is missing"]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("generation_config.json", {"eos_token_id": [1, 50]}),
        ("generation_config.json", {"temperature": 0.0}),
        ("tokenizer_config.json", {"bos_token": "<eos>"}),
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}),
        ("tokenizer.json", {"normalizer": None}),
        ("processor_config.json", {"image_processor": {"do_rescale": False}}),
        ("config.json", {"image_token_id": 95}),
    ],
)
def test_one_changed_key_is_named(base, merged, name, keys):
    file = merged.folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | keys, indent=2) + "\n")
    assert compare_other_files(base, merged) == [f"{name} is not the base's"]


@pytest.mark.parametrize(
    "name", ["chat_template.json", "preprocessor_config.json", ".hidden", "inside/added_tokens.json"]
)
def test_a_file_that_was_added_is_named(base, merged, name):
    (merged.folder / name).parent.mkdir(exist_ok=True)
    (merged.folder / name).write_text("{}")
    assert compare_other_files(base, merged) == [f"{name} is not in the base"]
