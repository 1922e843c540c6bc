"""LLaMA-Factory's YAML."""

from pathlib import Path

import pytest
import yaml

from gemsmith.importers import port

FOLDER = Path(__file__).parent / "settings"
FACTORY = yaml.safe_load((FOLDER / "llama_factory.yaml").read_text())


@pytest.mark.parametrize(
    ("changed", "alpha", "status"), [({"lora_rank": 12}, 24.0, "derived"), ({"lora_alpha": 5}, 5.0, "mapped")]
)
def test_alpha_is_twice_the_rank_unless_it_is_given(tmp_path, write, changed, alpha, status):
    ported = port([write(tmp_path, FACTORY | changed)])
    assert ported.recipe.lora.alpha == alpha
    assert next(row for row in ported.rows if row.key == "lora_alpha").status == status


@pytest.mark.parametrize(
    ("changed", "differing"),
    [({"packing": True}, ["packing"]), ({"packing": True, "neat_packing": True}, []), ({"neat_packing": True}, [])],
)
def test_packed_documents_see_each_other_unless_packing_is_neat(tmp_path, write, changed, differing):
    ported = port([write(tmp_path, FACTORY | changed)])
    assert ported.recipe.data.packing and [row.key for row in ported.differences] == differing


@pytest.mark.parametrize(
    ("changed", "dtype", "differing"),
    [
        ({"quantization_bit": 4, "double_quantization": False}, "nf4", []),
        ({"quantization_bit": 4}, "nf4", ["quantization_bit"]),  # its scales are rounded too
        ({"quantization_bit": 8}, "int8", ["quantization_bit"]),
        ({"quantization_bit": 3}, None, ["quantization_bit"]),
        ({"quantization_bit": 4, "quantization_method": "hqq"}, None, ["quantization_bit"]),
    ],
)
def test_only_bitsandbytes_four_bits_are_gemsmiths(tmp_path, write, changed, dtype, differing):
    ported = port([write(tmp_path, FACTORY | changed)])
    assert [row.key for row in ported.differences] == differing
    assert dtype is None or ported.recipe.train.dtype == dtype


def test_gradient_checkpointing_is_on_unless_it_is_disabled(tmp_path, write):
    assert port([write(tmp_path, FACTORY)]).recipe.train.remat == "layer"
    off = port([write(tmp_path, FACTORY | {"disable_gradient_checkpointing": True})])
    assert off.recipe.train.remat == "none"
