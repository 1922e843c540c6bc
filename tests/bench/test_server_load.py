import time

import pytest

from gemsmith.bench.metrics import (
    Sample,
    fetch_metrics,
    open_metrics,
    read_prefix_caching,
    read_sample,
    sampling,
    summarize,
)
from support.hostile_server import hostile_server

PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_running{engine="1",model_name="a b"} 4.0
vllm:num_requests_waiting{engine="0",model_name="demo"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="demo",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="demo"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="demo"} 0.75
vllm:num_preemptions_total{engine="0",model_name="demo"} 5.0
vllm:num_preemptions_created{engine="0",model_name="demo"} 1.7953989084873126e+09
vllm:cache_config_info{block_size="128",enable_prefix_caching="False",engine="0"} 1.0
"""


def sample(running: float | None, waiting: float = 0, preemptions: float | None = 0) -> Sample:
    found = {"running": running, "waiting": waiting, "kv_use": running and running / 100, "preemptions": preemptions}
    return {name: value for name, value in found.items() if value is not None}


def test_the_engines_of_a_server_are_added_up_but_for_the_share_of_the_cache() -> None:
    assert read_sample(PAGE) == Sample(running=7, waiting=2, kv_use=0.75, preemptions=5)


@pytest.mark.parametrize(
    "text", ["", "{}", "python_info 1", "vllm:num_requests_running x", "vllm:num_requests_running NaN"]
)
def test_a_page_without_the_numbers_is_no_sample(text: str) -> None:
    assert read_sample(text) is None


def test_prefix_caching_is_read_from_the_server() -> None:
    assert read_prefix_caching(PAGE) is False
    assert read_prefix_caching(PAGE.replace('"False"', '"True"')) is True
    assert read_prefix_caching("python_info 1") is None


def test_a_cells_load_is_that_between_its_first_and_last_request() -> None:
    load = summarize([sample(0), sample(0), sample(4, 2, 1), sample(0, 0, 1), sample(2, 0, 3), sample(0, 0, 3)])
    assert load is not None
    assert (load.samples, load.running_mean, load.running_max, load.waiting_max) == (3, 2, 4, 2)
    assert (load.kv_use_max, load.preemptions) == (0.04, 3)


def test_what_the_server_does_not_tell_is_null() -> None:
    load = summarize([sample(None, 1, None)])
    assert load is not None
    assert (load.running_max, load.kv_use_mean, load.preemptions, load.waiting_max) == (None, None, None, 1)
    assert summarize([]) is None


def test_a_server_without_metrics_leaves_no_sample_and_says_why() -> None:
    with hostile_server() as hostile:
        with sampling(hostile.url, {}, every_s=0.01) as samples:
            time.sleep(0.1)
        assert samples.found == [] and samples.problem == "has none of vLLM's numbers"
    with open_metrics(hostile.url, {}) as client:
        assert not isinstance(fetch_metrics(client), str)
    with sampling(hostile.url, {}, every_s=0.01) as samples:
        time.sleep(0.1)
    assert samples.problem == "is not answered (ConnectError)"


def test_samples_come_while_the_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemsmith.bench.metrics.fetch_metrics", lambda client: PAGE)
    with sampling("http://x", {}, every_s=0.01) as samples:
        deadline_s = time.monotonic() + 60
        while len(samples.found) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        during = len(samples.found)
    assert during >= 3 and samples.found[0]["running"] == 7


def test_the_metrics_are_asked_for_once_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, begin_s = [], time.monotonic()
    monkeypatch.setattr("gemsmith.bench.metrics.fetch_metrics", lambda client: asked.append(client) or PAGE)
    with sampling("http://x", {}):
        time.sleep(0.2)
    assert 2 <= len(asked) <= 2 + time.monotonic() - begin_s  # at the beginning and at the end
