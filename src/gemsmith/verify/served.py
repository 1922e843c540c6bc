"""Proof by behavior: servers of base + adapter and of merged weights answer the same, and not as the base does."""

from collections.abc import Mapping, Sequence
from typing import Any

from gemsmith.arch.lora_targets import KINDS
from gemsmith.checkpoints.folder import Checkpoint, open_checkpoint
from gemsmith.checkpoints.peft import read_peft_adapter
from gemsmith.evals.tasks import read_questions
from gemsmith.images.patches import read_patching
from gemsmith.runs.records import Check, ExportRecord, VerifyRecord
from gemsmith.runs.run import ExportDir, Run, read_record, write_record
from gemsmith.serve.client.batch import Request, ask_each
from gemsmith.serve.client.chat import TOP, AnswerTokens, api_messages, read_choice, read_tokens
from gemsmith.serve.server import Server, running_server
from gemsmith.serve.settings import ServedAdapter, ServeSettings, base_name
from gemsmith.serve.stage import make_settings
from gemsmith.verify.checks import report_checks
from gemsmith.verify.prompts import text_prompts, trained_rows

PROMPTS, ANSWER_TOKENS = 8, 48
# Merged weights are rounded, base + adapter is not: tokens this close in log-probability may change places.
_NEAR_TIE = {"BF16": 0.3, "F16": 0.05, "F32": 1e-3}

Prompt = Sequence[int] | Sequence[Mapping[str, Any]]  # token ids, or a conversation


def verify_served(place: ExportDir, *, base_source: str | None = None) -> VerifyRecord:
    """Adds what servers show to the verify.json of a run or export. Raises VerifyError where they do not agree."""
    record: VerifyRecord = read_record(place, VerifyRecord)
    exported: ExportRecord = read_record(place, ExportRecord)
    run = place if isinstance(place, Run) else None
    base = open_checkpoint(run.recipe.checkpoint if run else base_source or exported.base)
    prompts: Sequence[Prompt]
    if run and run.recipe.data.eval is not None:
        patching = read_patching(base.config, run.recipe.data.image_tokens)
        prompts = [api_messages(row.messages, row.images, patching) for row in read_questions(run)[:PROMPTS]]
    else:
        rows, seed = (trained_rows(run), run.recipe.seed) if run else (None, 1)
        prompts = [prompt.tokens.tolist() for prompt in text_prompts(rows, base.variant.vocabulary, seed)]
    settings = make_settings(run) if run else ServeSettings(max_model_len=512)
    checks = check_served(base, place, prompts, settings=settings)
    if run and run.recipe.train.dtype in KINDS and exported.merged_into == "trained":
        other = "not compared: merged/ has the dequantized base that was trained on, the adapter's server the original"
        checks = (checks[0], Check(name="served adapter", passed=None, detail=other))
    names = {check.name for check in checks}
    every = (*(check for check in record.checks if check.name not in names), *checks)
    record = record.model_copy(update={"checks": every, "passed": all(check.passed is not False for check in every)})
    write_record(place, record)
    report_checks(checks, place.path)
    return record


def check_served(
    base: Checkpoint, place: ExportDir, prompts: Sequence[Prompt], *, settings: ServeSettings
) -> tuple[Check, ...]:
    """Two checks: tuned answers differ from the base's, and the adapter's are the merged weights'."""
    place.logs.mkdir(exist_ok=True)
    if isinstance(place, Run) and place.recipe.train.method == "full":
        with running_server(base.folder, name="base", settings=settings, log=place.logs / "vllm-base.log") as server:
            plain = _ask(server, "base", prompts)
        log = place.logs / "vllm-merged.log"
        with running_server(place.merged, name="merged", settings=settings, log=log) as server:
            return (_differs(plain, _ask(server, "merged", prompts)),)
    read = read_peft_adapter(place.adapter)
    dtypes = {base.places[f"{module}.weight"].dtype for module in read.modules}
    if dtypes == {"F32"} and settings.dtype == "auto":
        settings = settings.model_copy(update={"dtype": "float32"})  # vLLM's `auto` would round them to bfloat16
    served = ServedAdapter(folder=str(place.adapter.absolute()), rank=read.rank)
    with_lora = settings.model_copy(update={"adapter": served})
    log = place.logs / "vllm-adapter.log"
    with running_server(base.folder, name="adapter", settings=with_lora, log=log) as server:
        plain, adapted = (_ask(server, name, prompts) for name in (base_name("adapter"), "adapter"))
    with running_server(place.merged, name="merged", settings=settings, log=place.logs / "vllm-merged.log") as server:
        tuned = _ask(server, "merged", prompts)
    allowed = _NEAR_TIE["BF16"] if settings.dtype == "bfloat16" else max(_NEAR_TIE[dtype] for dtype in dtypes)
    return _differs(plain, tuned), _agrees(adapted, tuned, allowed)


def gap_at_parting(one: AnswerTokens, other: AnswerTokens) -> float:
    """By how much, in log-probability, the two disagree on the first token that differs; inf where one goes on."""
    for place, (left, right) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if left != right:
            mine, theirs = one.top[place], other.top[place]
            gap = mine[left] - mine.get(right, min(mine.values()))
            return max(gap, theirs[right] - theirs.get(left, min(theirs.values())))
    return 0.0 if len(one.tokens) == len(other.tokens) else float("inf")


def _differs(plain: Sequence[AnswerTokens], tuned: Sequence[AnswerTokens]) -> Check:
    count = sum(one.tokens != other.tokens for one, other in zip(plain, tuned, strict=True))
    detail = f"{count} of {len(tuned)} greedy answers of the merged weights differ from the base's"
    return Check(name="served", passed=count > 0, detail=detail)


def _agrees(adapted: Sequence[AnswerTokens], tuned: Sequence[AnswerTokens], allowed: float) -> Check:
    gaps = [gap_at_parting(one, other) for one, other in zip(adapted, tuned, strict=True)]
    equal = sum(one.tokens == other.tokens for one, other in zip(adapted, tuned, strict=True))
    detail = f"{equal} of {len(gaps)} greedy answers of base + adapter are the merged weights', token by token"
    if equal < len(gaps):
        apart = f"{max(gaps):.2g} apart in log-probability (allowed {allowed:g})"
        detail += f"; the others part where two tokens are {apart}"
    if max(gaps) > allowed:
        remedy = "serve the merged weights (gemsmith serve --skip-verify-check)"
        detail += f"; vLLM applies the adapter in another way: {remedy}"
    return Check(name="served adapter", passed=max(gaps) <= allowed, detail=detail)


def _ask(server: Server, model: str, prompts: Sequence[Prompt]) -> list[AnswerTokens]:
    """The greedy answers to prompts of token ids, or to conversations. Raises EngineError where one is not answered."""
    asked = {"model": model, "max_tokens": ANSWER_TOKENS, "temperature": 0, "return_tokens_as_token_ids": True}
    requests = []
    for prompt in prompts:
        if isinstance(prompt[0], int):
            path, body = "/v1/completions", {"prompt": list(prompt), "logprobs": TOP}
        else:
            path, body = "/v1/chat/completions", {"messages": list(prompt), "logprobs": True, "top_logprobs": TOP}
        requests.append(Request(path=path, body=asked | body))
    # One at a time: answers of a batch may differ from those of a single prompt where two tokens are close.
    return ask_each(server, requests, lambda found: read_tokens(read_choice(found)), to=model)
