from itertools import pairwise

import pytest

from gemsmith.errors import RecipeError
from gemsmith.recipe.load import load_recipe
from support.cases import each

BOMB = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{', '.join(f'*{before}' for _ in range(9))}]\n" for before, name in pairwise("abcdefghijkl")
)


@each(
    ("text", "expected"),
    [
        ("lora: {rank: 8}\nlora: {alpha: 3}", "line 4: is not YAML (lora is given twice; keep one)"),
        ("lora:\n  rank: 8\n  rank: 16", "line 5: is not YAML (rank is given twice; keep one)"),
        ("lora: &a\n  rank: *a", "recursive"),
        ("lora: {rank: [*]}", "line 3: is not YAML"),
        ("seed: 2026-13-45", "month must be in 1..12"),
        ("seed: 1\0", "is not YAML"),
        ("seed: 1" + "0" * 400, "it holds a number of more than 300 digits"),
        ("seed: 010", "010 would be read in base 8 or 60; write a plain number"),
        ("seed: 1:30", "1:30 would be read in base 8 or 60"),
        ("lora: {alpha: 1" + ":59" * 3000 + ".5}", "is not YAML"),
        (BOMB, "aliases are recursive, or make more than 100,000 values of it"),
        (
            BOMB.replace("[*", "{<<: [*").replace("]\n", "]}\n").replace("[x]}", "[x]"),
            "aliases are recursive, or make more than",
        ),
        (f"seed: &a {'x' * 500_000}\nlora: [{', '.join(['*a'] * 50_000)}]", "aliases are recursive, or make more than"),
        ("seed: " + "[" * 2000, "is not YAML"),
    ],
)
def test_a_recipe_that_says_two_things_or_none_is_one_line(tmp_path, text, expected):
    file = tmp_path / "recipe.yaml"
    file.write_text(f"checkpoint: x\ndata: {{train: y}}\n{text}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_numbers_may_be_written_as_1e_4(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("checkpoint: x\ndata: {train: y}\noptimizer: {learning_rate: 1e-4, epsilon: 1.0e-8}\n")
    recipe = load_recipe(file, ["optimizer.learning_rate=2e-4"])
    assert (recipe.optimizer.learning_rate, recipe.optimizer.epsilon) == (2e-4, 1e-8)
