"""The verbs that need a server: serve, bench, eval, chat."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from gemsmith.cli.main import cli, lazy_import, print_json, require_extra
from gemsmith.cli.options import (
    FOLDER,
    Number,
    RunArgs,
    conflicts,
    force_option,
    given_options,
    json_option,
    option,
    requires,
    run_args,
    set_option,
    skip_verify_option,
)
from gemsmith.errors import InputError

url_option = partial(option, "--url", metavar="URL")
model_option = partial(option, "--model", metavar="NAME")
_OF_A_TASK = "task dataset samples temperature top_p seed max_tokens prompt unsafe answers".split()
OF_A_RUN = ("base", "tuned")
SAMPLING = ("temperature", "top_p", "max_tokens", "seed")

temperature_option = option("--temperature", type=Number(0, 2), default=0.0, show_default=True)
top_p_option = option("--top-p", type=Number(0, 1, min_open=True), default=1.0, show_default=True)
seed_option = option("--seed", type=int, help="Of sampling; default: none.")
max_tokens = partial(option, "--max-tokens", metavar="N", default=512, show_default=True)
max_tokens_option = max_tokens(help="Of an answer.")


@cli.command(short_help="Keep the tuned model up in vLLM.")
@run_args(kind=str)
@skip_verify_option
@option("--machine", metavar="MACHINE", help="A machine of the hardware catalog, such as 2xh100 or v6e-8.")
@option("--print", "as_command", is_flag=True, help="Print the command, with each choice's reason; run nothing.")
@option(
    "--restart", type=click.IntRange(min=0), default=0, metavar="N", help="Start vLLM again up to N times if it dies."
)
@conflicts("as_json", "machine")
@conflicts("restart", "as_json", "as_command")
def serve(args: RunArgs, skip_verify_check: bool, machine: str | None, as_command: bool, restart: int) -> None:
    """Keep the tuned model up behind vLLM's OpenAI API until Ctrl-C; prints a curl line.

    SOURCE is a run directory or a recipe (YAML); or a checkpoint: a folder with config.json, or a Hugging Face hub id.
    --machine says which machine this is, and vLLM runs in Docker where that answers; with --print the command is for
    that machine, and neither it nor the weights need be here. With a run, --set changes keys of serve for this time
    only, and no record. With --json the server is started, asked once, recorded and stopped. Weights that verify has
    not passed as they are now are refused. Once the model is up, other commands may use the run directory.

    \b
    gemsmith serve runs/my --set serve.port=8000
    gemsmith serve recipes/verilog_31b.yaml --machine v6e-8 --print
    """
    targets, folder = lazy_import("serve.targets"), Path(args.source)
    if as_command:
        targets.print_deployment(args.source, args.run_path, args.overrides, machine)
    elif targets.is_checkpoint(args.source):
        if args.as_json or args.run_path or skip_verify_check or restart:
            those = "--json, --run, --restart and --skip-verify-check"
            raise InputError(f"{those} are for a run or a recipe, {args.source} is neither")
        targets.serve_checkpoint(args.source, args.overrides, machine)
    elif args.as_json:
        args.print_record(replace(args, force=True).run_stage("serve", skip_verify_check=skip_verify_check)[1])
    else:
        with contextlib.ExitStack() as lock:
            if (folder / "recipe.yaml").exists():
                lock.enter_context(lazy_import("system.locks").locked(folder))
                opened = lazy_import("runs.run").open_run_readonly(folder, args.overrides, section="serve")
            else:
                opened = args.open_run(force=("serve",), stack=lock)
                lazy_import("runs.run").commit_recipe(opened)
            lazy_import("serve.stage").keep_serving(
                opened, machine, skip_verify_check=skip_verify_check, restarts=restart, ready=lock.close
            )


@cli.command(short_help="Load-test the tuned model.")
@run_args(required=False, force=True)
@skip_verify_option
@option("--grid", type=click.Choice(["own", "paper", "paper-30", "short"]), help="What is measured; sets bench.grid.")
@url_option(help="Instead of a run's model: any server with OpenAI's API.")
@model_option(help="With --url: the model's name there; default: the only one.")
@option("--tokenizer", metavar="FOLDER", help="With --url: a folder with the model's tokenizer.json.")
@option("--out", metavar="FILE", help="With --url: where the record goes.")
@requires("url", "model", "tokenizer", "out")
@conflicts("url", "force", "skip_verify_check", "run_path")
def bench(args: RunArgs, skip_verify_check: bool, grid: str | None, **server: Any) -> None:
    """Load-test the tuned model: TTFT, TPOT, ITL and throughput under each load of a grid.

    SOURCE is a recipe (YAML) or a run directory. With --url it is left out, or says with its section bench what is
    measured; nothing is written there. A key comes from $VLLM_API_KEY or $OPENAI_API_KEY. A stopped sweep resumes with
    the remaining cells.

    \b
    gemsmith bench runs/my --grid short --force
    gemsmith bench runs/my --set bench.slo_ttft_ms=200 --force
    gemsmith bench --url http://127.0.0.1:8000 --tokenizer gemma-4-E2B-it --grid short --out bench.json
    """
    if grid:
        args = replace(args, overrides=(*args.overrides, f"bench.grid={grid}"))
    if server["url"] is not None:
        given = {name: value for name, value in server.items() if value is not None}
        record = lazy_import("bench.stage").bench_url(args.source, args.overrides, **given)
        lazy_import("pipeline").print_warnings_of(record)
    elif args.source is None:
        raise InputError("SOURCE is missing; give a recipe or run directory, or --url of a server")
    else:
        record = args.run_stage("bench", skip_verify_check=skip_verify_check)[1]
    args.print_record(record)


@cli.command(name="eval", short_help="Score base and tuned model.")
@run_args(required=False, force=True)
@skip_verify_option
@option("--task", type=click.Choice(["verilog"]), help="A task to add to the run's; or, with --answers, alone.")
@option("--dataset", metavar="FOLDER", help="With --task verilog: verilog-eval's dataset_spec-to-rtl.")
@option("--samples", metavar="N", help="With --task: answers to each; default 5.")
@option("--temperature", type=Number(min=0), metavar="T", help="With --task; default 0.8.")
@option("--top-p", type=Number(min=0, max=1, min_open=True), metavar="P", help="With --task; default 0.95.")
@option("--seed", type=click.IntRange(min=0), metavar="N", help="With --task; default: the recipe's seed.")
@option("--max-tokens", metavar="N", help="With --task; default: the recipe's eval.max_tokens.")
@option("--prompt", metavar="NAME|FILE", help="With --task verilog: official (default), fenced, paper, or a .txt file.")
@option("--unsafe", is_flag=True, help="With --task: run generated code without a sandbox.")
@option(
    "--lm-eval", metavar="TASK[,TASK]", help="Instead: these tasks of lm-evaluation-harness, into RUN/lm_eval.json."
)
@option("--lm-eval-tasks", metavar="FOLDER", help="With --lm-eval: a folder of your own tasks for it.")
@url_option(help="The tuned model is at an OpenAI server; a key is in $VLLM_API_KEY or $OPENAI_API_KEY.")
@model_option(help="With --url: the model's name there; default: the only one.")
@option("--base-url", metavar="URL", help="With --url: where the base is; default, with --base-model: there, too.")
@option("--base-model", metavar="NAME", help="With --url: the base's name; without both the run's own base is asked.")
@option("--answers", metavar="FILE", help='Without SOURCE: JSONL of {"problem", "completion"}.')
@option("--table", is_flag=True, help="Print every problem of such tasks, base and tuned side by side.")
@requires("lm_eval", "lm_eval_tasks")
@requires("url", "model", "base_url", "base_model")
@requires("source", "force", "skip_verify_check", "run_path", "overrides", "table", "lm_eval", "url")
@conflicts("lm_eval", *_OF_A_TASK, "table", "url")
@conflicts("url", "skip_verify_check")
@conflicts("source", "answers")
def evaluate(
    args: RunArgs, skip_verify_check: bool, lm_eval: str | None, lm_eval_tasks: Path | None, table: bool, **options: Any
) -> None:
    """Score base and tuned model on the same questions through the served API, and say whether they differ.

    SOURCE is a recipe (YAML) or a run directory: its held-out rows are answered greedily, or its eval.tasks are done;
    --task adds one, and answers of the others that are there are not asked for again. Without SOURCE, --task, --dataset
    and --answers score completions that exist already, without a server. Generated code runs in a sandbox.

    \b
    gemsmith eval runs/my --set eval.limit=50 --force
    gemsmith eval runs/my --task verilog --dataset verilog-eval/dataset_spec-to-rtl --table
    gemsmith eval runs/my --url https://my-service --base-url http://127.0.0.1:8000
    gemsmith eval runs/my --lm-eval arc_easy,my_task --lm-eval-tasks my_tasks
    gemsmith eval --task verilog --dataset verilog-eval/dataset_spec-to-rtl --answers completions.jsonl --json
    """
    given = {name: options[name] for name in _OF_A_TASK if name in given_options()}
    if args.source is None:
        record = lazy_import("evals.offline").score_named(given)
        show = lazy_import("evals.offline").print_answers
    elif lm_eval is not None:
        opened, names = args.open_run(), [name.strip() for name in lm_eval.split(",") if name.strip()]
        with lazy_import("serve.stage").Servers(opened, skip_verify_check=skip_verify_check) as servers:
            record = lazy_import("evals.lm_eval").evaluate_lm_eval(opened, servers, names, folder=lm_eval_tasks)
        lazy_import("pipeline").print_warnings_of(record)
        show = lazy_import("evals.lm_eval").print_lm_eval
    else:
        added = [add_task(args.source, args.overrides, given)] if given else []
        again = ("eval",) if args.force or added else ()
        opened = replace(args, overrides=(*args.overrides, *added)).open_run(force=again)
        elsewhere = _find_servers(options) if options["url"] else {}
        if not args.force:
            lazy_import("evals.stage").refuse_other_servers(opened, elsewhere)
        record = lazy_import("pipeline").run_stage(
            opened, "eval", force=args.force, skip_verify_check=skip_verify_check, elsewhere=elsewhere
        )
        if again:
            lazy_import("runs.run").commit_recipe(opened)
        show = partial(lazy_import("evals.results").print_comparisons, table=table)
    args.print_record(record, show)


def _find_servers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Tuned, and base where an option names it -> the server to ask. Raises InputError where both are one model."""
    find = lazy_import("serve.client.endpoint").find_server
    tuned = find(options["url"], options["model"])
    if not (options["base_url"] or options["base_model"]):
        return {"tuned": tuned}
    base = find(options["base_url"] or options["url"], options["base_model"], of="base-")
    if base == tuned:
        raise InputError(f"--base-model: is {tuned.model} at {tuned.url}, the model of --url, too")
    return {"tuned": tuned, "base": base}


