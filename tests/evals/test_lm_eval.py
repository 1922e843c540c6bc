"""lm-evaluation-harness against both models: a stand-in for it, and the real one on a task of four rows."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemsmith.errors import EngineError, InputError, MachineError
from gemsmith.evals.lm_eval import PYTHON_VARIABLE, evaluate_lm_eval, find_lm_eval
from gemsmith.runs.eval_records import LmEvalRecord, LmEvalScore
from gemsmith.runs.run import Run, read_record
from gemsmith.serve.settings import find_vllm
from gemsmith.serve.stage import Servers


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the stand-in heard, a line for each model."""
    python, heard = tmp_path / "lm-eval-python", tmp_path / "heard"
    python.write_text(f"#!{sys.executable} -I\n{(Path(__file__).parent / 'fake_lm_eval.py').read_text()}")
    python.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))
    monkeypatch.setenv("FAKE_HEARD", str(heard))
    return heard


def test_both_models_are_scored_with_the_runs_own_template_and_recorded(
    fake: Path, fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], tmp_path: Path
) -> None:
    fake_vllm()
    template, tasks = tmp_path / "template.jinja", tmp_path / "tasks"
    template.write_text("{{ bos_token }}mine")
    tasks.mkdir()
    (tasks / "my_task.yaml").write_text("task: my_task")
    run = exported_run({"eval": {"limit": 4, "concurrency": 3}, "data": {"template": str(template)}})
    with Servers(run) as servers:
        record = evaluate_lm_eval(run, servers, ["my_task"], folder=tasks)
    assert record == read_record(run, LmEvalRecord)
    assert record.tuned["my_task"]["acc"] == LmEvalScore(value=0.75, stderr=0.1)
    assert record.base["my_task"] == {
        "acc": LmEvalScore(value=0.25, stderr=0.1),
        "em,strict": LmEvalScore(value=0.0, stderr=None),
    }
    assert (record.lm_eval, record.limit, record.rows) == ("0.0.fake", 4, {"my_task": 4})
    assert "task file my_task.yaml" in record.provenance.inputs_sha256
    [(tuned, key), (base, _)] = [json.loads(line) for line in fake.read_text().splitlines()]
    assert (tuned["model_args"]["model"], base["model_args"]["model"], key) == ("demo", "demo-base", "none")
    assert (tuned["limit"], tuned["include_path"], tuned["model_args"]["max_length"]) == (4, str(tasks), 640)
    assert (run.logs / "lm_eval_tuned" / "tokenizer" / "chat_template.jinja").read_text() == "{{ bos_token }}mine"
    assert (run.logs / "lm_eval_base" / "tokenizer" / "tokenizer.json").is_file()


def test_what_the_harness_ends_with_is_shown_and_nothing_is_recorded(
    fake: Path, fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm()
    monkeypatch.setenv("FAKE_LM_EVAL", "task")
    run = exported_run()
    with (
        Servers(run) as servers,
        pytest.raises(EngineError, match=r"failed \(exit code 1\)(.|\n)*Tasks not found: my_t"),
    ):
        evaluate_lm_eval(run, servers, ["my_task"])
    assert not run.record_file("lm_eval").exists() and not (run.logs / "lm_eval_tuned").exists()


def test_no_harness_no_task_and_no_folder_are_one_line(
    fake: Path, exported_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = exported_run()
    with Servers(run) as servers:
        with pytest.raises(InputError, match=r"^--lm-eval: names no task"):
            evaluate_lm_eval(run, servers, [])
        with pytest.raises(InputError, match=r"^--lm-eval-tasks .*/none: is not a folder"):
            evaluate_lm_eval(run, servers, ["a"], folder=tmp_path / "none")
    monkeypatch.setenv("FAKE_LM_EVAL", "absent")
    with pytest.raises(
        MachineError, match=r"has no lm-evaluation-harness \(ModuleNotFoundError: No module named 'trans"
    ):
        find_lm_eval()
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(MachineError, match=r"nowhere does not run .* pip install 'gemsmith\[lm-eval\]'"):
        find_lm_eval()


@pytest.mark.slow
def test_the_command_line_prints_the_record(
    fake: Path, fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], gemsmith: Callable[..., Any]
) -> None:
    fake_vllm()
    run = exported_run()
    code, out, err = gemsmith("eval", run.path, "--lm-eval", "my_task, other", "--json")
    assert code == 0, err
    assert json.loads(out)["tasks"] == ["my_task", "other"]
    code, _, err = gemsmith("eval", run.path, "--lm-eval", "my_task")
    assert code == 0 and "0.7500 ± 0.1000" in err
    code, _, err = gemsmith("eval", run.path, "--lm-eval-tasks", "folder")
    assert code == 2 and "--lm-eval-tasks: goes with --lm-eval;" in err


ROWS = [{"question": f"Is {n} even?", "choices": ["yes", "no"], "label": n % 2, "answer": "yes"} for n in range(4)]


def write_tasks(folder: Path) -> Path:
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choosing = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "label"}
    writing = {
        "output_type": "generate_until",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    for name, own in (("even_choice", choosing), ("even_text", writing)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | shared | own))
    return folder


@pytest.mark.vllm
def test_the_real_harness_scores_a_task_of_ones_own_on_the_real_engine(
    exported_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        find_vllm()
        find_lm_eval()
    except MachineError as error:
        pytest.skip(str(error))
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    run = exported_run({"serve": {"dtype": "float32", "max_model_len": 640}, "eval": {"max_tokens": 8}})
    with Servers(run) as servers:
        record = evaluate_lm_eval(run, servers, ["even_choice", "even_text"], folder=write_tasks(tmp_path / "tasks"))
    assert record.rows == {"even_choice": 4, "even_text": 4}
    assert record.base == record.tuned, "the same weights score the same"
    assert set(record.tuned["even_choice"]) >= {"acc", "acc_norm"} and "exact_match" in record.tuned["even_text"]
