import json
from pathlib import Path

import pytest

from gemsmith.arch import VARIANTS
from gemsmith.hardware import load_catalog

ROOT = Path(__file__).parents[2]


def test_models_have_their_size_and_say_whether_they_take_images(gemsmith):
    code, out, _ = gemsmith("models")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0 and [row[0] for row in rows if row and row[0].startswith(("gemma4-", "tiny-"))] == [*VARIANTS]
    assert ["tiny-31b", "1.4", "M", "2,048", "no"] in rows
    found = {each["model"]: each for each in json.loads(gemsmith("models", "--json")[1])}
    assert found.keys() == VARIANTS.keys()
    assert found["gemma4-31b"]["images"] and not found["tiny-31b"]["images"]
    assert 30e9 < found["gemma4-31b"]["parameters"] < 32e9 and found["gemma4-31b"]["context"] == 262_144


def test_machines_have_chips_memory_and_their_lowest_price(gemsmith, tmp_path):
    catalog = load_catalog().machines
    code, out, _ = gemsmith("machines")
    assert code == 0 and all(name in out for name in catalog)
    v5p = next(line for line in out.splitlines() if line.strip().startswith("v5p-8 "))
    lowest = min(price.usd_per_hour for price in catalog["v5p-8"].prices if price.usd_per_hour)
    assert "4 x v5p" in v5p and f"{lowest:.2f}" in v5p
    found = {each["name"]: each for each in json.loads(gemsmith("machines", "--json")[1])}
    assert found.keys() == catalog.keys() and found["v5p-8"]["chips"] == 4
    code, _, err = gemsmith("machines", "--catalog", tmp_path / "none.yaml")
    assert code == 2 and "none.yaml" in err and err.count("\n") == 1


def test_recipes_come_with_the_first_line_that_each_says_of_itself(gemsmith, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = json.loads(gemsmith("recipes", "--json")[1])
    assert len(found) >= 6 and all(each["summary"] for each in found)
    demo = next(each for each in found if each["recipe"] == "recipes/demo.yaml")
    assert demo["checkpoint"] == str(ROOT / "recipes/demo_base")
    assert demo["summary"].startswith("The whole pipeline in minutes")
    code, out, _ = gemsmith("recipes")
    assert code == 0 and "recipes/own.yaml" in out


@pytest.mark.parametrize("folder", ["missing", "."])
def test_a_folder_without_recipes_is_one_line(gemsmith, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    code, _, err = gemsmith("recipes", folder)
    assert code == 2 and err == (
        f"error: {folder}: holds no recipes (.yaml); give a folder that does, or run this in Gemsmith's own\n"
    )
