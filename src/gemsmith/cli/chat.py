"""The verb `chat`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gemsmith.cli.group import cli
from gemsmith.cli.options import FOLDER, Number, naming_extra, part, unverified_option
from gemsmith.errors import InputError

OF_A_RUN = ("base", "tuned")


@cli.command()
@click.argument("source", type=FOLDER, required=False)
@click.option("--web", is_flag=True, help="On a page of this machine; of a run, with base and tuned side by side.")
@click.option("--url", metavar="URL", help="Instead of a run: an OpenAI server that is up; a key is in $VLLM_API_KEY.")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="Of a run: base or tuned; of a URL: a name that it serves, if it serves several. May be repeated.",
)
@click.option("--system", default="", metavar="TEXT", help="The system prompt.")
@click.option("--temperature", type=Number(0, 2), default=0.0, show_default=True)
@click.option("--top-p", type=Number(0, 1, min_open=True), default=1.0, show_default=True)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Of an answer; fewer where the server has no room for them after the prompt.",
)
@click.option("--seed", type=int, help="Of sampling; default: none.")
@click.option("--port", type=click.IntRange(1, 65_535), help="Of the page; default: a free one from 7860 on.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of serve, for this time only."
)
@unverified_option
def chat(
    source: Path | None,
    url: str | None,
    models: Sequence[str],
    overrides: Sequence[str],
    unverified: bool,
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
    names = ("temperature", "top_p", "max_tokens", "seed")
    with naming_extra():
        command = part("chat.command")
        sampling = part("chat.stream").Sampling(**{name: options.pop(name) for name in names})
        if (source is None) == (url is None):
            raise InputError("give either SOURCE, a run directory, or --url; not " + ("both" if url else "neither"))
        if url is not None:
            if overrides or unverified:
                raise InputError("--url goes without --set and --unverified")
            command.chat_with_url(url, models, sampling=sampling, **options)
            return
        chosen = models or (OF_A_RUN if options["web"] else ("tuned",))
        if unknown := [name for name in chosen if name not in OF_A_RUN]:
            raise InputError(f"--model: {unknown[0]} was given; allowed for a run: {', '.join(OF_A_RUN)}")
        command.chat_with_run(
            source, overrides, models=list(dict.fromkeys(chosen)), sampling=sampling, unverified=unverified, **options
        )
