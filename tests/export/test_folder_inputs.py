"""Exports without a run: adapters and bases that are refused."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.peft import LoraPair, write_peft_adapter
from gemsmith.errors import CheckpointError, RunError, VerifyError
from gemsmith.export import merge as merge_module
from gemsmith.export.stage import export_peft
from gemsmith.runs.run import ExportDir
from gemsmith.verify.stage import verify

UP = "model.language_model.layers.1.mlp.up_proj"


def set_config(adapter_folder: Path, **values: object) -> None:
    file = adapter_folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_another_base_than_the_one_trained_on_is_refused(base, adapter, tmp_path):
    export_peft(str(base), adapter, tmp_path / "out")
    place = open_checkpoint(str(base)).places[f"{UP}.weight"]
    with place.file.open("r+b") as file:
        file.seek(place.begin)
        file.write(b"\1\2")
    with pytest.raises(CheckpointError, match=r"is not the base that .* was trained on"):
        export_peft(str(base), tmp_path / "out" / "adapter", tmp_path / "again")
    with pytest.raises(VerifyError, match=r"base: .* has the fingerprint"):
        verify(ExportDir(path=tmp_path / "out"))


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
        verify(ExportDir(path=tmp_path / "out"))


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


def test_extra_modules_are_listed(base, adapter, tmp_path, rewrite):
    set_config(adapter, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    with pytest.raises(CheckpointError, match=r"18 not named there \(layers\.0\.mlp\..* and 10 more\)"):
        export_peft(str(base), adapter, tmp_path / "out")
    of_text_model = UP.replace("language_model.", "")
    rewrite(adapter, lambda modules: {**modules, of_text_model: modules[UP]})
    with pytest.raises(CheckpointError, match=rf"has matrices for {UP} by two names, {UP} and {of_text_model}; keep"):
        export_peft(str(base), adapter, tmp_path / "out")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"r": 8}, r"says r = 8, the tensors of .* do not have it \(A \[4, "),
        ({"lora_alpha": 0}, "it must be a number above 0"),
        ({"lora_alpha": float("nan")}, "it must be a number above 0"),
        ({"rank_pattern": {"q_proj": 2}}, "says r = 2"),
        ({"rank_pattern": {"(": 2}}, "is no regular expression"),
        ({"alpha_pattern": {"q_proj": -1}}, "must be a map of .* names to numbers above 0"),
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
    def spoil(modules: dict[str, LoraPair]) -> dict[str, LoraPair]:
        a = modules[UP].a.copy()
        a[1, 2] = value
        return {**modules, UP: LoraPair(a=a, b=modules[UP].b)}

    rewrite(adapter, spoil)
    with pytest.raises(CheckpointError, match=message):
        export_peft(str(base), adapter, tmp_path / "out")


def test_an_adapter_of_zeros_is_refused(base, adapter, tmp_path, rewrite):
    rewrite(adapter, lambda modules: {name: LoraPair(a=pair.a, b=0 * pair.b) for name, pair in modules.items()})
    with pytest.raises(CheckpointError, match="is all zero in 40 of 40 modules"):
        export_peft(str(base), adapter, tmp_path / "out")


def test_a_base_whose_files_are_links_into_the_target_is_not_overwritten(base, adapter, tmp_path):
    """An earlier export, taken as the base through links: --force would delete it once the new one is complete."""
    out, view = tmp_path / "out", tmp_path / "view"
    export_peft(str(base), adapter, out)
    shutil.copytree(out / "merged", view, copy_function=os.symlink)
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    with pytest.raises(RunError, match=r"lies in .*/view/.*, which is read, or holds it"):
        export_peft(str(view), adapter, out, force=True)
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
