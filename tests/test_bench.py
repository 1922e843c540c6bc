"""`make bench` holds every benchmark against a bound, and `make check` names the records that are old."""

import importlib
import json
import runpy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gemsmith.arch import find_variant
from gemsmith.checkpoints.folder import open_checkpoint
from tiny_checkpoints import with_vision

ROOT = Path(__file__).parents[1]
NO_BENCHMARKS = {"short"}


@pytest.fixture
def bench():
    return runpy.run_path(str(ROOT / "scripts" / "bench.py"))


def test_every_benchmark_has_a_bound_that_its_record_keeps(bench):
    assert set(bench["EVERY"]) == {file.stem for file in (ROOT / "benchmarks").glob("*.py")} - NO_BENCHMARKS
    for name, benchmark in bench["EVERY"].items():
        found = benchmark.number(json.loads((bench["RECORDS"] / (benchmark.record or f"{name}.json")).read_text()))
        assert benchmark.least <= found <= benchmark.most, name
        assert all((ROOT / "src" / "gemsmith" / part).exists() for part in benchmark.code), name


@pytest.fixture
def made_up(bench, tmp_path, monkeypatch):
    """Runs a benchmark that writes this text for its record, held against a bound of at least 2."""

    def run(body):
        (tmp_path / "own.py").write_text(f"import os, sys\nfolder = os.environ['GEMSMITH_BENCH_SHORT']\n{body}\n")
        own = bench["Benchmark"](what="tries", number=lambda record: record["n"], least=2, code=())
        bench["main"].__globals__.update(EVERY={"own": own}, BENCHMARKS=tmp_path)
        bench["main"](["own"])

    return run


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("open(f'{folder}/own.json', 'w').write('{\"n\": 1}')", "error: own: tries: 1, must be at least 2"),
        ("sys.exit('no luck')", "error: own: ended with 1: no luck"),
    ],
)
def test_a_benchmark_below_its_bound_or_without_a_record_fails_with_one_line(body, line, made_up):
    with pytest.raises(SystemExit) as end:
        made_up(body)
    assert end.value.code == line


def test_one_within_its_bound_passes(made_up, capsys):
    made_up("open(f'{folder}/own.json', 'w').write('{\"n\": 2}')")
    assert capsys.readouterr().out.startswith("own: tries: 2 (")


def test_records_of_other_versions_and_older_than_their_code_are_warnings(bench, tmp_path, capsys):
    record = {"packages": {"numpy": "0.1", "not_locked": "1"}}
    (tmp_path / "own.json").write_text(json.dumps(record))
    own = bench["Benchmark"](what="tries", number=len, code=("data",))
    names = {"EVERY": {"own": own}, "RECORDS": tmp_path, "ROOT": tmp_path, "pinned": lambda: {"numpy": {"2.4"}}}
    names["_committed"] = lambda path: 2 if path.startswith("src") else 1
    bench["main"].__globals__.update(names)
    bench["main"](["--records"])
    assert capsys.readouterr().out.splitlines() == [
        "warning: own.json: measured with numpy 0.1 (locked: 2.4); run its benchmark again",
        "warning: own.json: older than src/gemsmith/data; run its benchmark again",
    ]


@pytest.mark.slow
def test_the_weights_that_a_gpu_is_timed_with_are_all_that_training_asks_for(monkeypatch, tmp_path):
    import torch

    from gemsmith.train.torch.model import load_base

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    throughput = importlib.import_module("train_throughput")
    monkeypatch.setattr(throughput, "ProcessPoolExecutor", ThreadPoolExecutor)  # JAX warns where it is forked
    case = replace(throughput.GPU, variant=with_vision(find_variant("tiny-12b")))
    throughput.write_model(case, tmp_path / "base")
    recipe = throughput.recipe_of(case, "trl", tmp_path / "base", tmp_path / "rows.jsonl")
    base = load_base(recipe, open_checkpoint(str(tmp_path / "base")), "documents", torch.device("cpu"), vision=False)
    assert not any(weight.is_meta for weight in base.parameters())
