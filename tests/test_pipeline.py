"""The stages one after another, as the command line runs them; vLLM is a stand-in here, the rest is real."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from gemsmith import pipeline
from gemsmith.data.dataset import source_sha256
from gemsmith.errors import MachineError
from gemsmith.plan.aot.compile import Limits
from gemsmith.recipe.load import load_recipe
from gemsmith.runs.plan_records import CompiledStep
from gemsmith.runs.run import make_provenance, open_source, read_record, start_clock, write_record
from gemsmith.runs.stages import STAGES
from gemsmith.system.console import open_console

TINY = ["tiny-31b", "tiny-e2b", "tiny-26b-a4b", "tiny-12b"]
RECIPE = """
checkpoint: {checkpoint}
data: {{train: rows.jsonl, eval: {{task: verilog, rows: 3, split: held-out}}, max_length: 64}}
lora: {{rank: 4, alpha: 8, dropout: 0.1}}
optimizer: {{learning_rate: 1e-2, warmup_steps: 1}}
train: {{max_steps: {steps}, global_batch_size: 2, save_steps: 2, dtype: float32}}
bench: {{input_tokens: [16], output_tokens: 16, request_rates: [20], prompts: 12}}
eval: {{scorer: verilog-exact, max_tokens: 16}}
hardware: {{machines: [cpu]}}
"""


@pytest.fixture
def recipe(tmp_path, tiny_checkpoint, small_checkpoint, monkeypatch):
    """Writes my.yaml and rows.jsonl into an empty working folder; paths in them are relative. Without a variant, the
    base has two layers."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "word " * (n % 5 + 1)}]}
        for n in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(variant: str | None = None, steps: int = 3) -> Path:
        file = tmp_path / "my.yaml"
        checkpoint = tiny_checkpoint(variant) if variant else small_checkpoint
        file.write_text(RECIPE.format(checkpoint=checkpoint, steps=steps))
        return file

    return make


@pytest.fixture
def engine(fake_vllm):
    """The stand-in for vLLM, whose bench client answers with a result that the real one once gave."""
    result = json.loads((Path(__file__).parent / "bench" / "golden" / "vllm_bench_serve_0.32.json").read_text())
    fake_vllm(results=[result] * 6)


@pytest.mark.slow
@pytest.mark.parametrize("variant", TINY)
def test_training_is_exported_and_verified_for_every_kind_of_variant(gemsmith, recipe, variant):
    file = recipe(variant)
    for verb in ("data", "train", "export", "verify"):
        code, out, err = gemsmith(verb, file.name, "--json")
        assert code == 0, err
    assert json.loads(out)["passed"]
    train = json.loads(Path("runs/my/train.json").read_text())
    assert [step["step"] for step in train["steps"]] == [1, 2, 3]
    assert all(np.isfinite(step["loss"]) for step in train["steps"])
    assert {"q", "k", "o", "gate", "up", "down"} <= train["adapted"].keys()
    adapter = load_file("runs/my/adapter/adapter_model.safetensors")
    # Where K = V, V gets a copy of K's adapter, without which vLLM applies only half of it.
    copies = train["adapted"]["k"] - train["adapted"].get("v", 0)
    assert len(adapter) == 2 * (sum(train["adapted"].values()) + copies)


def test_a_run_plans_again_once_its_steps_are_counted(recipe):
    """Rows in parquet are not counted before the data stage."""
    import pyarrow.json
    import pyarrow.parquet

    file = recipe("tiny-31b")
    pyarrow.parquet.write_table(pyarrow.json.read_json("rows.jsonl"), "rows.parquet")
    text = file.read_text().replace("rows.jsonl", "rows.parquet").replace("max_steps: 3, ", "")
    file.write_text(text)
    run = open_source(file, lock=lambda path: None)
    first = pipeline.run_stage(run, "plan")
    planned, counted = pipeline._run_each(run, None, ["plan", "data"], open_console())
    assert (first.steps, first.priced_steps) == (None, 1000)
    assert planned.steps == planned.priced_steps == counted.steps == 2
    assert read_record(run, STAGES["plan"].record) == planned
    record = run.record_file("plan")
    record.write_text(record.read_text().replace('"priced_steps": 2', '"priced_steps": 9'))
    pipeline.run_stage(run, "data", force=True)
    assert read_record(run, STAGES["plan"].record).priced_steps == 2


