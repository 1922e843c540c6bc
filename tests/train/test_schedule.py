import pytest
import torch
import transformers

from gemsmith.errors import RecipeError
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Optimizer
from gemsmith.train.schedule import learning_rate
from support.cases import each


@each("schedule", ["cosine", "linear", "constant"])
@each(("warmup", "updates"), [(5, 40), (0, 7), (10, 10), (10, 4)])
def test_every_rate_is_that_of_transformers(schedule, warmup, updates):
    torch_optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    make = {
        "cosine": transformers.get_cosine_schedule_with_warmup,
        "linear": transformers.get_linear_schedule_with_warmup,
        "constant": lambda optimizer, warmup, _: transformers.get_constant_schedule_with_warmup(optimizer, warmup),
    }[schedule]
    scheduler = make(torch_optimizer, warmup, updates)
    settings = Optimizer(learning_rate=3e-4, schedule=schedule, warmup_steps=warmup)
    for update in range(updates):
        assert learning_rate(settings, update=update, updates=updates) == pytest.approx(
            scheduler.get_last_lr()[0], rel=1e-12, abs=1e-18
        )
        torch_optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(("ratio", "updates"), [(0.03, 1001), (0.1, 30), (0.1, 3), (0.0, 5)])
def test_a_ratio_gives_the_steps_that_transformers_makes_of_it(ratio, updates):
    theirs = transformers.TrainingArguments(warmup_steps=ratio, use_cpu=True).get_warmup_steps(updates)
    assert Optimizer(warmup_ratio=ratio).warmup(updates) == theirs


def test_steps_and_a_ratio_are_refused_together():
    values = {"checkpoint": "x", "data": {"train": "x"}, "optimizer": {"warmup_steps": 3, "warmup_ratio": 0.1}}
    with pytest.raises(
        RecipeError,
        match=r"warmup_steps: 3 was given, and optimizer.warmup_ratio 0.1; set one of them, the other null$",
    ):
        build_recipe(values)
    assert build_recipe(values, ["optimizer.warmup_steps=null"]).optimizer.warmup(20) == 2
    assert [Optimizer().warmup(updates) for updates in (1, 5, 19, 1000, 9000)] == [0, 0, 1, 100, 100]
