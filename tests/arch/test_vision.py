import pytest

from gemsmith.arch import VARIANTS, PatchProjection, VisionTower, find_variant, read_variant
from gemsmith.arch.config import differing_fields, read_vision
from gemsmith.errors import CheckpointError
from tiny_checkpoints import make_config, with_vision

PUBLISHED = [name for name in VARIANTS if name.startswith("gemma4")]


@pytest.mark.parametrize("name", VARIANTS)
def test_vision_reads_back_from_its_own_config(name):
    variant = VARIANTS[name] if name in PUBLISHED else with_vision(VARIANTS[name])
    assert read_variant(make_config(variant)).vision == variant.vision is not None


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_12b_has_no_tower_and_all_others_have_one(name):
    vision = VARIANTS[name].vision
    assert isinstance(vision, PatchProjection if name == "gemma4-12b" else VisionTower)
    assert (vision.patch_dim, vision.patches_per_token) == ((6912, 1) if name == "gemma4-12b" else (768, 9))


def test_a_checkpoint_of_the_text_model_alone_is_the_same_variant():
    variant = find_variant("gemma4-31b")
    alone = read_variant(make_config(variant) | {"vision_config": None})
    assert alone.vision is None and differing_fields(alone, variant) == []


def test_what_a_config_leaves_out_is_as_transformers_has_it():
    """Its class has the small tower's numbers, but for the clipping."""
    small = read_vision({"model_type": "gemma4", "vision_config": {"use_clipped_linears": True}})
    assert small == find_variant("gemma4-e2b").vision
    unified = {"model_type": "gemma4_unified", "vision_config": {"patch_size": 16}}
    assert read_vision(unified) == find_variant("gemma4-12b").vision


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("gemma4-31b", {"num_hidden_layers": 0}, "vision_config.num_hidden_layers = 0"),
        ("gemma4-31b", {"hidden_activation": "silu"}, "vision_config.hidden_activation = 'silu'"),
        ("gemma4-31b", {"num_key_value_heads": 4}, "vision_config.num_key_value_heads = 4"),
        ("gemma4-12b", {"output_proj_dims": 5376}, "vision_config.output_proj_dims = 5376"),
        ("gemma4-12b", {"rms_norm_eps": None}, "vision_config.rms_norm_eps = None"),
        ("gemma4-31b", {"rms_norm_eps": "1e-6"}, "vision_config.rms_norm_eps = '1e-6'"),
        ("gemma4-31b", {"rope_parameters": [1]}, r"vision_config.rope_parameters = \[1\]"),
        ("gemma4-31b", {"rope_parameters": {"rope_theta": 0}}, "vision_config.rope_parameters.rope_theta = 0"),
    ],
)
def test_what_no_gemma_4_has_is_refused(name, wrong, said):
    config = make_config(find_variant(name))
    config["vision_config"] |= wrong
    with pytest.raises(CheckpointError, match=said):
        read_variant(config)


def test_a_vision_config_that_is_no_object_is_refused():
    with pytest.raises(CheckpointError, match="vision_config = 'large'"):
        read_vision({"vision_config": "large"})
