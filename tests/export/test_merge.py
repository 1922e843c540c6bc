import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from gemsmith.arch import find_variant, vision_tensors
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.peft import LoraPair, write_peft_adapter
from gemsmith.errors import CheckpointError, MachineError
from gemsmith.export import merge as merge_module
from gemsmith.system.files import atomic_replace_dir
from gemsmith.verify.logits import load_model, load_peft
from tiny_checkpoints import make_checkpoint, with_vision

TINY = ("tiny-31b", "tiny-e2b", "tiny-26b-a4b", "tiny-12b")
Usage = namedtuple("Usage", "total used free")


def merge(base, adapter, folder):
    """As an export merges: whole or not at all."""
    merge_module.check_mergeable(base, adapter)
    merge_module.check_space(folder, merge_module.merged_bytes(base))
    with merge_module.no_space_named(folder), atomic_replace_dir(folder) as beside:
        return merge_module.write_merged(base, adapter, beside)


def contents(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.parametrize(("variant", "rslora"), [*((name, False) for name in TINY), ("tiny-31b", True)])
def test_merged_weights_are_those_of_peft_bit_for_bit(tiny_checkpoint, adapter_of, tmp_path, variant, rslora):
    import torch
    import transformers

    adapter = dataclasses.replace(adapter_of(variant, rank=16, alpha=24), rslora=rslora)
    base = open_checkpoint(str(tiny_checkpoint(variant, "bfloat16")))
    merge(base, adapter, tmp_path / "merged")
    write_peft_adapter(adapter, tmp_path / "adapter", "base")
    architecture = getattr(transformers, base.config["architectures"][0])
    model = architecture.from_pretrained(base.folder, dtype=torch.bfloat16)
    load_peft(model, tmp_path / "adapter", adapter).merge_and_unload()
    expected = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    merged = open_checkpoint(str(tmp_path / "merged"))
    changed = 0
    for name in merged.places:
        ours, theirs = merged.read(name), expected[name].view(torch.uint16).numpy()
        pair, weight = adapter.modules.get(name.removesuffix(".weight")), base.read(name)
        if pair and not np.array_equal(pair.b @ pair.a, (torch.from_numpy(pair.b) @ torch.from_numpy(pair.a)).numpy()):
            # numpy's BLAS adds up in another order than torch's on this processor: some float32 sums differ, and few of
            # their roundings.
            assert_nearest(ours, weight, pair, adapter.scale)
            assert (ours.view(np.uint16) != theirs).mean() < 1e-3, name
        else:
            assert np.array_equal(ours.view(np.uint16), theirs), name
        changed += not np.array_equal(ours.view(np.uint16), weight.view(np.uint16))
    assert changed == len(adapter.modules)


def assert_nearest(merged, weight, pair, scale):
    """Each is W + scale * B A in float64, rounded, or as near to it but for what float32 is off."""
    a, b, weight = pair.a.astype(np.float64), pair.b.astype(np.float64), weight.astype(np.float64)
    exact = weight + scale * (b @ a)
    float32_error = 2.0**-24 * (len(a) + 2) * (np.abs(weight) + scale * (np.abs(b) @ np.abs(a)))
    suggest = exact.astype(merged.dtype).astype(np.float64)
    assert (np.abs(merged.astype(np.float64) - exact) <= np.abs(suggest - exact) + 2 * float32_error).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_each_weight_is_the_sum_rounded_once(tiny_checkpoint, adapter_of, tmp_path, dtype):
    adapter, base = adapter_of("tiny-12b"), open_checkpoint(str(tiny_checkpoint("tiny-12b", dtype)))
    merge(base, adapter, tmp_path / "merged")
    merged = open_checkpoint(str(tmp_path / "merged"))
    for module, pair in adapter.modules.items():
        weight = base.read(f"{module}.weight")
        expected = (weight.astype(np.float32) + (pair.b @ pair.a) * np.float32(2.0)).astype(weight.dtype)
        assert np.array_equal(merged.read(f"{module}.weight").view(np.uint8), expected.view(np.uint8))


def test_blocks_of_rows_give_the_bits_of_the_whole(tiny_checkpoint, adapter_of, tmp_path, monkeypatch):
    adapter, base = adapter_of("tiny-31b"), open_checkpoint(str(tiny_checkpoint("tiny-31b", "bfloat16")))
    merge(base, adapter, tmp_path / "whole")
    monkeypatch.setattr(merge_module.row_blocks, "__defaults__", (1000,))
    monkeypatch.setattr(merge_module, "_BLOCK_BYTES", 777)
    merge(base, adapter, tmp_path / "blocks")
    assert contents(tmp_path / "blocks") == contents(tmp_path / "whole")


def test_the_folder_is_the_base_but_for_the_adapted_bytes(tiny_checkpoint, adapter_of, tmp_path):
    source = tmp_path / "base"
    shutil.copytree(tiny_checkpoint("tiny-e2b", "bfloat16"), source)
    (source / "LICENSE").write_text("terms")
    (source / "pytorch_model.bin").write_text("the base's weights in another form")
    (source / "consolidated.safetensors").write_bytes(b"not in the index")
    (source / ".gitattributes").write_text("")
    (source / "original").mkdir()
    base = open_checkpoint(str(source))
    files, copied = merge(base, adapter_of("tiny-e2b"), tmp_path / "merged")
    before, after = contents_of_files(source), contents(tmp_path / "merged")
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert after.keys() == before.keys() - {"pytorch_model.bin", "consolidated.safetensors", ".gitattributes"}
    assert {name for name in after if after[name] != before[name]} == shards
    assert {file.name: file.sha256 for file in files} == after
    assert {file.name: file.bytes for file in files} == {
        name: (tmp_path / "merged" / name).stat().st_size for name in after
    }
    assert (len(adapter_of("tiny-e2b").modules), copied) == (38, len(base.places) - 38)
    for shard in shards:
        header = 8 + int.from_bytes((source / shard).read_bytes()[:8], "little")
        assert (source / shard).read_bytes()[:header] == (tmp_path / "merged" / shard).read_bytes()[:header]
    merged = open_checkpoint(str(tmp_path / "merged"))
    adapted = {f"{module}.weight" for module in adapter_of("tiny-e2b").modules}
    for name in base.places.keys() - adapted:
        assert np.array_equal(base.read(name).view(np.uint8), merged.read(name).view(np.uint8))


def test_vision_is_copied_as_it_is_with_its_clip_bounds(adapter_of, tmp_path):
    source = make_checkpoint(with_vision(find_variant("tiny-e2b")), tmp_path / "base")
    base = open_checkpoint(str(source))
    merge(base, adapter_of("tiny-e2b"), tmp_path / "merged")
    merged = open_checkpoint(str(tmp_path / "merged"))
    assert merged.variant == base.variant
    for tensor in vision_tensors(base.variant):
        assert merged.read(tensor.name).tobytes() == base.read(tensor.name).tobytes()
    assert merged.config == base.config


def contents_of_files(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()}


def test_links_to_files_are_followed_as_in_the_hub_cache(tiny_checkpoint, adapter_of, tmp_path):
    source, blobs = tmp_path / "models--x" / "snapshots" / "1234", tmp_path / "models--x" / "blobs"
    source.mkdir(parents=True)
    shutil.copytree(tiny_checkpoint("tiny-12b", "bfloat16"), blobs)
    for file in blobs.iterdir():
        (source / file.name).symlink_to(Path("../../blobs") / file.name)
    merge(open_checkpoint(str(source)), adapter_of("tiny-12b"), tmp_path / "merged")
    assert not any(file.is_symlink() for file in (tmp_path / "merged").iterdir())
    assert (tmp_path / "merged" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("linked", [None, "model-00001-of-00002.safetensors", "config.json", "tokenizer.json"])
def test_links_to_the_checkpoints_own_files_are_followed_wherever_they_lie(
    tiny_checkpoint, adapter_of, tmp_path, linked
):
    """All files lie elsewhere and in one folder, or only one does, under another name."""
    source, plain = tmp_path / "base", tiny_checkpoint("tiny-12b", "bfloat16")
    shutil.copytree(plain, source)
    for file in plain.iterdir():
        if linked in (None, file.name):
            elsewhere = (
                tmp_path / ("disk" if linked is None else file.stem) / (file.name if linked is None else "moved")
            )
            elsewhere.parent.mkdir(exist_ok=True)
            (source / file.name).rename(elsewhere)
            (source / file.name).symlink_to(elsewhere)
    before = contents(source)
    for base, folder in ((source, "merged"), (plain, "expected")):
        merge(open_checkpoint(str(base)), adapter_of("tiny-12b"), tmp_path / folder)
    assert contents(tmp_path / "merged") == contents(tmp_path / "expected")
    assert not any(file.is_symlink() for file in (tmp_path / "merged").iterdir())
    assert contents(source) == before == contents(plain)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "notes.txt"])
