"""Exports without a run: what is written, what is refused, and that nothing is ever lost."""

import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from gemsmith.checkpoint import open_checkpoint
from gemsmith.checkpoint.adapter import LowRank, read_peft_adapter, write_peft_adapter
from gemsmith.errors import CheckpointError, MachineError, RunError, VerifyError
from gemsmith.export import folder as folder_module
from gemsmith.export import merge as merge_module
from gemsmith.export.folder import export_folder, export_peft
from gemsmith.records import ExportRecord
from gemsmith.verify.stage import verify_folder

Usage = namedtuple("Usage", "total used free")
UP = "model.language_model.layers.1.mlp.up_proj"


def contents(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


def set_config(adapter_folder: Path, **values: object) -> None:
    file = adapter_folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_the_record_has_each_files_checksum_and_says_what_was_read(base, adapter, tmp_path):
    record = export_peft(str(base), adapter, tmp_path / "out")
    assert ExportRecord.model_validate_json((tmp_path / "out" / "export.json").read_bytes()) == record
    there = contents(tmp_path / "out")
    recorded = {f"{part}/{file.name}": file.sha256 for part in ("adapter", "merged") for file in getattr(record, part)}
    assert recorded == {name: value for name, value in there.items() if name != "export.json"}
    assert record.base_sha256 == open_checkpoint(str(base)).fingerprint()
    assert (
        record.origin.made_from[str(adapter / "adapter_model.safetensors")]
        == contents(adapter)["adapter_model.safetensors"]
    )


def test_what_is_exported_passes_every_check(base, adapter, tmp_path):
    export_peft(str(base), adapter, tmp_path / "out")
    record = verify_folder(tmp_path / "out")
    assert [check.name for check in record.checks if check.passed] == [
        "files",
        "base",
        "tensors",
        "values",
        "norms",
        "logits",
    ]
    assert record.changed_tensors == record.expected_tensors == 40
    assert (tmp_path / "out" / "verify.json").is_file()


def test_a_changed_byte_in_what_was_exported_fails(base, adapter, tmp_path):
    export_peft(str(base), adapter, tmp_path / "out")
    file = tmp_path / "out" / "merged" / "model-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(VerifyError, match=r"merged/model-00001-of-00002\.safetensors was changed since"):
        verify_folder(tmp_path / "out")


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
    assert verify_folder(tmp_path / "out").passed


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
    assert verify_folder(tmp_path / "out").passed


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


def test_a_base_is_read_through_a_url(base, adapter, tmp_path, monkeypatch):
    monkeypatch.setenv("GEMSMITH_CACHE", str(tmp_path / "cache"))
    export_peft(str(base), adapter, tmp_path / "one")
    record = export_peft(f"file://{base}", adapter, tmp_path / "two")
    assert record.base == f"file://{base}"
    one, two = contents(tmp_path / "one" / "merged"), contents(tmp_path / "two" / "merged")
    assert one == two


def test_an_existing_target_is_refused_and_replaced_only_when_asked(base, adapter, adapter_of, tmp_path):
    out = tmp_path / "out"
    export_peft(str(base), adapter, out)
    before = contents(out)
    with pytest.raises(RunError, match="is there already; name another, or add --overwrite"):
        export_peft(str(base), adapter, out)
    assert contents(out) == before
    write_peft_adapter(adapter_of("tiny-31b", seed=3), adapter, "base")
    export_peft(str(base), adapter, out, overwrite=True)
    assert contents(out)["merged/model-00001-of-00002.safetensors"] != before["merged/model-00001-of-00002.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


def test_an_export_that_a_killed_one_left_aside_is_put_back_and_refused(base, adapter, tmp_path):
    export_peft(str(base), adapter, tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.old")
    with pytest.raises(RunError, match="is there already; name another, or add --overwrite"):
        export_peft(str(base), adapter, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


@pytest.mark.parametrize("moment", ["check_space", "write_merged"])
@pytest.mark.parametrize(
    ("overwrite", "message"), [(False, "is there already"), (True, "was not written by gemsmith export")]
)
def test_what_appears_at_the_target_meanwhile_is_never_replaced(
    base, adapter, tmp_path, monkeypatch, moment, overwrite, message
):
    function = getattr(folder_module, moment)

    def meanwhile(*arguments):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("years")
        return function(*arguments)

    monkeypatch.setattr(folder_module, moment, meanwhile)
    with pytest.raises(RunError, match=message):
        export_peft(str(base), adapter, tmp_path / "out", overwrite=overwrite)
    assert contents(tmp_path / "out").keys() == {"thesis.tex"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


def test_a_folder_that_export_did_not_write_is_never_replaced(base, adapter, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    with pytest.raises(RunError, match="was not written by gemsmith export"):
        export_peft(str(base), adapter, tmp_path / "home", overwrite=True)
    assert contents(tmp_path / "home").keys() == {"thesis.tex"}


@pytest.mark.parametrize("name", ["recipe.yaml", "checkpoints", "thesis.tex"])
def test_a_run_and_whatever_else_lies_beside_an_export_are_never_replaced(base, adapter, tmp_path, name):
    out = tmp_path / "out"
    export_peft(str(base), adapter, out)
    (out / "logs").mkdir()
    (out / name).write_text("years")
    before = contents(out)
    with pytest.raises(
        RunError, match=f"out: holds {name}, which gemsmith export did not write, so it is not replaced; name another"
    ):
        export_peft(str(base), adapter, out, overwrite=True)
    assert contents(out) == before
    (out / name).unlink()
    export_peft(str(base), adapter, out, overwrite=True)


@pytest.mark.parametrize("out", [".", "new/.."])
def test_a_target_without_a_name_of_its_own_is_one_line(gemsmith, base, adapter, tmp_path, monkeypatch, out):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, _, stderr = gemsmith("export", "--base", base, "--adapter", adapter, "--out", out)
    assert code == 2
    assert f"--out {out}: has no name that a new folder could take; name the folder itself ({Path.cwd()})" in stderr
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("out", ["base", "base/out", ".", "adapter", "adapter/out"])
def test_a_target_in_or_around_what_is_read_is_refused(base, adapter, tmp_path, out):
    before = contents(tmp_path)
    with pytest.raises(RunError, match="which is read, or holds it"):
        export_peft(str(base), adapter, tmp_path / out, overwrite=True)
    assert contents(tmp_path) == before


def test_a_target_that_is_a_link_is_refused(base, adapter, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(RunError, match="is a symbolic link; name the folder itself"):
        export_peft(str(base), adapter, tmp_path / "link", overwrite=True)


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
    with pytest.raises(MachineError, match=r"need 0\.00 GB, 0\.00 GB are free"):
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
    assert "read-only" in err or "GB are free" in err


def test_another_base_than_the_one_trained_on_is_refused(base, adapter, tmp_path):
    export_peft(str(base), adapter, tmp_path / "out")
    place = open_checkpoint(str(base)).places[f"{UP}.weight"]
    with place.file.open("r+b") as file:
        file.seek(place.begin)
        file.write(b"\1\2")
    with pytest.raises(CheckpointError, match=r"is not the base that .* was trained on"):
        export_peft(str(base), tmp_path / "out" / "adapter", tmp_path / "again")
    with pytest.raises(VerifyError, match=r"base: .* has the fingerprint"):
        verify_folder(tmp_path / "out")


@pytest.mark.parametrize("variant", ["tiny-12b", "tiny-e2b", "tiny-26b-a4b"])
def test_what_was_exported_is_not_that_of_another_variants_base(
    gemsmith, tiny_checkpoint, base, adapter, tmp_path, variant
):
    export_peft(str(base), adapter, tmp_path / "out")
    code, _, err = gemsmith("verify", tmp_path / "out", "--base", tiny_checkpoint(variant, "bfloat16"))
    last = err.splitlines()[-1]
    assert code == 1 and "has the fingerprint" in last and "tensors: " in last


def test_another_variants_adapter_beside_what_was_exported_fails(base, adapter, adapter_of, tmp_path):
    export_peft(str(base), adapter, tmp_path / "out")
    write_peft_adapter(adapter_of("tiny-12b"), tmp_path / "out" / "adapter", "base")
    with pytest.raises(VerifyError, match=r"values: .*_proj\.weight is \[\d+, \d+\], its adapter is for \["):
        verify_folder(tmp_path / "out")


def test_another_variants_adapter_is_refused(base, adapter_of, tmp_path):
    for variant in ("tiny-12b", "tiny-e2b", "tiny-26b-a4b"):
        write_peft_adapter(adapter_of(variant), tmp_path / variant, "base")
        with pytest.raises(CheckpointError, match=r"another variant's|modules are not those"):
            export_peft(str(base), tmp_path / variant, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_modules_are_listed(base, adapter, tmp_path, rewrite):
    rewrite(adapter, lambda modules: {name: pair for name, pair in modules.items() if name != UP})
    with pytest.raises(CheckpointError, match=r"target_modules .* names: 1 missing \(layers\.1\.mlp\.up_proj\)"):
        export_peft(str(base), adapter, tmp_path / "out")


def test_extra_modules_are_listed(base, adapter, tmp_path):
    set_config(adapter, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    with pytest.raises(CheckpointError, match=r"18 not named there \(layers\.0\.mlp\..* and 10 more\)"):
        export_peft(str(base), adapter, tmp_path / "out")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"r": 8}, r"says r = 8, the tensors of .* do not have it \(A \[4, "),
        ({"lora_alpha": 0}, "both must be numbers above 0"),
        ({"lora_alpha": float("nan")}, "both must be numbers above 0"),
        ({"rank_pattern": {"q_proj": 2}}, "says r = 2"),
        ({"rank_pattern": {"(": 2}}, "is no regular expression"),
        ({"alpha_pattern": {"q_proj": -1}}, "must map names of modules to numbers above 0"),
        ({"target_modules": "("}, "is no regular expression"),
    ],
)
def test_ranks_alphas_and_names_that_cannot_be_are_refused(base, adapter, tmp_path, values, message):
    set_config(adapter, **values)
    with pytest.raises(CheckpointError, match=message) as raised:
        export_peft(str(base), adapter, tmp_path / "out")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, "NaN or infinity in 1 modules"), (np.inf, "NaN or infinity in 1 modules")]
)
def test_nan_in_an_adapter_is_refused(base, adapter, tmp_path, value, message, rewrite):
    def spoil(modules: dict[str, LowRank]) -> dict[str, LowRank]:
        a = modules[UP].a.copy()
        a[1, 2] = value
        return {**modules, UP: LowRank(a=a, b=modules[UP].b)}

    rewrite(adapter, spoil)
    with pytest.raises(CheckpointError, match=message):
        export_peft(str(base), adapter, tmp_path / "out")


def test_an_adapter_of_zeros_is_refused(base, adapter, tmp_path, rewrite):
    rewrite(adapter, lambda modules: {name: LowRank(a=pair.a, b=0 * pair.b) for name, pair in modules.items()})
    with pytest.raises(CheckpointError, match="is all zero in 40 of 40 modules"):
        export_peft(str(base), adapter, tmp_path / "out")


def test_a_base_whose_files_are_links_into_the_target_is_not_overwritten(base, adapter, tmp_path):
    """An earlier export, taken as the base through links: --overwrite would delete it once the new one is complete."""
    out, view = tmp_path / "out", tmp_path / "view"
    export_peft(str(base), adapter, out)
    shutil.copytree(out / "merged", view, copy_function=os.symlink)
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    with pytest.raises(RunError, match=r"lies in .*/view/.*, which is read, or holds it"):
        export_peft(str(view), adapter, out, overwrite=True)
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


def test_links_out_of_the_adapters_folder_are_refused(base, adapter, tmp_path):
    (adapter / "adapter_model.safetensors").rename(tmp_path / "elsewhere")
    (adapter / "adapter_model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a symbolic link out of its folder"):
        export_peft(str(base), adapter, tmp_path / "out")


def test_an_adapter_in_a_folder_of_a_hub_repository_is_read_from_the_cache(base, adapter, tmp_path):
    folder, blobs = (
        tmp_path / "models--a--b" / "snapshots" / "abc" / "checkpoint-500",
        tmp_path / "models--a--b" / "blobs",
    )
    shutil.move(adapter, blobs)
    folder.mkdir(parents=True)
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(f"../../../blobs/{file.name}")
    export_peft(str(base), folder, tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    ["base/model-00002-of-00002.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"],
)
@pytest.mark.parametrize("how", ["written", "shortened", "replaced", "deleted"])
def test_what_is_changed_while_it_is_read_is_refused(base, adapter, tmp_path, monkeypatch, name, how):
    file, merged_rows = tmp_path / name, merge_module.merged_rows

    def meanwhile(*arguments):
        monkeypatch.setattr(merge_module, "merged_rows", merged_rows)
        if how == "written":
            file.write_bytes(file.read_bytes())
        elif how == "shortened":
            os.truncate(file, 100)
        elif how == "replaced":
            (tmp_path / "new").write_bytes(file.read_bytes()[:-1000])
            (tmp_path / "new").rename(file)
        else:
            file.unlink()
        return merged_rows(*arguments)

    monkeypatch.setattr(merge_module, "merged_rows", meanwhile)
    with pytest.raises(CheckpointError, match=f"{file}: was changed while it was read"):
        export_peft(str(base), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_truncated_base_is_refused(base, adapter, tmp_path, name):
    content = (base / name).read_bytes()
    for length in (len(content) - 9, len(content) // 3, 5, 0):
        (base / name).write_bytes(content[:length])
        with pytest.raises(CheckpointError) as raised:
            export_peft(str(base), adapter, tmp_path / "out")
        assert "\n" not in str(raised.value)


def test_flipped_bits_in_headers_never_end_in_a_traceback_or_a_wrong_export(base, adapter, tmp_path):
    """Whatever a bit of the header, index or config does, it is refused in one line or leaves the weights' meaning as
    it was."""
    chance = random.Random(0)
    expected = {name: open_checkpoint(str(base)).places[name] for name in open_checkpoint(str(base)).places}
    refused = 0
    for name in ("model-00002-of-00002.safetensors", "model.safetensors.index.json"):
        content = (base / name).read_bytes()
        for _ in range(60):
            place = chance.randrange(min(len(content), 2500))
            (base / name).write_bytes(
                content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]
            )
            try:
                found = open_checkpoint(str(base)).places
            except CheckpointError:
                refused += 1
            else:
                assert all(found[key] == expected[key] for key in expected)
        (base / name).write_bytes(content)
    assert refused > 60


_STOPPED_AT = """
import os, signal, sys
from pathlib import Path
from gemsmith.export import folder, merge
import gemsmith.run as run
moment, base, adapter, out = sys.argv[1:]
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
count = 0
if moment == "adapter":
    folder.write_peft_adapter, write = (lambda *given, **named: die(write(*given, **named))), folder.write_peft_adapter
elif moment == "middle":
    rows = merge.merged_rows
    def later(*arguments):
        global count
        count += 1
        return die() if count == 20 else rows(*arguments)
    merge.merged_rows = later
elif moment == "record":
    folder.write_text = die
else:
    rename, wanted = Path.rename, {"before": 0, "between": 1, "after": 2}[moment]
    def counted(self, target):
        global count
        if count == wanted:
            die()
        count += 1
        rename(self, target)
        if wanted == 2 and count == 2:
            die()
    Path.rename = counted
folder.export_peft(base, Path(adapter), Path(out), overwrite=True)
"""


@pytest.mark.parametrize("moment", ["adapter", "middle", "record", "before", "between", "after"])
def test_killed_at_any_moment_the_old_or_the_new_export_is_whole_and_the_next_starts_clean(
    base, adapter, adapter_of, tmp_path, moment
):
    out = tmp_path / "out"
    export_peft(str(base), adapter, out)
    old = contents(out)
    write_peft_adapter(adapter_of("tiny-31b", seed=9), adapter, "base")
    child = subprocess.run(
        [sys.executable, "-c", _STOPPED_AT, moment, base, adapter, out], capture_output=True, check=False
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    if moment == "between":
        assert contents(tmp_path / ".out.old") == old and not out.exists()
    elif moment == "after":
        assert verify_files(out) and contents(out) != old
    else:
        assert contents(out) == old
    export_peft(str(base), adapter, out, overwrite=True)
    assert (
        verify_files(out)
        and contents(out)["adapter/adapter_model.safetensors"] != old["adapter/adapter_model.safetensors"]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


def verify_files(out: Path) -> bool:
    record = ExportRecord.model_validate_json((out / "export.json").read_bytes())
    recorded = {f"{part}/{file.name}": file.sha256 for part in ("adapter", "merged") for file in getattr(record, part)}
    return recorded == {name: value for name, value in contents(out).items() if name != "export.json"}


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.1])
def test_killed_by_the_clock_nothing_half_written_has_the_targets_name(base, adapter, tmp_path, delay_s):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "gemsmith", "export", "--base", base, "--adapter", adapter, "--out", out]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while child.poll() is None and not (tmp_path / ".out.partial").exists():
        time.sleep(0.001)
    time.sleep(delay_s)
    child.kill()
    child.wait()
    assert not out.exists() or verify_files(out)
    export_peft(str(base), adapter, out, overwrite=True)
    assert verify_files(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a recipe or run directory; or --base, --out"),
        (["--base", "b", "--out", "o"], "one of --adapter and --from-tunix"),
        (["--base", "b", "--out", "o", "--adapter", "a", "--from-tunix", "t"], "one of --adapter and --from-tunix"),
        (["--base", "b", "--out", "o", "--adapter", "a", "--alpha", "2"], "--alpha: goes with --from-tunix"),
        (
            ["--base", "b", "--out", "o", "--adapter", "a", "--set", "seed=1"],
            "--run, --set and --force: go with SOURCE",
        ),
        (["--base", "b", "--out", "o", "--adapter", "nothing"], "--adapter nothing: is not a folder"),
        (["--base", "b", "--out", "o", "--from-tunix", "nothing"], "--from-tunix nothing: is not a folder"),
        (["runs/my", "--out", "o"], "--out: goes without SOURCE"),
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
