"""The load test's tables, of a few cells and of many."""

import html
import math

from gemsmith.analysis.summary import read_findings
from gemsmith.report import sections as bench
from gemsmith.report.page import render_page, report
from gemsmith.runs.bench_records import BenchImages, BenchRecord, DeviceLoad, Saturation, ServerLoad, Slo
from gemsmith.runs.run import read_record, write_record
from gemsmith.system.format import decimal, memory, percent


def test_goodput_saturation_and_loads_without_a_rate_are_shown(make_run, undrawn):
    run = make_run(steps=2, lengths=(512,), rates=(1.0, 4.0))
    record = read_record(run, BenchRecord)
    cells = [
        record.cells[0].model_copy(update={"goodput": 1.0}),
        record.cells[1].model_copy(update={"request_rate": math.inf, "goodput": 0.125}),
        record.cells[1].model_copy(update={"request_rate": math.inf, "max_concurrency": 64, "goodput": 0.25}),
        record.cells[1].model_copy(update={"request_rate": 2.5, "goodput": 0.5, "probe": True}),
    ]
    saturation = Saturation(input_tokens=512, output_tokens=256, held_at=1.0, exceeded_at=1.07)
    slo = Slo(ttft_ms=200.0, tpot_ms=50.0)
    update = {"cells": tuple(cells), "slo": slo, "saturations": (saturation,), "prefix_caching": None}
    write_record(run, record.model_copy(update=update))
    text = html.unescape(render_page(run))
    assert "A request is good with a TTFT of at most 200 ms and a TPOT of at most 50 ms." in text
    assert "512 tokens in and 256 out: 1 to 1.07 requests/s" in text
    assert "Whether prefix caching was on is not known." in text
    for words in (">a burst</td>", ">64 at once</td>", ">2.5<small>probe</small></td>", "12.5\u00a0%"):
        assert words in text, words


def test_what_requests_with_images_held_is_said(make_run, undrawn):
    run = make_run(steps=2)
    record = read_record(run, BenchRecord)
    values = {"rows": 136, "distinct": 135, "images_per_request": 1.0, "soft_tokens": 261.5, "text_tokens": 231.0}
    for encoder_cache, words in ((None, "was on is not known."), (False, "was off: it embeds"), (True, "was on.")):
        images = BenchImages(**values, sha256="0", encoder_cache=encoder_cache)
        write_record(run, record.model_copy(update={"images": images}))
        text = html.unescape(render_page(run))
        assert "136 rows of <code>data.eval</code> in turn, with 135 different images: 1 a request, of 262" in text
        assert f"encoder cache {words}" in text


def test_each_length_has_its_fastest_load_its_lightest_and_its_saturation(large_run, undrawn):
    made = bench.make_bench(read_findings(large_run))
    assert len(made["cells"]) == 47
    assert [saturates for *_, saturates in made["lengths"]] == [None, *["2 to 2.74"] * 5]
    for lightest, fastest, _ in made["lengths"]:
        row = [cell for cell in made["cells"] if cell.input_tokens == lightest.input_tokens]
        assert fastest.output_tokens_per_s == max(cell.output_tokens_per_s for cell in row)
        assert lightest.request_rate == min(cell.request_rate for cell in row)


def test_every_cell_s_numbers_are_on_the_page(large_run, section_words):
    words = section_words(large_run, "bench")
    for cell in read_record(large_run, BenchRecord).cells:
        ttft, tpot, itl = (
            " ".join(decimal(value) for value in (part.p50, part.p90, part.p99))
            for part in (cell.ttft_ms, cell.tpot_ms, cell.itl_ms)
        )
        row = f"{ttft} {tpot} {itl} {decimal(cell.output_tokens_per_s)} {decimal(cell.requests_per_s)}"
        assert row in words, row
        assert f"{decimal(cell.server.running_mean)} {decimal(cell.server.running_max)}" in words
    assert "Terminated" not in words and "preempted" in words and "2 timeout" in words


def test_the_tables_of_all_cells_are_shut_away(make_run, undrawn):
    page = render_page(make_run(steps=2))
    assert "<details>\n<summary>Latency and throughput of all 6 cells" in page
    assert "<details>\n<summary>Whole requests and the server’s own metrics" in page


def test_a_dash_says_why_there_is_no_number(make_run, undrawn):
    run = make_run(steps=2, lengths=(512,), rates=(4.0,))
    bench = read_record(run, BenchRecord)
    why = {"no metrics": None, "does not tell": ServerLoad(samples=3)}
    for words, server in why.items():
        write_record(run, bench.model_copy(update={"cells": (bench.cells[0].model_copy(update={"server": server}),)}))
        text = render_page(run)
        assert [other in text for other in why] == [other == words for other in why]
        assert '<abbr title="no SLO was set">–</abbr>' in text


def test_what_the_accelerators_did_in_each_cell_is_in_a_table(large_run, section_words):
    words = section_words(large_run, "bench")
    for cell in read_record(large_run, BenchRecord).cells:
        one, other = cell.devices
        in_use, watts = percent((one.busy_mean + other.busy_mean) / 2), decimal(2 * one.power_w_mean)
        row = f"{memory(71 * 2**30)} {in_use} {watts} W"
        assert f" {' '.join(row.split())} " in words, row
    assert "2 × NVIDIA H100 80GB HBM3. Memory is the fullest one’s" in words


def test_what_is_not_known_of_the_accelerators_says_why(make_run, undrawn):
    run = make_run(steps=2, lengths=(512,), rates=(4.0,))
    record = read_record(run, BenchRecord)
    tpu = DeviceLoad(name="v6e", samples=1, memory_bytes_max=2**30, busy_mean=0.5, busy_max=1.0)
    for update, said in (
        ({"no_devices": "watch_gpus: <none>"}, ['title="watch_gpus: &lt;none&gt;">–'] * 3),
        ({}, ['title="no look at them is recorded">–'] * 3),
        (
            {"devices": (tpu,)},
            ["<td>1.00\u00a0GiB</td><td>50.0\u00a0%</td>", 'title="its library gives no power">–'],
        ),
    ):
        write_record(run, record.model_copy(update={"cells": (record.cells[0].model_copy(update=update),)}))
        page = render_page(run)
        assert all(page.count(words) == said.count(words) for words in said), said
        assert ("1 × v6e. Memory" in page) is ("devices" in update)


def test_a_large_run_stays_small_enough_to_send(large_run):
    assert report(large_run).stat().st_size < 1_000_000
