"""A run of the paper's loads beside the paper."""

import math

from gemsmith.analysis.published import read_published, reanalyze
from gemsmith.analysis.summary import read_sides
from gemsmith.report.tables import markdown_of
from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.run import read_record
from gemsmith.system.format import decimal


def test_what_a_run_reports_stands_beside_both_of_the_papers_columns(large_run):
    published = read_published()
    (mine,) = read_sides([large_run.path])
    assert len(mine.figures) > 7 and mine.figures.keys() <= published.figures.keys()
    bench, train = read_record(large_run, BenchRecord), read_record(large_run, TrainRecord)
    redrawn = reanalyze(published, [mine])
    text = markdown_of(redrawn.comparison, redrawn).replace("\u00a0", " ")
    assert f"|  | paper's TPU | paper's GPU | {mine.name} |" in text
    assert "| final token accuracy | – | 96.1 % | 90.0 % |" in text
    assert f"| final training loss | 0.072 | 2.258 | {decimal(train.steps[-1].loss)} |" in text
    once = next(cell for cell in bench.cells if cell.request_rate == 10_000)
    assert f"10,000 requests/s | 22.29 ms | 20.49 ms | {decimal(once.itl_ms.p99)} ms |" in text
    assert "| about 32 requests/s | about 8 requests/s | 2 to 2.74 requests/s |" in text
    swept = [cell for cell in bench.cells if cell.input_tokens == 8192 and not cell.probe]
    best = max(cell.output_tokens_per_s for cell in swept if cell.request_rate < math.inf)
    (at_four,) = (cell.ttft_ms.p50 for cell in swept if cell.request_rate == 4)
    assert f"| 8,192 in, 512 out | {mine.name} | {decimal(at_four)} | {decimal(best)} |" in text
    assert "| 8,192 in, 512 out | paper's GPU | 7,202 | 449 |" in text
    assert not any(ratio.is_headline for pair in redrawn.comparison.pairs for ratio in pair.ratios)
