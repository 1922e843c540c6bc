"""Exports without a run: what is written, and where it is not."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.peft import read_peft_adapter, write_peft_adapter
from gemsmith.errors import MachineError, RunError, VerifyError
from gemsmith.export import merge as merge_module
from gemsmith.export.stage import export_folder, export_peft
from gemsmith.runs.records import ExportRecord
from gemsmith.runs.run import ExportDir
from gemsmith.verify.stage import verify

Usage = namedtuple("Usage", "total used free")


def test_the_record_has_each_files_checksum_and_says_what_was_read(base, adapter, tmp_path, contents):
    record = export_peft(str(base), adapter, tmp_path / "out")
    assert ExportRecord.model_validate_json((tmp_path / "out" / "export.json").read_bytes()) == record
    there = contents(tmp_path / "out")
    recorded = {f"{part}/{file.name}": file.sha256 for part in ("adapter", "merged") for file in getattr(record, part)}
    assert recorded == {name: value for name, value in there.items() if name != "export.json"}
    assert record.base_sha256 == open_checkpoint(str(base)).fingerprint()
    assert (
        record.provenance.inputs_sha256[str(adapter / "adapter_model.safetensors")]
        == contents(adapter)["adapter_model.safetensors"]
    )


def test_what_is_exported_passes_every_check(base, adapter, tmp_path):
    export_peft(str(base), adapter, tmp_path / "out")
    record = verify(ExportDir(path=tmp_path / "out"))
    assert [check.name for check in record.checks if check.passed] == [
        "files",
        "base",
        "other files",
        "tensors",
        "values",
        "norms",
        "logits",
    ]
    assert record.changed_tensors == record.expected_tensors == 40
    assert (tmp_path / "out" / "verify.json").is_file()


def test_a_merge_into_other_weights_than_were_trained_on_is_told_of(base, adapter, adapter_of, tmp_path):
    assert not export_peft(str(base), adapter, tmp_path / "plain").warnings
    write_peft_adapter(replace(adapter_of("tiny-31b"), quantized="nf4"), adapter, "base")
    (notice,) = export_peft(str(base), adapter, tmp_path / "out").warnings
    assert notice.startswith(f"{adapter} was trained on the base in nf4 and is merged into its original weights")
    assert read_peft_adapter(tmp_path / "out" / "adapter").quantized == "nf4"


def test_a_changed_byte_in_what_was_exported_fails(base, adapter, tmp_path):
    export_peft(str(base), adapter, tmp_path / "out")
    file = tmp_path / "out" / "merged" / "model-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(VerifyError, match=r"merged/model-00001-of-00002\.safetensors was changed since"):
        verify(ExportDir(path=tmp_path / "out"))


def test_an_adapter_that_peft_wrote_with_bare_names_becomes_one_with_full_paths(base, tmp_path):
    """Bare names fail in PEFT on a model with towers; the exported folder names each module."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    model = transformers.Gemma4ForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(tmp_path / "peft")
    record = export_peft(str(base), tmp_path / "peft", tmp_path / "out")
    assert record.merged_tensors == 6 + 4 + 6
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert "language_model" in config["target_modules"] and (config["r"], config["lora_alpha"]) == (3, 5)
    assert verify(ExportDir(path=tmp_path / "out")).passed


def test_every_linear_of_the_text_only_class_is_found_in_the_base(tiny_checkpoint, tmp_path):
    """E2B's per_layer_model_projection lies in no layer."""
    import transformers
    from peft import LoraConfig, get_peft_model

    base = tiny_checkpoint("tiny-e2b", "bfloat16")
    config = transformers.AutoConfig.from_pretrained(base).text_config
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(transformers.Gemma4ForCausalLM(config), lora).save_pretrained(tmp_path / "peft")
    export_peft(str(base), tmp_path / "peft", tmp_path / "out")
    written = read_peft_adapter(tmp_path / "out" / "adapter").modules
    assert "model.language_model.per_layer_model_projection" in written
    pattern = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())["target_modules"]
    names = [*written, *(name.replace("language_model.", "") for name in written)]
    assert [name for name in names if not re.fullmatch(pattern, name)] == []
    assert verify(ExportDir(path=tmp_path / "out")).passed