def test_a_plan_whose_steps_were_compiled_is_made_again_of_what_they_took(recipe, monkeypatch):
    run = open_source(recipe("tiny-31b"), lock=lambda path: None)
    asked = []

    def compile_chosen(*given):
        asked.append(given[-1])
        return CompiledStep(
            topology="v6e:2x4",
            versions={},
            peak_bytes=2**30,
            step_s=(1.0, 2.0),
            formula_bytes=2**30,
            formula_step_s=(1.0, 2.0),
        )

    monkeypatch.setattr("gemsmith.plan.machine.compile_chosen", compile_chosen)
    monkeypatch.setattr("gemsmith.plan.stage.check_compiles", lambda *_: None)
    first = pipeline.run_stage(run, "plan", limits=Limits(seconds=1.0))
    pipeline.run_stage(run, "data")
    again = read_record(run, STAGES["plan"].record)
    assert asked[-1] == Limits() and all(machine.compiled for machine in again.machines)
    assert [machine.step_s for machine in again.machines] == [machine.step_s for machine in first.machines]


def test_a_run_writes_every_record_and_the_report_and_is_then_complete(gemsmith, recipe, engine):
    file = recipe()
    code, out, err = gemsmith("run", file.name)
    assert code == 0, err
    run = Path("runs/my")
    assert {path.stem for path in run.glob("*.json")} == set(STAGES)
    assert out.endswith("report: runs/my/report.html\nnext: gemsmith chat runs/my\n")
    for said in (
        "train  loading ",
        "train  the first step, which takes longest: ",
        "verify: ",
        "vLLM is starting with ",
    ):
        assert said in err
    page = (run / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "").replace("http://127.0.0.1", "")
    before = {path: path.stat().st_mtime_ns for path in run.glob("*.json")}
    code, _, err = gemsmith("run", run)
    assert code == 0 and err.count("complete, kept") == len(STAGES)
    assert {path: path.stat().st_mtime_ns for path in run.glob("*.json")} == before


def test_a_run_until_a_stage_and_without_another_leaves_the_others_out(gemsmith, recipe, engine, monkeypatch):
    # What runs is the same with both backends, and TRL has nothing to compile.
    ask = ("run", recipe().name, "--until", "verify", "--skip", "plan", "--set", "train.backend=trl", "--json")
    code, out, err = gemsmith(*ask)
    assert code == 0, err
    assert list(json.loads(out)) == ["data", "train", "export", "verify"]
    assert {path.stem for path in Path("runs/my").glob("*.json")} == {"data", "train", "export", "verify"}
    assert Path("runs/my/report.html").exists()
    # Each later report takes a second, and what is asked below is not in it.
    monkeypatch.setattr(pipeline, "_write_report", lambda *_: None)
    # What is complete is kept without --force; with it, training starts again from step 0 with another rank.
    assert gemsmith("run", "runs/my", "--until", "train")[2].count("complete, kept") == 2
    code, out, err = gemsmith(
        "run", "runs/my", "--skip", "data", "--until", "export", "--force", "--set", "lora.rank=2", "--json"
    )
    assert code == 0 and "kept" not in err, err
    assert json.loads(out)["train"]["steps"][0]["step"] == 1
    assert json.loads(Path("runs/my/adapter/adapter_config.json").read_text())["r"] == 2
    assert load_recipe(Path("runs/my/recipe.yaml")).lora.rank == 2
    code, _, err = gemsmith("run", "runs/my", "--until", "export")
    assert code == 0 and err.count("complete, kept") == 4, "the forced stages are what the recipe there says"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--until", "evl"], "--until evl: is no stage (did you mean eval?); allowed: plan, data"),
        (["--skip", "bench", "--skip", "page"], "--skip page: is no stage; allowed: plan, data"),
        (["--until", "plan", "--skip", "plan"], "--skip plan: leaves no stage to run"),
        (["--skip", "data"], "--skip data: train needs its record, and runs/my/data.json is missing"),
        (["--skip", "verify"], "--skip verify: serve needs its record, and runs/my/verify.json is missing"),
    ],
)
def test_stages_that_cannot_be_left_out_are_one_line_before_anything_runs(gemsmith, recipe, options, message):
    code, _, err = gemsmith("run", recipe("tiny-31b").name, *options)
    assert code == 2 and err.startswith(f"error: {message}") and err.count("\n") == 1
    assert not list(Path("runs").glob("my/*.json"))


