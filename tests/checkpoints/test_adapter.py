"""Adapters out of and into a PEFT folder, two modules of tiny-31b each."""

import json
import re

import numpy as np
import pytest

from gemsmith.arch import find_variant, lora_targets
from gemsmith.checkpoints.peft import (
    WEIGHTS,
    Adapter,
    LoraPair,
    check_finite,
    check_fit,
    read_peft_adapter,
    refuse_outside,
    shared_projections,
    target_pattern,
    write_peft_adapter,
)
from gemsmith.checkpoints.peft_config import CONFIG
from gemsmith.errors import CheckpointError

TARGETS = lora_targets(find_variant("tiny-31b"), ["q", "down"])[:2]


@pytest.fixture
def adapter() -> Adapter:
    random = np.random.default_rng(0)
    modules = {
        target.module: LoraPair(
            a=random.standard_normal((3, target.shape[1]), dtype=np.float32),
            b=random.standard_normal((target.shape[0], 3), dtype=np.float32),
        )
        for target in TARGETS
    }
    return Adapter(modules=modules, rank=3, alpha=6.0, base_sha256="f00")


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_an_adapter_comes_back_from_its_folder_under_the_names_of_either_class(adapter, tmp_path, prefix):
    names = {name: name.replace("model.language_model.", prefix) for name in adapter.modules}
    written = write_peft_adapter(adapter, tmp_path, "base", class_names=names)
    again = read_peft_adapter(tmp_path)
    assert (again.rank, again.alpha, again.scale, again.base_sha256) == (3, 6.0, 2.0, "f00")
    assert again.shapes == adapter.shapes and again.modules.keys() == adapter.modules.keys()
    for name, pair in adapter.modules.items():
        np.testing.assert_array_equal(again.modules[name].a, pair.a)
        np.testing.assert_array_equal(again.modules[name].b, pair.b)
    assert written[WEIGHTS].bytes == (tmp_path / WEIGHTS).stat().st_size
    check_fit(again, TARGETS, source="x")


def test_ranks_and_alphas_of_single_modules_change_no_product(adapter, tmp_path):
    write_peft_adapter(adapter, tmp_path, "base")
    config = json.loads((tmp_path / CONFIG).read_text())
    first, second = (target.module for target in TARGETS)
    pattern = {re.escape(first.removeprefix("model.language_model.")): 12}
    (tmp_path / CONFIG).write_text(json.dumps(config | {"alpha_pattern": pattern}))
    again = read_peft_adapter(tmp_path)
    for name, scale in ((first, 4.0), (second, 2.0)):
        one, other = adapter.modules[name], again.modules[name]
        np.testing.assert_allclose(again.scale * other.b @ other.a, scale * one.b @ one.a, rtol=1e-5, atol=1e-5)


def test_one_flipped_bit_of_the_weights_is_found(adapter, tmp_path):
    write_peft_adapter(adapter, tmp_path, "base")
    content = bytearray((tmp_path / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS} is damaged: SHA-256 "):
        read_peft_adapter(tmp_path)


def test_modules_shapes_and_values_that_do_not_fit_are_named(adapter):
    with pytest.raises(CheckpointError, match=r"^adapter x: .*: 1 not asked for \(layers\.\d+\.\S+\)$"):
        check_fit(adapter, TARGETS[:1], source="x")
    with pytest.raises(CheckpointError, match=r"1 missing \("):
        check_fit(Adapter(modules={}, rank=3, alpha=6.0), TARGETS[:1], source="x")
    name, pair = next(iter(adapter.modules.items()))
    broken = {name: LoraPair(a=pair.a.T, b=pair.b)}
    with pytest.raises(CheckpointError, match=r"has A \[\d+, 3\] and B .*; rank 3 and the weight .* need \[3, \d+\]"):
        check_fit(Adapter(modules=broken, rank=3, alpha=6.0), TARGETS[:1], source="x")
    check_finite(adapter, source="x", otherwise="train again")
    pair.b[0, 0] = np.inf
    with pytest.raises(CheckpointError, match=r"NaN or infinity in 1 modules \(.*\); train again$"):
        check_finite(adapter, source="x", otherwise="train again")


def test_target_modules_are_a_pattern_of_these_modules_alone():
    targets = [target.module for target in lora_targets(find_variant("tiny-31b"), ["q", "v"])]
    pattern = re.compile(target_pattern(targets))
    others = {target.module for target in lora_targets(find_variant("tiny-31b"))} - set(targets)
    assert all(pattern.fullmatch(name) and pattern.fullmatch(name.replace("language_model.", "")) for name in targets)
    assert others and not any(pattern.fullmatch(name) for name in others)
    assert not pattern.fullmatch(targets[0].replace("language_model", "vision_tower"))


def test_v_is_ks_projection_in_global_layers_alone():
    variant = find_variant("tiny-31b")
    layers = [int(name.split(".")[3]) for name in shared_projections(variant)]
    assert layers == [layer for layer in range(variant.layers) if variant.is_global(layer)]
    assert all(v.replace("v_proj", "k_proj") == k for v, k in shared_projections(variant).items())


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (tmp_path / "elsewhere").touch()
    (folder / "inside").touch()
    (folder / "link").symlink_to(folder / "inside")
    refuse_outside(folder / "link", folder)
    (folder / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a symbolic link out of its folder"):
        refuse_outside(folder / "out", folder)
