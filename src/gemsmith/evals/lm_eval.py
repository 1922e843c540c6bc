"""Scores of lm-evaluation-harness for the tuned and the base model: its OpenAI client against the same server as ours.

It runs as a process of its own, in the Python of $GEMSMITH_LM_EVAL_PYTHON, else in ours with the extra `lm-eval`.
Prompts are rendered with the run's chat template and sent as token ids, for written answers and log-likelihoods alike.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.data.chat_template import find_template
from gemsmith.errors import EngineError, InputError, MachineError, last_line
from gemsmith.runs.eval_records import LmEvalRecord, LmEvalScore
from gemsmith.runs.run import Run, make_provenance, start_clock, write_record
from gemsmith.serve.server import Server
from gemsmith.serve.settings import KEY_VARIABLE, clean_environment, run_python
from gemsmith.serve.stage import Servers
from gemsmith.system.console import open_console
from gemsmith.system.files import atomic_replace_dir, sha256_file
from gemsmith.system.process import last_lines, supervised

PYTHON_VARIABLE = "GEMSMITH_LM_EVAL_PYTHON"
_ASK_VERSION = "from importlib.metadata import version; import transformers; print(version('lm_eval'))"
# Beside the weights, these are a tokenizer; the template is the run's.
_OF_TOKENIZER = (".json", ".model")


def evaluate_lm_eval(run: Run, servers: Servers, tasks: Sequence[str], *, folder: Path | None = None) -> LmEvalRecord:
    """Runs the tasks, which may be in a folder of the user's own, on both models and records their scores.

    Raises MachineError where lm-evaluation-harness is not installed, EngineError with its last lines where it fails.
    """
    clock = start_clock()
    if not tasks:
        raise InputError("--lm-eval: names no task; give one or more, such as --lm-eval arc_easy,my_task")
    if folder is not None and not folder.is_dir():
        raise InputError(f"--lm-eval-tasks {folder}: is not a folder; give one with the tasks' YAML files")
    python, version = find_lm_eval()
    servers.check_verified()
    # Tuned first, as in the stage eval, so that servers change once.
    tuned_scores, rows = _evaluate(run, servers, "tuned", python, tasks, folder)
    base_scores, _ = _evaluate(run, servers, "base", python, tasks, folder)
    files = sorted(file for file in folder.rglob("*") if file.is_file()) if folder else []
    sources = {f"task file {file.relative_to(folder)}": sha256_file(file) for file in files if folder}
    record = LmEvalRecord(
        provenance=make_provenance(run, "eval", clock, engine=servers.base().vllm, sources=sources),
        warnings=servers.warnings,
        lm_eval=version,
        tasks=tuple(tasks),
        limit=run.recipe.eval.limit,
        rows=rows,
        base=base_scores,
        tuned=tuned_scores,
    )
    return write_record(run, record)


def find_lm_eval() -> tuple[Path, str]:
    """The Python that has lm-evaluation-harness, and its version. Raises MachineError where there is none."""
    given = os.environ.get(PYTHON_VARIABLE)
    python = Path(given or sys.executable)
    where = f"${PYTHON_VARIABLE}: {python}" if given else str(python)
    another = f"set ${PYTHON_VARIABLE} to a Python that has lm_eval[api] and transformers"
    remedy = f"run: pip install 'gemsmith[lm-eval]', or {another}"
    try:
        version = run_python(python, _ASK_VERSION, timeout_s=120)
    except subprocess.CalledProcessError as error:
        why = f"has no lm-evaluation-harness ({last_line(error.stderr)})"
        raise MachineError(f"--lm-eval: {where} {why}; {remedy}") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise MachineError(f"--lm-eval: {where} does not run ({error}); {remedy}") from None
    return python, version.strip()


def read_scores(results: dict[str, Any]) -> dict[str, dict[str, LmEvalScore]]:
    """Task -> metric -> score, of the JSON that lm-evaluation-harness writes.

    >>> read_scores({"results": {"t": {"alias": "t", "acc,none": 0.5, "acc_stderr,none": 0.1}}})["t"]["acc"].value
    0.5
    """
    scores: dict[str, dict[str, LmEvalScore]] = {}
    for task, found in sorted(results["results"].items()):
        scores[task] = {}
        for key, value in found.items():  # such as `acc,none` and `acc_stderr,none`
            name, comma, chosen = key.partition(",")
            if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = found.get(f"{name}_stderr,{chosen}")
            known = float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None
            # A filter that is not `none` stays in the name.
            scores[task][name if chosen == "none" else key] = LmEvalScore(value=float(value), stderr=known)
    return scores


def print_lm_eval(record: LmEvalRecord) -> None:
    console = open_console()
    table = Table("task", "metric", "base", "tuned", "rows", box=None, header_style="bold")
    for task, metrics in record.tuned.items():
        for name, score in metrics.items():
            table.add_row(task, name, _shown(record.base[task][name]), _shown(score), str(record.rows.get(task, "")))
    console.print(table)


def _evaluate(
    run: Run, servers: Servers, model: str, python: Path, tasks: Sequence[str], folder: Path | None
) -> tuple[dict[str, dict[str, LmEvalScore]], dict[str, int]]:
    """The scores of a model, base or tuned, and the rows of each task."""
    if model == "tuned":
        server, checkpoint = servers.tuned(), run.merged
    else:
        server, checkpoint = servers.base(), open_checkpoint(run.recipe.checkpoint).folder
    with atomic_replace_dir(run.logs / f"lm_eval_{model}") as work:
        # The checkpoint's tokenizer with the chat template that the run uses, whichever file that is from.
        (work / "tokenizer").mkdir()
        for file in checkpoint.iterdir():
            if file.suffix in _OF_TOKENIZER and not file.name.endswith(".index.json"):
                shutil.copy(file, work / "tokenizer" / file.name)
        template = find_template(checkpoint, run.recipe.data)
        thinking = "{%- set enable_thinking = true -%}\n" * run.recipe.data.thinking
        (work / "tokenizer" / "chat_template.jinja").write_text(thinking + template.text, encoding="utf-8")
        # JSON is YAML; unlike the command line's, its values may hold commas and equals signs.
        settings = _settings(run, server, work, tasks, folder)
        (work / "settings.yaml").write_text(json.dumps(settings, indent=1), encoding="utf-8")
        command = [str(python), "-m", "lm_eval", "run", "--config", str(work / "settings.yaml")]
        log = run.logs / f"lm_eval_{model}.log"
        key = os.environ.get(KEY_VARIABLE) or "none"
        environment = clean_environment() | {"OPENAI_API_KEY": key, "TOKENIZERS_PARALLELISM": "false"}
        with (
            supervised(command, environment=environment, log=log) as process,
            open_console().status(f"lm-eval {model}: {', '.join(tasks)}"),
        ):
            code = process.wait()
        server.check()
        written = sorted(work.rglob("results*.json"))
        if code or not written:
            raise EngineError(
                f"--lm-eval: lm-evaluation-harness failed (exit code {code}); the end of {log}:\n{last_lines(log)}"
            )
        results = json.loads(written[-1].read_text(encoding="utf-8"))
    rows = {task: int(counts["effective"]) for task, counts in results.get("n-samples", {}).items()}
    return read_scores(results), rows


def _settings(run: Run, server: Server, work: Path, tasks: Sequence[str], folder: Path | None) -> dict[str, Any]:
    recipe = run.recipe
    arguments = {
        "model": server.model,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(work / "tokenizer"),
        "num_concurrent": recipe.eval.concurrency,
        "max_gen_toks": recipe.eval.max_tokens,
        "seed": recipe.seed,
    }
    if recipe.serve.max_model_len is not None:
        arguments["max_length"] = recipe.serve.max_model_len
    settings = {
        "model": "local-completions",
        "model_args": arguments,
        "tasks": list(tasks),
        "apply_chat_template": True,
        "output_path": str(work / "results.json"),
        "log_samples": True,
        "limit": recipe.eval.limit,
        "include_path": None if folder is None else str(folder.resolve()),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _shown(score: LmEvalScore) -> str:
    return f"{score.value:.4f}" + (f" ± {score.stderr:.4f}" if score.stderr is not None else "")