def test_a_forced_run_that_fails_leaves_the_recipe_of_what_is_there(gemsmith, recipe):
    file = recipe("tiny-31b")
    assert gemsmith("run", file.name, "--until", "data")[0] == 0
    before = Path("runs/my/recipe.yaml").read_text()
    again = ("run", "runs/my", "--until", "data", "--force", "--set")
    code, _, err = gemsmith(*again, "data.train=gone.jsonl")
    assert code == 2 and "gone.jsonl: does not exist" in err
    assert Path("runs/my/recipe.yaml").read_text() == before
    assert gemsmith(*again, "data.max_length=32")[0] == 0
    assert load_recipe(Path("runs/my/recipe.yaml")).data.max_length == 32


@pytest.mark.slow
def test_what_depends_on_a_stage_done_again_is_done_again(gemsmith, recipe, engine):
    file = recipe("tiny-12b")
    assert gemsmith("run", file.name)[0] == 0
    code, _, err = gemsmith("train", "runs/my", "--force", "--set", "lora.rank=2")
    assert code == 0, err
    code, _, err = gemsmith("verify", "runs/my")
    assert code == 2 and "export.json: was made from other settings; run first: gemsmith export runs/my" in err
    code, _, err = gemsmith("run", "runs/my")
    kept = {line.split()[0] for line in err.splitlines() if "complete, kept" in line}
    assert code == 0 and kept == {"data", "train"}
    assert json.loads(Path("runs/my/adapter/adapter_config.json").read_text())["r"] == 2