def add_task(source: Path, overrides: Sequence[str], given: Mapping[str, Any]) -> str:
    """The override of eval.tasks that adds a task, by its options' names, to those of a recipe or run directory.

    One that is there is not added again. Raises InputError for options that are not for a run.
    """
    if missing := [f"--{name}" for name in ("task", "dataset") if name not in given]:
        raise InputError(f"{missing[0]} is missing; {', '.join(f'--{name}' for name in given)} must come with it")
    recipe = lazy_import("recipe.load").load_recipe(source / "recipe.yaml" if source.is_dir() else source, overrides)
    schema, absolute = lazy_import("recipe.schema"), lazy_import("recipe.load").absolute_path
    files = {name: str(given[name]) for name in ("dataset", "prompt") if name in given}
    files = {name: absolute(f".{name}", file, Path()) or file for name, file in files.items()}
    tasks = [*schema.eval_tasks(recipe), schema.EvalTask(**dict(given) | files)]
    dumped = [task.model_dump(exclude_none=True, exclude_defaults=True) for task in tasks]
    if dumped[-1] in dumped[:-1]:
        dumped.pop()
    return f"eval.tasks={json.dumps(dumped)}"


@cli.command(short_help="Answer a file of prompts.")
@click.argument("paths", metavar="[RUN] ROWS | SHARD...", type=FOLDER, nargs=-1, required=True)
@option("--out", required=True, metavar="FILE", help="JSONL of the answers, in the rows' order.")
@option("--shard", metavar="I/N", help="Answer part I of N alone, such as 1/4: the others on other machines.")
@option("--join", is_flag=True, help="Ask nothing: put the files of all shards together.")
@url_option(help="Instead of RUN: an OpenAI server; a key is in $VLLM_API_KEY or $OPENAI_API_KEY.")
@model_option(help="Of a run: tuned (the default) or base; of a URL: a name that it serves.")
@temperature_option
@top_p_option
@seed_option
@max_tokens_option
@option("--concurrency", metavar="N", help="Requests at a time.")
@set_option
@skip_verify_option
@force_option
@json_option
@conflicts("url", "overrides", "skip_verify_check")
@conflicts("join", "url", "model", "shard", *SAMPLING, "concurrency", "overrides", "skip_verify_check")
def predict(
    paths: tuple[Path, ...], out: Path, url: str | None, shard: str | None, join: bool, as_json: bool, **options: Any
) -> None:
    """Answer each row of a file with the tuned model of a run, or with any OpenAI server.

    ROWS is what data.train takes; a row's last assistant turn, or its response, is not read. A row without an answer
    says why, and is counted. A command that was stopped asks only for what is missing.

    \b
    gemsmith predict runs/my rows.jsonl --out answers.jsonl
    gemsmith predict rows.jsonl --url http://127.0.0.1:8000 --out answers.jsonl
    gemsmith predict runs/my rows.jsonl --shard 2/4 --out 2.jsonl
    gemsmith predict --join 1.jsonl 2.jsonl 3.jsonl 4.jsonl --out answers.jsonl
    """
    if not join and len(paths) != (1 if url else 2):
        raise InputError(f"{' '.join(map(str, paths))}: give {'ROWS alone with --url' if url else 'RUN and ROWS'}")
    given = {name: value for name, value in options.items() if name not in SAMPLING and value is not None}
    if not url and given.get("model", "tuned") not in OF_A_RUN:
        raise InputError(f"--model: {given['model']} was given; allowed for a run: {', '.join(OF_A_RUN)}")
    with require_extra():
        module = lazy_import("evals.predict")
        sampling = lazy_import("serve.client.stream").SamplingParams(**{name: options[name] for name in SAMPLING})
        if shard is not None:
            given["shard"] = module.read_shard(shard)
        if join:
            record = module.join_shards(paths, out, force=options["force"])
        elif url:
            del given["overrides"], given["skip_verify_check"]
            record = module.predict_url(url, *paths, out, sampling=sampling, **given)
        else:
            opened = lazy_import("runs.run").open_run_readonly(paths[0], given["overrides"], section="serve")
            record = module.predict_run(opened, paths[1], out, sampling=sampling, **given)
    if as_json:
        print_json(record)


