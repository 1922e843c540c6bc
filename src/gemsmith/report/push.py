"""A run's weights on the Hugging Face hub, with a model card that is written from its records: `gemsmith push`."""

import os
import re
from collections.abc import Iterator
from typing import Any, Literal

import yaml

from gemsmith.analysis.summary import RunRecords, count_checks, find_notices, read_findings, score_words
from gemsmith.checkpoints.folder import is_hub_id
from gemsmith.errors import InputError, MachineError, RunError, first_line
from gemsmith.report.tables import Table
from gemsmith.runs.records import ExportRecord
from gemsmith.runs.run import Run, read_record
from gemsmith.serve.command import max_lora_rank
from gemsmith.serve.stage import find_verification_issue
from gemsmith.system.console import open_console
from gemsmith.system.format import count, decimal, p_value, signed, size
from gemsmith.system.version import __version__

Weights = Literal["adapter", "merged"]
CARD = "README.md"
_DESTINATION = re.compile(r"hub:([\w.-]+/[\w.-]+)")


def push(
    run: Run,
    destination: str,
    *,
    weights: Weights = "adapter",
    private: bool = False,
    license: str | None = None,  # noqa: A002 (the card's word)
    skip_verify_check: bool = False,
) -> str:
    """Uploads adapter/ or merged/ and its card in one commit, and returns the repository's address.

    Raises InputError for a destination that is none, RunError where verify has not passed the weights, MachineError
    where the hub refuses or cannot be reached; nothing has been committed then.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    name = repository(destination)
    if weights == "adapter" and run.recipe.train.method == "full":
        raise RunError(f"{run.path}: train.method full makes no adapter; add --weights merged")
    if not skip_verify_check:
        refuse_unverified(run, weights)
    card = model_card(run, name, weights=weights, license=license)
    exported, add = read_record(run, ExportRecord), huggingface_hub.CommitOperationAdd
    files = [file for file in getattr(exported, weights) if file.name != CARD]
    operations = [add(CARD, card.encode()), *(add(file.name, run.path / weights / file.name) for file in files)]
    open_console().print(f"push: {len(files)} files, {size(sum(file.bytes for file in files))}, to {name}")
    api = huggingface_hub.HfApi()
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        done = api.create_commit(name, operations, commit_message=f"{weights} by Gemsmith {__version__}")
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise MachineError(
            f"--to {destination}: the Hugging Face hub refused or was not reached "
            f"({first_line(error.__cause__ or error)}); set HF_TOKEN to one that may write there"
        ) from None
    return str(done.repo_url)


def repository(destination: str) -> str:
    """OWNER/NAME of hub:OWNER/NAME. Raises InputError for anything else."""
    if (found := _DESTINATION.fullmatch(destination)) is None:
        raise InputError(f"--to {destination}: must be hub:OWNER/NAME or vertex:PROJECT/REGION")
    return found[1]


def refuse_unverified(run: Run, weights: Weights, *, are_here: bool = True) -> None:
    """Raises RunError where verify has not passed the weights, as they are now if they are here."""
    if issue := find_verification_issue(run, adapter=weights == "adapter", are_here=are_here):
        raise RunError(
            f"{run.path / weights}: not pushed: {issue[0]}; run: {issue[1]}; to push anyway, add --skip-verify-check"
        )


def model_card(run: Run, name: str, *, weights: Weights, license: str | None = None) -> str:  # noqa: A002
    """The card: scores with intervals, data, training, checks and the recipe, as far as there are records."""
    found = read_findings(run)
    base, merged = _public(run.recipe.checkpoint), weights == "merged"
    front: dict[str, Any] = {"license": license} if license else {}
    if is_hub_id(run.recipe.checkpoint):
        front |= {"base_model": base, "base_model_relation": "finetune" if merged else "adapter"}
    front |= {
        "library_name": "transformers" if merged else "peft",
        "pipeline_tag": "image-text-to-text" if found.data and found.data.images else "text-generation",
        "tags": ["gemma4", "lora", "gemsmith"],
    }
    if results := list(_index(found)):
        front["model-index"] = [{"name": name.partition("/")[2], "results": results}]
    recipe = _public_values(run.recipe.model_dump(mode="json", exclude_defaults=True))
    title = name.partition("/")[2]
    checks = "Nothing.\n"
    if found.verify is not None:
        outcomes = {True: "passed", False: "failed", None: "not done"}
        rows = [(outcomes[check.passed], check.name, check.detail) for check in found.verify.checks]
        table = Table(columns=("", "check", "found"), rows=rows).to_markdown()
        checks = "\n".join([f"{count_checks(found.verify)}.", "", *table])
    lora = f"--enable-lora --max-lora-rank {max_lora_rank(run.recipe.lora.rank)} --lora-modules {title}={name}"
    parts = [
        f"---\n{_yaml(front)}---\n\n# {title}\n",
        f"{'The merged weights' if merged else 'The LoRA adapter'} of {base}, fine-tuned by Gemsmith {__version__}.\n",
        *(f"> **{'Do not use as it is' if one.critical else 'Note'}:** {one.text}\n" for one in find_notices(found)),
        f"## Scores\n\n{_scores(found)}",
        f"## Use\n\n```\nvllm serve {name if merged else f'{base} {lora}'}\n```\n",
        "\n".join(["## Training", "", *_training(found).to_markdown()]),
        f"## What was checked\n\n{checks}",
        f"<details><summary>Recipe</summary>\n\n```yaml\n{_yaml(recipe)}```\n\n</details>\n",
    ]
    card = "\n".join(parts)
    for place in (str(run.path.resolve()), run.recipe.checkpoint):  # which a check or a warning may name
        card = card.replace(place, _public(place)) if os.path.isabs(place) else card
    for server in found.eval.elsewhere.values() if found.eval else ():
        card = card.replace(f" at {server.url}", "")
    return card


def _yaml(value: Any) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def _public(place: str) -> str:
    """A place that others can use as it is, or the last part of one on this machine or in a bucket."""
    return place if is_hub_id(place) else place.rstrip("/").rpartition("/")[2]


def _public_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public_values(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_public_values(each) for each in value]
    return _public(value) if isinstance(value, str) and ("://" in value or os.path.isabs(value)) else value


def _index(found: RunRecords) -> Iterator[dict[str, Any]]:
    """The tuned model's scores as the hub's model-index has them."""
    for task in found.eval.tasks if found.eval else ():
        score = task.tuned.score
        metric = "pass@1" if task.tuned.problems else "accuracy"
        yield {
            "task": {"type": "text-generation"},
            "dataset": {"name": _public(task.dataset) if task.dataset else "held-out rows", "type": task.task},
            "metrics": [{"type": metric, "name": f"{task.task}, n = {score.n}", "value": round(score.score, 4)}],
        }


def _scores(found: RunRecords) -> str:
    if found.eval is None:
        return "Not scored.\n"
    rows = []
    for task in found.eval.tasks:
        base, tuned, change = task.base.score, task.tuned.score, task.difference
        moved = f"{signed(change.mean)} ({signed(change.low)} to {signed(change.high)}), {p_value(change.p_value)}"
        rows.append((task.task, count(tuned.n), score_words(base), score_words(tuned), moved))
    columns = ("scorer", "n", "base, 95 %", "tuned, 95 %", "difference, 95 %")
    return "\n".join(Table(columns=columns, rows=rows).to_markdown())


def _training(found: RunRecords) -> Table:
    rows = []
    if data := found.data:
        rows += [
            ("rows", f"{count(data.rows)}, {count(data.tokens)} tokens, {count(data.supervised_tokens)} in the loss"),
            ("SHA-256 of the packed rows", data.rows_sha256),
        ]
        if data.held_out_also_trained is not None:
            rows.append(("held-out rows whose prompt is trained on", count(data.held_out_also_trained)))
    if (train := found.train) and train.steps:
        first, last = train.steps[0], train.steps[-1]
        rows += [
            ("loss", f"{decimal(first.loss)} → {decimal(last.loss)} in {count(last.step)} steps"),
            ("trained parameters", count(train.trained_parameters)),
            ("backend", f"{train.backend}, base in {train.base_dtype}"),
            ("machine", train.machine or ", ".join(train.provenance.machine.accelerators) or "CPU"),
            ("versions", ", ".join(f"{name} {version}" for name, version in train.provenance.versions.items())),
        ]
    return Table(columns=("what", "value"), rows=rows)