def test_a_link_to_something_that_is_not_the_checkpoints_is_refused(tiny_checkpoint, adapter_of, tmp_path, name):
    source = tmp_path / "base"
    shutil.copytree(tiny_checkpoint("tiny-12b", "bfloat16"), source)
    outside = tmp_path / "secret"
    outside.write_text('{"token": "hf_secret"}')
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{name}: is a symbolic link out of its folder, to {outside}"):
        merge(open_checkpoint(str(source)), adapter_of("tiny-12b"), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_another_variant_is_refused(tiny_checkpoint, adapter_of, tmp_path):
    base = open_checkpoint(str(tiny_checkpoint("tiny-12b", "bfloat16")))
    with pytest.raises(CheckpointError, match="another variant's"):
        merge(base, adapter_of("tiny-31b"), tmp_path / "merged")
    with pytest.raises(CheckpointError, match="another variant's"):
        merge(base, adapter_of("tiny-e2b"), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_zeros_is_refused(tiny_checkpoint, adapter_of, tmp_path):
    adapter = adapter_of("tiny-12b")
    name = next(iter(adapter.modules))
    idle = LoraPair(a=adapter.modules[name].a, b=np.zeros_like(adapter.modules[name].b))
    with pytest.raises(CheckpointError, match="all zero in 1 of 26 modules"):
        merge(
            open_checkpoint(str(tiny_checkpoint("tiny-12b", "bfloat16"))),
            dataclasses.replace(adapter, modules={**adapter.modules, name: idle}),
            tmp_path / "merged",
        )


def test_a_sum_that_overflows_the_base_is_refused_and_names_the_tensor(tiny_checkpoint, adapter_of, tmp_path):
    base = open_checkpoint(str(tiny_checkpoint("tiny-12b", "float16")))
    with pytest.raises(
        CheckpointError, match=r"layers\.\d\.\w+\.\w+_proj\.weight with the adapter added has NaN or infinity in F16"
    ):
        merge(base, adapter_of("tiny-12b", alpha=1e9), tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_found_before_anything_is_written(tiny_checkpoint, adapter_of, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(MachineError, match=r"need [\d.]+\xa0[kM]B, 1\.00\xa0kB are free") as raised:
        merge(
            open_checkpoint(str(tiny_checkpoint("tiny-12b", "bfloat16"))),
            adapter_of("tiny-12b"),
            tmp_path / "run" / "merged",
        )
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_becomes_full_leaves_the_old_folder(tiny_checkpoint, adapter_of, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "old").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match="the disk became full"):
        merge(
            open_checkpoint(str(tiny_checkpoint("tiny-12b", "bfloat16"))), adapter_of("tiny-12b"), tmp_path / "merged"
        )
    assert [path.name for path in tmp_path.rglob("*")] == ["merged", "old"]


def test_a_small_disk_is_refused_or_becomes_full_and_keeps_nothing(
    tiny_checkpoint, adapter_of, small_disk, tmp_path, monkeypatch
):
    disk = small_disk(tmp_path / "small", "300k")
    base, adapter = open_checkpoint(str(tiny_checkpoint("tiny-12b", "bfloat16"))), adapter_of("tiny-12b")
    with pytest.raises(MachineError, match=r"B are free; make room"):
        merge(base, adapter, disk / "merged")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, 2**40))
    with pytest.raises(MachineError, match="the disk became full"):
        merge(base, adapter, disk / "merged")
    assert list(disk.iterdir()) == []


_SLOW_MERGE = """
import sys, time
from pathlib import Path
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.peft import read_peft_adapter
from gemsmith.export import merge as module
from gemsmith.system.files import atomic_replace_dir
rows, calls = module.merged_rows, []
def slow(*arguments):
    calls.append(1)
    if len(calls) == 5:
        Path(sys.argv[4]).touch()
        time.sleep(600)
    return rows(*arguments)
module.merged_rows = slow
with atomic_replace_dir(Path(sys.argv[3])) as beside:
    module.write_merged(open_checkpoint(sys.argv[1]), read_peft_adapter(Path(sys.argv[2])), beside)
"""


def test_killed_in_the_middle_the_old_folder_is_intact_and_the_next_merge_starts_clean(
    tiny_checkpoint, adapter_of, tmp_path
):
    source, old, new = (
        tiny_checkpoint("tiny-12b", "bfloat16"),
        adapter_of("tiny-12b", seed=1),
        adapter_of("tiny-12b", seed=2),
    )
    base, target, begun = open_checkpoint(str(source)), tmp_path / "merged", tmp_path / "begun"
    merge(base, old, target)
    before = contents(target)
    write_peft_adapter(new, tmp_path / "adapter", "base")
    child = subprocess.Popen([sys.executable, "-c", _SLOW_MERGE, source, tmp_path / "adapter", target, begun])
    deadline = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert begun.exists()
    assert contents(target) == before
    merge(base, new, target)
    assert contents(target) != before
    assert {path.name for path in tmp_path.iterdir()} == {"merged", "adapter", "begun"}


def test_the_index_names_the_shards_that_are_there(tiny_checkpoint, adapter_of, tmp_path):
    merge(
        open_checkpoint(str(tiny_checkpoint("tiny-26b-a4b", "bfloat16"))),
        adapter_of("tiny-26b-a4b"),
        tmp_path / "merged",
    )
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in (tmp_path / "merged").glob("*.safetensors")}
    load_model(tmp_path / "merged")