@cli.command(short_help="Talk to the tuned model.")
@click.argument("source", type=FOLDER, required=False)
@option("--web", is_flag=True, help="On a page of this machine; of a run, with base and tuned side by side.")
@url_option(help="Instead of a run: an OpenAI server that is up; a key is in $VLLM_API_KEY or $OPENAI_API_KEY.")
@model_option(
    "models",
    multiple=True,
    help="Of a run: base or tuned; of a URL: a name that it serves, if it serves several. May be repeated.",
)
@option("--system", default="", metavar="TEXT", help="The system prompt.")
@temperature_option
@top_p_option
@max_tokens(help="Of an answer; fewer where the server has no room for them after the prompt.")
@seed_option
@option("--port", type=click.IntRange(1, 65_535), help="Of the page; default: a free one from 7860 on.")
@option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of serve, for this time only.")
@skip_verify_option
@conflicts("url", "source", "overrides", "skip_verify_check")
def chat(
    source: Path | None,
    url: str | None,
    models: Sequence[str],
    overrides: Sequence[str],
    skip_verify_check: bool,
    **options: Any,
) -> None:
    """Talk to the tuned model of a run, or to any OpenAI server.

    SOURCE is a run directory. Answers are streamed, with their time to the first token and tokens a second.

    \b
    gemsmith chat runs/my
    gemsmith chat runs/my --model base --model tuned
    gemsmith chat runs/my --web
    gemsmith chat --url http://127.0.0.1:8000
    """
    with require_extra():
        chats = lazy_import("serve.chat.terminal")
        sampling = lazy_import("serve.client.stream").SamplingParams(**{name: options.pop(name) for name in SAMPLING})
        if url is not None:
            chats.chat_with_url(url, models, sampling=sampling, **options)
            return
        if source is None:
            raise InputError("SOURCE is missing; give a run directory, or --url of a server")
        chosen = models or (OF_A_RUN if options["web"] else ("tuned",))
        if unknown := [name for name in chosen if name not in OF_A_RUN]:
            raise InputError(f"--model: {unknown[0]} was given; allowed for a run: {', '.join(OF_A_RUN)}")
        chats.chat_with_run(
            source,
            overrides,
            models=list(dict.fromkeys(chosen)),
            read_questions=lazy_import("evals.tasks").read_questions,
            sampling=sampling,
            skip_verify_check=skip_verify_check,
            **options,
        )
