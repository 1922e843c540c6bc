"""The stages one after another, as the command line runs them; vLLM is a stand-in here, the rest is real."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gemsmith import pipeline
from gemsmith.records import STAGES

TINY = ["tiny-31b", "tiny-e2b", "tiny-26b-a4b", "tiny-12b"]
RECIPE = """
checkpoint: {checkpoint}
data: {{train: rows.jsonl, eval: {{task: verilog, rows: 3, split: held-out}}, max_length: 64}}
lora: {{rank: 4, alpha: 8, dropout: 0.1}}
optimizer: {{learning_rate: 1e-2, warmup_steps: 1}}
train: {{optimizer_steps: {steps}, rows_per_step: 2, checkpoint_every: 2, dtype: float32}}
bench: {{input_tokens: [8], output_tokens: 4, request_rates: [50], prompts: 2}}
eval: {{scorer: verilog-exact, max_tokens: 16}}
hardware: {{machines: [cpu]}}
"""


@pytest.fixture
def recipe(tmp_path, tiny_checkpoint, monkeypatch):
    """Writes my.yaml and rows.jsonl into an empty working folder; paths in them are relative."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "word " * (n % 5 + 1)}]} for n in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(variant: str, steps: int = 3) -> Path:
        file = tmp_path / "my.yaml"
        file.write_text(RECIPE.format(checkpoint=tiny_checkpoint(variant), steps=steps))
        return file

    return make


@pytest.fixture
def engine(fake_vllm):
    """The stand-in for vLLM, whose bench client answers with a result that the real one once gave."""
    result = json.loads(next((Path(__file__).parent / "bench" / "golden").glob("*.json")).read_text())
    fake_vllm(results=[result] * 6)


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


def test_a_run_writes_every_record_and_the_report_and_is_then_complete(gemsmith, recipe, engine):
    file = recipe("tiny-31b")
    code, out, err = gemsmith("run", file.name)
    assert code == 0, err
    run = Path("runs/my")
    assert {path.stem for path in run.glob("*.json")} == set(STAGES)
    assert "report.html" in out
    page = (run / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "").replace("http://127.0.0.1", "")
    before = {path: path.stat().st_mtime_ns for path in run.glob("*.json")}
    code, _, err = gemsmith("run", run)
    assert code == 0 and err.count("complete, kept") == len(STAGES)
    assert {path: path.stat().st_mtime_ns for path in run.glob("*.json")} == before


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


def test_a_run_on_several_hosts_ends_after_training(gemsmith, recipe, engine, monkeypatch):
    call = pipeline._call

    def call_as_on_two(run, stage, servers):
        record = call(run, stage, servers)
        return record.model_copy(update={"hosts": 2}) if stage == "train" else record

    monkeypatch.setattr(pipeline, "_call", call_as_on_two)
    code, _, err = gemsmith("run", recipe("tiny-31b").name)
    assert code == 0 and "trained on 2 hosts; the other stages need only one: gemsmith run runs/my" in err
    assert not Path("runs/my/export.json").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_told_to_stop_says_so_and_goes_on_later(recipe, number, code):
    file = recipe("tiny-31b", steps=400)
    arguments = [sys.executable, "-m", "gemsmith.cli", "train", file.name]
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
