import pytest
import torch
import transformers

from gemsmith.recipe import Optimizer
from gemsmith.train.schedule import learning_rate


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("warmup", "updates"), [(5, 40), (0, 7), (10, 10), (10, 4)])
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
        assert learning_rate(settings, update=update, updates=updates) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12, abs=1e-18)
        torch_optimizer.step()
        scheduler.step()