@pytest.mark.slow
def test_two_runs_that_differ_in_one_key_are_compared_by_it(gemsmith, recipe, engine):
    file = recipe("tiny-31b", steps=12)
    for name, rank in (("a", 4), ("b", 2)):
        code, _, err = gemsmith("run", file.name, "--run", f"runs/{name}", "--set", f"lora.rank={rank}")
        assert code == 0, err
    code, out, err = gemsmith("report", "runs/a", "runs/b", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["varying"] == ["lora.rank"]
    keys = {each["condition"]: each for each in found["differences"] if ":" not in each["condition"]}
    assert list(keys) == ["lora.rank"], "the one key of the recipe that differs, and no other"
    assert (keys["lora.rank"]["values"], keys["lora.rank"]["confounds"]) == (["4", "2"], [])
    main = {ratio["kind"]: ratio for ratio in found["pairs"][0]["ratios"] if ratio["main"]}
    assert main["training speed"]["confounded_by"] == [], "nothing but the rank differs"
    assert main["training speed"]["interval"] and main["training speed"]["first"] > 0
    # The rank sets how many weights are trained, so that this difference confounds nothing.
    beside = {each["condition"]: each for each in found["differences"] if ":" in each["condition"]}
    trained = beside.pop("train:trained_parameters")
    assert int(trained["values"][0]) == 2 * int(trained["values"][1]) and trained["confounds"] == []
    # Other tests may have compiled the one step, and not the other, which costs seconds.
    assert beside.pop("train:compiled_from_cache", {"confounds": []})["confounds"] in ([], ["cost"])
    # The stand-in for vLLM says nothing of its dtypes, and what nobody recorded cannot be said to be alike.
    unsaid = {name: each["values"] for name, each in beside.items()}
    assert set(unsaid) >= {"bench:kv_cache_dtype", "eval:quantization"}
    assert all(values == [None, None] for values in unsaid.values())
    assert {"bench:kv_cache_dtype"} <= set(main["serving speed"]["confounded_by"]) <= set(unsaid)
    code, out, err = gemsmith("report", "runs/a", "runs/b", "--html", "both.html")
    page = Path("both.html").read_text()
    assert code == 0 and "What is compared is lora.rank." in page and 'aria-label="no headline"' in page


@pytest.mark.slow
def test_a_run_on_several_hosts_ends_after_training(gemsmith, recipe, engine, monkeypatch):
    call = pipeline._call

    def call_as_on_two(run, stage, servers, **options):
        record = call(run, stage, servers, **options)
        return record.model_copy(update={"hosts": 2}) if stage == "train" else record

    monkeypatch.setattr(pipeline, "_call", call_as_on_two)
    code, _, err = gemsmith("run", recipe("tiny-31b").name)
    assert code == 0 and "trained on 2 hosts; the other stages need only one: gemsmith run runs/my" in err
    assert not Path("runs/my/export.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_told_to_stop_says_so_and_goes_on_later(recipe, number, code):
    file = recipe("tiny-31b", steps=400)
    arguments = [sys.executable, "-m", "gemsmith", "train", file.name]
    subprocess.run([*arguments[:3], "data", file.name], check=True, capture_output=True)
    log = Path("runs/my/logs/train_steps.jsonl")
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    deadline_s = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= 5) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert err.strip().splitlines()[-1].startswith("note: stopped")
    assert not Path("runs/my/train.json").exists()
    saved = [int(path.name) for path in Path("runs/my/checkpoints").iterdir() if path.name.isdigit()]
    assert saved


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["data.train=gone.jsonl"], "gone.jsonl: does not exist"),
        (["data.train=logs"], "logs: holds no .jsonl, .json, .csv"),
        (["data.train=my.yaml"], "my.yaml: is a .yaml file; allowed: .jsonl, .json, .csv"),
        (["data.eval=gone.jsonl"], "gone.jsonl: does not exist"),
        (["data.eval=odd.jsonl"], "odd.jsonl line 1: has the columns question"),
        (["data.template=gone.jinja"], "gone.jinja cannot be read"),
        (["data.template=logs"], "data.template: "),
        (["data.template=odd.jinja"], "odd.jinja line 1: is not Jinja"),
        (["train.init_adapter=gone"], "/gone: has no adapter_config.json"),
        (["train.init_adapter=/etc"], "/etc: has no adapter_config.json"),
        (["train.max_steps=10000000000000000000000"], "train.max_steps: 10000000000000000000000 was given"),
        (["lora.rank=100000"], "lora.rank: 100000 was given; no matrix of gemma4-31b with an adapter has more"),
        (["eval.scorer=./gone.py"], "gone.py"),
        (["export.step=9"], "export.step: 9 was given; at the end of 3 steps"),
        (["model=gemma4-12b", "checkpoint=/no/such/folder"], "checkpoint '/no/such/folder': is not a folder"),
    ],
)
def test_what_is_known_to_fail_is_told_before_the_first_stage_and_before_anything_is_fetched(
    gemsmith, recipe, tmp_path, monkeypatch, changes, expected
):
    def fetch(*_: object) -> None:
        raise AssertionError("the weights were asked for")

    file = recipe("tiny-31b")
    (tmp_path / "logs").mkdir()
    (tmp_path / "odd.jsonl").write_text('{"question": "?"}\n')
    (tmp_path / "odd.jinja").write_text("{% if")
    monkeypatch.setattr("gemsmith.checkpoints.folder._fetch_hub", fetch)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**40))
    hub = [] if any(change.startswith("checkpoint") for change in changes) else ["checkpoint=google/gemma-4-31B-it"]
    for verb in ("run", *(["data"] if changes[0].startswith(("data.train", "data.template")) else [])):
        code, _, err = gemsmith(verb, file.name, *(word for change in [*hub, *changes] for word in ("--set", change)))
        assert code == 2 and err.count("\n") == 1, err
        assert err.startswith("error: ") and expected in err
    assert not list(Path("runs/my").glob("*.json"))


