import pytest

from gemsmith.bench.cell import FULL, count_requests
from gemsmith.recipe.serving import BURST, GRIDS, Load

PAPER, SHORT = GRIDS["paper"], GRIDS["short"]


def load(rate: float, *, output_tokens: int = 512, at_once: int | None = None) -> Load:
    return Load(input_tokens=1024, output_tokens=output_tokens, request_rate=rate, max_concurrency=at_once)


@pytest.mark.parametrize(
    ("rate", "warmup", "measured"), [(1, 16, 200), (4, 62, 200), (8, 123, 246), (16, 246, 492), (32, FULL, 500)]
)
def test_warm_up_is_one_lifetime_of_arrivals_and_at_least_two_are_measured(
    rate: float, warmup: int, measured: int
) -> None:
    found = count_requests(load(rate), PAPER)
    assert (found.warmup, found.measured) == (warmup, measured)


def test_longer_answers_take_more_requests_at_the_same_rate() -> None:
    counts = [count_requests(load(8, output_tokens=tokens), PAPER) for tokens in (64, 512, 768)]
    assert sorted({count.warmup for count in counts}) == [count.warmup for count in counts]
    assert counts[0].measured < counts[1].measured < counts[2].measured


def test_with_so_many_at_once_the_first_wave_is_warm_up_and_four_are_measured() -> None:
    found = count_requests(load(BURST, at_once=64), PAPER)
    assert (found.warmup, found.measured) == (64, 256)


def test_a_burst_is_measured_whole() -> None:
    found = count_requests(load(BURST), PAPER)
    assert (found.warmup, found.measured) == (0, PAPER.most)


def test_the_recipes_own_number_is_that_of_the_measured_requests() -> None:
    found = count_requests(load(2, output_tokens=32), PAPER, prompts=24)
    assert (found.warmup, found.measured) == (2, 24)


def test_what_the_paper_sent_is_sent_as_it_was() -> None:
    once, *swept = GRIDS["paper-30"].loads
    counts = {(count.warmup, count.measured) for count in (count_requests(each, GRIDS["paper-30"]) for each in swept)}
    assert counts == {(0, 30)} and len(swept) == 40
    for grid in (PAPER, GRIDS["paper-30"]):
        assert (count_requests(once, grid).warmup, count_requests(once, grid).measured) == (0, 64)


@pytest.mark.parametrize("grid", [PAPER, SHORT], ids=["paper", "short"])
def test_percentiles_of_every_cell_have_enough_requests(grid) -> None:
    counts = [count_requests(each, grid) for each in grid.loads if each not in grid.exact]
    assert len(counts) > 5 and all(grid.fewest <= count.measured <= grid.most for count in counts)


def test_the_short_grid_takes_about_a_minute_of_arrivals() -> None:
    seconds = sum(sum(vars(count_requests(each, SHORT)).values()) / each.request_rate for each in SHORT.loads)
    assert 30 < seconds < 90
