"""Shared by the tests of plans and of their table: a recipe that can be planned."""

from collections.abc import Callable, Sequence

import pytest

from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Recipe


@pytest.fixture
def recipe() -> Callable[..., Recipe]:
    """Returns a recipe for these machines: `recipe("gemma4-e2b", machines=("v5e-4",), global_batch_size=1)`."""

    def make(
        model: str = "gemma4-31b",
        *,
        machines: Sequence[str] = ("v5p-8", "v6e-8", "2xh100"),
        catalog: str | None = None,
        **train: object,
    ) -> Recipe:
        hardware = {"machines": machines, "catalog": catalog}
        return build_recipe(
            {"checkpoint": "x/y", "model": model, "data": {"train": "x"}, "train": train, "hardware": hardware}
        )

    return make