def test_a_bad_row_is_told_before_the_weights_are_fetched(gemsmith, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("gemsmith.checkpoints.folder._fetch_hub", lambda _: pytest.fail("the weights were asked for"))
    (tmp_path / "rows.jsonl").write_text('{"messages": 5}\n')
    code, _, err = gemsmith("data", recipe("tiny-31b").name, "--set", "checkpoint=google/gemma-4-31B-it")
    assert code == 2 and "rows.jsonl line 1: messages is a number" in err


def test_a_plan_needs_no_rows(gemsmith, recipe):
    assert gemsmith("plan", recipe("tiny-31b").name, "--set", "data.train=gone.jsonl", "--run", "runs/planned")[0] == 0


def test_without_vllm_that_is_told_first_and_the_report_is_written_all_the_same(gemsmith, recipe, monkeypatch):
    monkeypatch.setenv("GEMSMITH_SERVE_PYTHON", "/no/python")
    monkeypatch.setattr(pipeline, "_call", only_cheap_stages)
    code, _, err = gemsmith("run", recipe("tiny-31b").name)
    lines = err.splitlines()
    assert code == 2
    assert lines[0].startswith(
        "warning: serve, bench, eval will not run here, the stages before will: $GEMSMITH_SERVE_PYTHON: /no/python"
    )
    assert lines[-2] == "report   of what there is: runs/my/report.html"
    assert lines[-1].startswith("error: serve failed") and Path("runs/my/report.html").exists()
    err = gemsmith("run", "runs/my")[2]
    assert "warning" not in err and err.splitlines()[-1].startswith("error: serve failed")


def only_cheap_stages(run, stage, servers, **_):
    """Plans; of the others writes nothing but a record that says enough to be taken for complete."""
    if stage == "serve":
        raise MachineError("serve failed")
    if stage == "plan":
        from gemsmith.plan.stage import plan

        return plan(run)
    kept = {
        "rows": 3,
        "dropped": {},
        "packed_rows": 3,
        "tokens": 9,
        "supervised_tokens": 3,
        "packing_efficiency": 0.5,
        "steps": 3,
    }
    values = {
        "data": kept | {"length_percentiles": {"p50": 3}, "template_sha256": "0", "rows_sha256": "0"},
        "train": {
            "backend": "tunix",
            "model": "tiny-31b",
            "steps": (),
            "adapted": {},
            "trained_parameters": 1,
            "mesh": {"fsdp": 1},
        }
        | {"real_tokens_per_s": 1.0, "peak_memory_bytes": 1, "last_checkpoint": "checkpoints/3"},
        "export": {"step": 3, "adapter": (), "merged": (), "merged_tensors": 1, "copied_tensors": 0},
        "verify": {
            "passed": True,
            "checks": (),
            "changed_tensors": 1,
            "expected_tensors": 1,
            "logits_max_abs_difference": None,
        },
    }[stage]
    sources = {"data.train": source_sha256(run.recipe.data.train)} if stage == "data" else {}
    record = STAGES[stage].record(provenance=make_provenance(run, stage, start_clock(), sources=sources), **values)
    write_record(run, record)
    return record


@pytest.mark.slow
def test_a_run_whose_rows_have_gone_is_served_and_reported(gemsmith, recipe, monkeypatch, engine):
    file = recipe("tiny-31b")
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_call", only_cheap_stages)
        assert gemsmith("run", file.name)[0] == 2
    Path("rows.jsonl").unlink()
    assert gemsmith("report", "runs/my")[0] == 0
    shutil.copytree(load_recipe("runs/my/recipe.yaml").checkpoint, "runs/my/merged")
    monkeypatch.setattr("gemsmith.serve.stage.find_verification_issue", lambda _run, adapter: None)
    code, _, err = gemsmith("run", "runs/my")
    assert code == 0, err


def test_notices_of_a_stage_are_printed_as_they_are_the_grave_ones_first(capsys):
    told = {"warnings": ("3 rows of [/a]\nare also trained on.",), "critical_warnings": ("Do not use [b].",)}
    pipeline.print_warnings_of(STAGES["data"].record.model_construct(**told))
    assert (
        capsys.readouterr().err
        == "data: critical: Do not use [b].\ndata: warning: 3 rows of [/a] are also trained on.\n"
    )


def test_a_warmup_that_takes_all_steps_is_told_once(recipe, gemsmith):
    """Before training, and not again with its record and below the summary."""
    asked = ("--until", "train", "--set", "train.backend=trl", "--set", "optimizer.warmup_steps=9")
    code, out, err = gemsmith("run", recipe(steps=1), *asked)
    assert code == 0, err
    notice = "Training has 1 step and warm-up takes 9, so no step gets optimizer.learning_rate"
    assert (out.count(notice), err.count(notice)) == (0, 1) and "train: warning: " not in err
    out, err = gemsmith("run", "runs/my", "--until", "train")[1:]
    assert (out.count(notice), err.count(notice)) == (1, 0)  # nothing is trained, so the summary alone tells it
