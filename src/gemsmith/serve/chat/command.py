"""The command `chat`: who is talked to, and where."""

import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from gemsmith.checkpoints import read_config
from gemsmith.checkpoints.hub import fetch_folder
from gemsmith.errors import MachineError
from gemsmith.images.patches import read_patching
from gemsmith.runs.run import Run, open_run_readonly
from gemsmith.serve.chat.terminal import ChatSetup, ImageSupport, chat_loop
from gemsmith.serve.client.endpoint import find_models
from gemsmith.serve.client.stream import ChatModel, SamplingParams
from gemsmith.serve.stage import Servers, takes_images, with_room
from gemsmith.system.characters import escape_control_chars
from gemsmith.system.console import open_console, print_warnings
from gemsmith.tasks import Question

CONVERSATION_TOKENS = 4096
"""What a server of a run holds at least here, or all that its model reads."""


def chat_with_run(
    source: Path,
    overrides: Sequence[str],
    *,
    models: Sequence[str],
    read_questions: Callable[[Run], Sequence[Question]],
    sampling: SamplingParams,
    system: str,
    web: bool,
    port: int | None,
    skip_verify_check: bool,
) -> None:
    """Talks to the tuned model of a run, its base, or both, which one server then holds.

    `models`: of "base" and "tuned". `read_questions` gives a run's held-out rows, to be asked. Other commands may use
    the run directory meanwhile.
    """
    if len(models) > 1:
        overrides = ["serve.weights=adapter", *overrides]
    run = open_run_readonly(source, overrides, section="serve")
    run = with_room(run, overrides, CONVERSATION_TOKENS, why="a conversation is longer than a row")
    rows = cache(lambda: read_questions(run) if run.recipe.data.eval is not None else ())
    sight = ImageSupport(takes_images=False)
    with Servers(run, prefix_caching=True, skip_verify_check=skip_verify_check) as servers:
        found = {"base": servers.base, "tuned": servers.tuned}
        voices = []
        for label in models:
            server = found[label]()
            length = server.facts.max_model_len
            voices.append(ChatModel(label=label, url=server.url, model=server.model, max_model_len=length))
        print_warnings("chat", servers.warnings)
        if takes_images(run):
            config = read_config(fetch_folder(run.recipe.checkpoint))
            sight = ImageSupport(patching=read_patching(config, run.recipe.data.image_tokens))
        title = run.path.resolve().name
        setup = ChatSetup(voices=voices, title=title, sampling=sampling, system=system, sight=sight, rows=rows)
        _chat(setup, web=web, port=port)


def chat_with_url(
    url: str, models: Sequence[str], *, sampling: SamplingParams, system: str, web: bool, port: int | None
) -> None:
    """Talks to models of an OpenAI server that is up; without a name to the only one.

    Raises InputError where it does not answer, has no model of a name, or several and none is named.
    """
    address, cards = find_models(url, models)
    lengths = {name: found for name, card in cards.items() if isinstance(found := card.get("max_model_len"), int)}
    voices = [ChatModel(label=name, url=address, model=name, max_model_len=lengths.get(name)) for name in cards]
    _chat(ChatSetup(voices=voices, title=address, sampling=sampling, system=system), web=web, port=port)


def _chat(setup: ChatSetup, *, web: bool, port: int | None) -> None:
    if not web:
        chat_loop(setup)
        return
    from gemsmith.serve.chat.web import serve_page

    try:
        url, page = serve_page(setup, port)
    except OSError:
        raise MachineError(f"--port: {port or 'no port'} is free; name another, or leave it out") from None
    console = open_console()
    console.print("Ctrl-C stops it. Open in a browser of this machine:")
    print(escape_control_chars(url), flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        console.print("stopping")
    finally:
        page.close(verbose=False)
