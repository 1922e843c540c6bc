import pytest

from gemsmith.bench.sweep import HIGHEST_RATE, NEAR, bracket, describe_saturation, next_rate, read_saturation


def search(capacity: float, tried: list[float]) -> tuple[dict[float, float], list[float]]:
    """The rates that are tried on a server which holds up to a capacity, after those of the grid."""
    found = {rate: 1.0 if rate <= capacity else 0.4 for rate in tried}
    probes = []
    while (rate := next_rate(found)) is not None:
        assert rate not in found
        probes.append(rate)
        found[rate] = 1.0 if rate <= capacity else 0.4
    return found, probes


@pytest.mark.parametrize("capacity", [1.3, 3.7, 10, 29, 63, 200])
def test_the_search_ends_close_around_what_the_server_can_do(capacity: float) -> None:
    tried, probes = search(capacity, [1, 4, 16, 64])
    held, exceeded = bracket(tried)
    assert held is not None and exceeded is not None
    assert held <= capacity < exceeded and exceeded / held <= NEAR
    assert len(probes) <= 7


def test_a_server_that_cannot_hold_the_lowest_rate_is_known_by_one_cell() -> None:
    tried, probes = search(0.5, [1])
    assert probes == []
    found = read_saturation(tried, input_tokens=512, output_tokens=256)
    assert (found.held_at, found.exceeded_at) == (None, 1)
    assert describe_saturation(found).startswith(
        "the SLO cannot be met with 512 tokens in and 256 out: at 1 requests/s"
    )


def test_a_server_that_holds_everything_is_not_driven_beyond_what_a_client_can() -> None:
    tried, _ = search(1e9, [1, 64])
    assert max(tried) <= HIGHEST_RATE
    found = read_saturation(tried, input_tokens=1, output_tokens=1)
    assert found.exceeded_at is None and "does not saturate" in describe_saturation(found)


def test_a_rate_that_held_above_one_that_did_not_is_luck() -> None:
    assert bracket({1: 1.0, 4: 0.94, 16: 0.96}) == (1, 4)


def test_95_percent_is_enough() -> None:
    assert bracket({1: 0.95, 2: 0.9499}) == (1, 2)
