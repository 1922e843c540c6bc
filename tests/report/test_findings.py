"""The numbers that stand for a run, how they are written, and the terminal's table."""

import pytest

from gemsmith.analysis import summary as findings
from gemsmith.runs.bench_records import BenchRecord, Saturation
from gemsmith.runs.plan_records import PlanRecord
from gemsmith.runs.records import ServerFacts, TrainRecord
from gemsmith.runs.run import Run, read_record, write_record


@pytest.mark.parametrize(("lengths", "rates", "expected"), [
    ((512, 4096), (1.0, 4.0, 16.0), (512, 4.0)),
    ((128, 512, 4096), (1.0, 4.0), (512, 1.0)),
    ((512,), (4.0,), (512, 4.0)),
])  # fmt: skip
def test_the_middle_cell_is_one_that_was_measured(make_run, lengths, rates, expected):
    cell = findings.middle_cell(read_record(make_run(steps=2, lengths=lengths, rates=rates), BenchRecord))
    assert (cell.input_tokens, cell.request_rate) == expected


def test_cells_without_a_completed_request_are_never_the_headline(make_run):
    bench = read_record(make_run(steps=2, lengths=(512,), rates=(1.0, 4.0), failed_requests=128), BenchRecord)
    assert findings.middle_cell(bench).request_rate == findings.fastest_cell(bench.cells).request_rate == 1.0


def test_the_cheapest_machine_fits_and_has_a_price(make_run):
    plan = read_record(make_run(steps=2), PlanRecord)
    assert findings.cheapest_machine(plan).name == "v5p-8"
    none = plan.model_copy(
        update={"machines": tuple(machine.model_copy(update={"fits": False}) for machine in plan.machines)}
    )
    assert findings.cheapest_machine(none) is None


def test_a_records_notices_are_shown_before_the_numbers(make_run, told):
    warnings = told(make_run(steps=2), "data", warnings=("3 held-out rows are also trained on.",))
    assert [notice.text for notice in warnings if "held-out" in notice.text] == ["3 held-out rows are also trained on."]


def test_critical_warnings_come_first(make_run, told):
    run = make_run(steps=2)
    told(run, "data", warnings=("mild",))
    warnings = told(run, "eval", critical_warnings=("The tuned model scores lower.",))
    assert [notice.critical for notice in warnings] == sorted((notice.critical for notice in warnings), reverse=True)
    assert warnings[0] == findings.Notice(critical=True, text="The tuned model scores lower.")


def test_what_eval_says_of_held_out_rows_stands_for_what_the_data_stage_said(make_run, told):
    """Eval may have had others, and the data stage is not done again for them."""
    early, own = "data.eval: held-out rows whose prompt is also trained on: 9 of 9", "too few rows"
    for without, expected in ((("eval",), [early, own]), ((), [own])):
        run = make_run(f"run{len(without)}", steps=2, without=without)
        assert [
            notice.text for notice in told(run, "data", warnings=(early, own)) if notice.text in (early, own)
        ] == expected


def test_saturation_is_told_for_each_length(make_run):
    bench = read_record(make_run(steps=2), BenchRecord)
    assert findings.saturation_lines(bench) == []
    found = [
        Saturation(input_tokens=512, output_tokens=256, held_at=held, exceeded_at=exceeded)
        for held, exceeded in ((4.0, 4.35), (None, 1.0), (64.0, None))
    ]
    assert findings.saturation_lines(bench.model_copy(update={"saturations": tuple(found)})) == [
        "512 tokens in and 256 out: 4 to 4.35 requests/s",
        "512 tokens in and 256 out: below 1 requests/s",
        "512 tokens in and 256 out: not up to 64 requests/s",
    ]


def test_a_probe_is_never_the_middle_cell(make_run):
    bench = read_record(make_run(steps=2, lengths=(512,), rates=(1.0, 4.0, 16.0)), BenchRecord)
    probes = [cell.model_copy(update={"request_rate": rate, "probe": True}) for cell in bench.cells for rate in (2, 3)]
    found = findings.middle_cell(bench.model_copy(update={"cells": (*bench.cells, *probes)}))
    assert found.request_rate == 4


@pytest.mark.parametrize(
    ("machine", "quantization", "ttft_ms", "named"),
    [
        ("2xh100", "none", 120.0, True),
        ("2xh100", "none", 125.0, False),
        ("2xh100", "fp8", 62.0, False),
        ("2xh100", None, 62.0, False),
        ("2xh100", None, 60.0, True),
        ("cpu", "none", 0.1, False),
        (None, "none", 0.1, False),
    ],
)
def test_a_ttft_that_the_chips_cannot_make_is_told(make_run, machine, quantization, ttft_ms, named):
    """4,096 tokens of the 31B take two H100 121 ms at their bfloat16 peak, and half of that at the fp8 one."""
    made = make_run(steps=2, lengths=(4096,), rates=(1.0,))
    run = Run(path=made.path, recipe=made.recipe.model_copy(update={"model": "gemma4-31b"}))
    train, bench = read_record(run, TrainRecord), read_record(run, BenchRecord)
    write_record(run, train.model_copy(update={"machine": machine}))
    (cell,) = bench.cells
    ttft = cell.ttft_ms.model_copy(update={"p50": ttft_ms})
    cells = (cell.model_copy(update={"ttft_ms": ttft, "real_input_tokens": 4096.0}),)
    here, server = {"url": "http://127.0.0.1:8000"}, ServerFacts(quantization=quantization)
    write_record(run, bench.model_copy(update={"cells": cells, "endpoint": here, "server": server}))
    warnings = findings.find_notices(findings.read_findings(run))
    told = [notice.text for notice in warnings if "below the floor" in notice.text]
    assert len(told) == named and all("takes on 2xh100 at its peak" in text for text in told)