def test_merging_loads_neither_jax_nor_torch(base, adapter, tmp_path):
    script = (
        "import sys; from gemsmith.cli import main\n"
        f"sys.argv = ['gemsmith', 'export', '--base', {str(base)!r}, '--adapter', {str(adapter)!r}, '--out', "
        f"{str(tmp_path / 'out')!r}]\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, ' '.join({name.split('.')[0] for name in sys.modules}))"
    )
    code, *loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert code == "0"
    assert not set(loaded) & {"jax", "flax", "orbax", "tunix", "torch", "transformers", "peft", "safetensors"}


def test_a_base_is_read_through_a_url(base, adapter, tmp_path, monkeypatch, contents):
    monkeypatch.setenv("GEMSMITH_CACHE", str(tmp_path / "cache"))
    export_peft(str(base), adapter, tmp_path / "one")
    record = export_peft(f"file://{base}", adapter, tmp_path / "two")
    assert record.base == f"file://{base}"
    one, two = contents(tmp_path / "one" / "merged"), contents(tmp_path / "two" / "merged")
    assert one == two


def test_an_existing_target_is_refused_and_replaced_only_with_force(
    gemsmith, base, adapter, adapter_of, tmp_path, contents
):
    out = tmp_path / "out"
    export_peft(str(base), adapter, out)
    before = contents(out)
    with pytest.raises(RunError, match="already exists; name another, or add --force"):
        export_peft(str(base), adapter, out)
    assert contents(out) == before
    write_peft_adapter(adapter_of("tiny-31b", seed=3), adapter, "base")
    assert gemsmith("export", "--base", base, "--adapter", adapter, "--out", out, "--force")[0] == 0
    assert contents(out)["merged/model-00001-of-00002.safetensors"] != before["merged/model-00001-of-00002.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


def test_an_export_that_a_killed_one_left_aside_is_put_back_and_refused(base, adapter, tmp_path, contents):
    export_peft(str(base), adapter, tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.old")
    with pytest.raises(RunError, match="already exists; name another, or add --force"):
        export_peft(str(base), adapter, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


@pytest.mark.parametrize("moment", ["check_space", "write_merged"])
@pytest.mark.parametrize(
    ("force", "message"), [(False, "already exists"), (True, "was not written by gemsmith export")]
)
def test_what_appears_at_the_target_meanwhile_is_never_replaced(
    base, adapter, tmp_path, monkeypatch, moment, force, message, contents
):
    function = getattr(merge_module, moment)

    def meanwhile(*arguments):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("years")
        return function(*arguments)

    monkeypatch.setattr(merge_module, moment, meanwhile)
    with pytest.raises(RunError, match=message):
        export_peft(str(base), adapter, tmp_path / "out", force=force)
    assert contents(tmp_path / "out").keys() == {"thesis.tex"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


def test_a_folder_that_export_did_not_write_is_never_replaced(base, adapter, tmp_path, contents):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    with pytest.raises(RunError, match="was not written by gemsmith export"):
        export_peft(str(base), adapter, tmp_path / "home", force=True)
    assert contents(tmp_path / "home").keys() == {"thesis.tex"}


@pytest.mark.parametrize("name", ["recipe.yaml", "checkpoints", "thesis.tex"])
def test_a_run_and_whatever_else_lies_beside_an_export_are_never_replaced(base, adapter, tmp_path, name, contents):
    out = tmp_path / "out"
    export_peft(str(base), adapter, out)
    (out / "logs").mkdir()
    (out / name).write_text("years")
    before = contents(out)
    with pytest.raises(
        RunError, match=f"out: holds {name}, which gemsmith export did not write, so it is not replaced; name another"
    ):
        export_peft(str(base), adapter, out, force=True)
    assert contents(out) == before
    (out / name).unlink()
    export_peft(str(base), adapter, out, force=True)


@pytest.mark.parametrize("out", [".", "new/.."])
def test_a_target_without_a_name_of_its_own_is_one_line(gemsmith, base, adapter, tmp_path, monkeypatch, out):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, _, stderr = gemsmith("export", "--base", base, "--adapter", adapter, "--out", out)
    assert code == 2
    assert f"--out {out}: has no name that a new folder could take; name the folder itself ({Path.cwd()})" in stderr
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("out", ["base", "base/out", ".", "adapter", "adapter/out"])
def test_a_target_in_or_around_what_is_read_is_refused(base, adapter, tmp_path, out, contents):
    before = contents(tmp_path)
    with pytest.raises(RunError, match="which is read, or holds it"):
        export_peft(str(base), adapter, tmp_path / out, force=True)
    assert contents(tmp_path) == before


def test_a_target_that_is_a_link_is_refused(base, adapter, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(RunError, match="is a symbolic link; name the folder itself"):
        export_peft(str(base), adapter, tmp_path / "link", force=True)


def test_another_process_at_the_same_target_is_waited_for_by_the_user(base, adapter, tmp_path):
    import fcntl

    (tmp_path / ".out.partial").mkdir()
    held = os.open(tmp_path / ".out.partial", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(RunError, match="another process is writing there"):
        export_peft(str(base), adapter, tmp_path / "out")
    os.close(held)
    export_peft(str(base), adapter, tmp_path / "out")


def test_too_little_space_is_found_before_anything_is_written(base, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(MachineError, match=r"need [\d.]+\xa0[kM]B, 1\.00\xa0kB are free"):
        export_peft(str(base), adapter, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_target_that_cannot_be_written_is_one_line(gemsmith, base, adapter, tmp_path, monkeypatch, number):
    def refuse(path, *_, **__):
        raise OSError(number, "no", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    code, _, err = gemsmith("export", "--base", base, "--adapter", adapter, "--out", tmp_path / "out")
    assert code == 2 and err.count("\n") == 1 and "name another place, or change its permissions" in err


@pytest.fixture
def read_only(tmp_path):
    place = tmp_path / "read-only"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=100k", "tmpfs", place], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_read_only_disk_is_one_line(gemsmith, base, adapter, read_only):
    code, _, err = gemsmith("export", "--base", base, "--adapter", adapter, "--out", read_only / "out")
    assert code == 2 and "\n" not in err.strip()
    assert "read-only" in err or "B are free" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a recipe or run directory; or --base, --out"),
        (["--force"], "give a recipe or run directory; or --base, --out"),
        (["--base", "b", "--out", "o"], "one of --adapter and --from-tunix"),
        (["--base", "b", "--out", "o", "--adapter", "a", "--from-tunix", "t"], "one of --adapter and --from-tunix"),
        (["--base", "b", "--out", "o", "--adapter", "a", "--alpha", "2"], "--alpha: goes with --from-tunix"),
        (
            ["--base", "b", "--out", "o", "--adapter", "a", "--set", "seed=1"],
            "--run and --set: go with SOURCE",
        ),
        (["--base", "b", "--out", "o", "--adapter", "nothing"], "--adapter nothing: is not a folder"),
        (["--base", "b", "--out", "o", "--from-tunix", "nothing"], "--from-tunix nothing: is not a folder"),
        (["runs/my", "--out", "o"], "--out: does not go with SOURCE"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(gemsmith, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = gemsmith("export", *arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1 and message in err


def test_export_and_verify_from_the_command_line(gemsmith, base, adapter, tmp_path):
    code, out, _ = gemsmith("export", "--base", base, "--adapter", adapter, "--out", tmp_path / "out", "--json")
    assert code == 0 and json.loads(out)["merged_tensors"] == 40
    code, out, _ = gemsmith("verify", tmp_path / "out", "--json")
    assert code == 0 and json.loads(out)["passed"]
    code, _, err = gemsmith("verify", base, "--base", base)
    assert code == 2 and "is not a folder that gemsmith export --out wrote" in err


def test_export_folder_is_what_the_command_line_calls(base, adapter, tmp_path):
    assert export_folder(base=str(base), out=tmp_path / "out", adapter=adapter).merged_tensors == 40
