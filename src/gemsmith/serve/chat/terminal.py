"""The command `chat`: who is talked to, on the page of web.py, or here, with prompts from stdin."""

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gemsmith.checkpoints.folder import fetch_folder, patching_of
from gemsmith.data.chat_template import GEMMA_CONTROL, find_template, settle_text
from gemsmith.data.documents import Document
from gemsmith.data.tokenize import check_prompts, open_renderer
from gemsmith.errors import DataError, EngineError, MachineError
from gemsmith.images.check import to_data_url
from gemsmith.images.patches import PatchConfig
from gemsmith.runs.run import Run, open_run_readonly
from gemsmith.serve.client.chat import api_messages, image_content
from gemsmith.serve.client.endpoint import find_models
from gemsmith.serve.client.stream import ChatModel, SamplingParams, StreamedAnswer, describe_speed, stream_answer
from gemsmith.serve.stage import Servers, takes_images, with_room
from gemsmith.system.characters import escape_control_chars
from gemsmith.system.console import open_console, print_warnings
from gemsmith.system.files import expanduser
from gemsmith.tasks.base import Question
from gemsmith.tasks.messages import are_broken, map_strings, text_message

Content = str | list[dict[str, Any]]
Turns = list[dict[str, Any]]
PLACE = "[image] "
CONVERSATION_TOKENS = 4096  # what a server of a run holds at least here, or all that its model reads


@dataclass(frozen=True, kw_only=True)
class ImageSupport:
    """Whether the server takes images, and how its model cuts them up, where that is known."""

    takes_images: bool = True
    patching: PatchConfig | None = None

    def look(self, file: str) -> str:
        """The data: URL of the file's image. Raises DataError where it is none, or the server takes text alone."""
        if not self.takes_images:
            raise DataError(
                "the server takes text alone; start the chat with --set serve.images=true, of a model that takes images"
            )
        return to_data_url(file, self.patching)

    def split(self, row: Question) -> tuple[str, Turns, Content]:
        """A row's system prompt, earlier turns and last one's content. Raises DataError where an image has changed."""
        *before, last = api_messages(row.messages, row.images, self.patching)
        system = next((turn["content"] for turn in before if turn["role"] == "system"), "")
        return system, [turn for turn in before if turn["role"] != "system"], last["content"]


@dataclass(frozen=True, kw_only=True)
class ChatSetup:
    """Who answers, how, and what can be asked of them."""

    voices: Sequence[ChatModel]
    title: str
    sampling: SamplingParams
    system: str = ""
    sight: ImageSupport = field(default_factory=ImageSupport)
    rows: Callable[[], Sequence[Question]] = lambda: ()  # those held out, read when they are first asked for


def make_content(text: str, urls: Sequence[str]) -> Content:
    """What a user's turn holds: the images, then the text.

    >>> make_content("hi", [])
    'hi'
    """
    return [*map(image_content, urls), {"type": "text", "text": text}] if urls else text


def text_in(content: Content, *, image: str = "") -> str:
    """Its text, with `image` in the place of each image.

    >>> text_in(make_content("What is it?", ["data:image/png;base64,"]), image="[image] ")
    '[image] What is it?'
    """
    return content if isinstance(content, str) else "".join(part.get("text", image) for part in content)


def urls_in(content: Content) -> list[str]:
    """The data: URLs of its images, in order."""
    return [part["image_url"]["url"] for part in content if "image_url" in part] if isinstance(content, list) else []


HELP = """/new          forget the conversation
/system TEXT  set the system prompt, and forget the conversation; no TEXT: none
/image FILE   an image that goes with the next prompt; several lines: several images
/row N        ask held-out row N, and show the answer that is expected
/quit         end; so does Ctrl-D. Ctrl-C stops an answer"""


@dataclass(kw_only=True)
class Conversation:
    """What was said so far, for each voice on its own: each sees its own answers."""

    system: str = ""
    turns: dict[str, Turns] = field(default_factory=dict)  # by the voice's label
    images: list[str] = field(default_factory=list)  # the data: URLs of those that go with the next prompt


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
    """Talks to a run's tuned model, its base, or both, which one server then holds; `models`: "base", "tuned"."""
    if len(models) > 1:
        overrides = ["serve.weights=adapter", *overrides]
    run = open_run_readonly(source, overrides, section="serve")
    run = with_room(run, overrides, CONVERSATION_TOKENS)
    rows = functools.cache(lambda: read_questions(run) if run.recipe.data.eval is not None else ())
    sight, prompt_of = ImageSupport(takes_images=False), settle_prompts(run)
    with Servers(run, prefix_caching=True, skip_verify_check=skip_verify_check) as servers:
        voices = []
        for label in models:
            server = servers.base() if label == "base" else servers.tuned()
            voice = ChatModel(label=label, url=server.url, model=server.model, prompt_of=prompt_of)
            voices.append(replace(voice, max_model_len=server.facts.max_model_len))
        print_warnings("chat", servers.warnings)
        if takes_images(run):
            folder = fetch_folder(run.recipe.checkpoint)
            sight = ImageSupport(patching=patching_of(folder, run.recipe.data.image_tokens))
        title = run.path.resolve().name
        setup = ChatSetup(voices=voices, title=title, sampling=sampling, system=system, sight=sight, rows=rows)
        _chat(setup, web=web, port=port)


def settle_prompts(run: Run) -> Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]:
    """What a request has of a conversation, its control tokens as the run's data.control_tokens has them."""
    data, folder = run.recipe.data, functools.cache(lambda: fetch_folder(run.recipe.checkpoint))
    renderer = functools.cache(lambda: open_renderer(folder(), find_template(folder(), data)))

    def prompt_of(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        texts = [text_in(turn["content"]) for turn in turns]
        if found := next(filter(None, map(GEMMA_CONTROL.search, texts)), None):
            if data.control_tokens == "error":
                raise EngineError(f"{found[0]} is a control token; --set data.control_tokens=text reads it as text")
            turns = map_strings(turns, lambda text: settle_text(text, data.control_tokens))
            texts = [text_in(turn["content"]) for turn in turns]
        messages = [text_message(turn["role"], text) for turn, text in zip(turns, texts, strict=True)]
        if not are_broken(messages):
            return {"messages": list(turns)}
        if any(urls_in(turn["content"]) for turn in turns):
            raise EngineError("a request with images cannot spell a control token as text; leave it or them out")
        [ids] = check_prompts(renderer(), [(Document(messages=tuple(messages), origin="chat"), len(messages))])
        return {"prompt": ids.tolist()}

    return prompt_of


def chat_with_url(
    url: str, models: Sequence[str], *, sampling: SamplingParams, system: str, web: bool, port: int | None
) -> None:
    """Talks to models of an OpenAI server that is up; without a name to the only one. Raises as find_models."""
    seen = find_models(url, models)
    voices = [ChatModel(label=one.model, url=one.url, model=one.model, max_model_len=one.max_model_len) for one in seen]
    _chat(ChatSetup(voices=voices, title=seen[0].url, sampling=sampling, system=system), web=web, port=port)


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


def chat_loop(setup: ChatSetup) -> None:
    """Reads prompts to the end of stdin, and streams answers. Raises EngineError, on a terminal only prints it."""
    conversation, console = Conversation(system=setup.system), open_console()
    if sys.stdin.isatty():
        names = " and ".join(voice.model for voice in setup.voices)
        console.print(f"Talking to {names}. /help lists what else there is.")
    for line in _prompts():
        word, _, rest = line.partition(" ")
        if word == "/quit":
            return
        if word == "/row":
            _ask_row(conversation, rest, setup)
        elif word == "/image":
            try:
                conversation.images.append(setup.sight.look(str(expanduser(rest.strip()))))
            except DataError as error:
                console.print(f"/image: {error}")
            else:
                count = len(conversation.images)
                console.print(f"{count} image{'s' * (count > 1)} go{'es' * (count == 1)} with the next prompt")
        elif word == "/new":
            conversation = Conversation(system=conversation.system)
        elif word == "/system":
            conversation = Conversation(system=rest.strip())
        elif word.startswith("/"):
            console.print(HELP)
        else:
            _ask(conversation, make_content(line, conversation.images), setup)
            conversation.images = []


def _prompts() -> Iterator[str]:
    """The lines of stdin that are not empty; editable where it is a terminal."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if line:
            yield line


def _ask_row(conversation: Conversation, number: str, setup: ChatSetup) -> None:
    console, rows = open_console(), setup.rows()
    if not (number.isdecimal() and 1 <= int(number) <= len(rows)):
        there = f"1 to {len(rows)}" if rows else "none, since there is no run with data.eval"
        console.print(f"/row: {number or 'nothing'} was given; allowed: {there}")
        return
    row = rows[int(number) - 1]
    try:
        system, turns, asked = setup.sight.split(row)
    except DataError as error:
        console.print(f"/row: {error}")
        return
    conversation.system, conversation.images = system, []
    conversation.turns = {voice.label: list(turns) for voice in setup.voices}
    for image in row.images:
        console.print(f"image: {image.path or 'of the row itself'}, {image.width} × {image.height}")
    console.print(f"row {number}: {text_in(asked, image=PLACE)}")
    _ask(conversation, asked, setup)
    console.print(f"expected: {row.expected}")


def _ask(conversation: Conversation, prompt: Content, setup: ChatSetup) -> None:
    console, asked = open_console(), {"role": "user", "content": prompt}
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    for voice in setup.voices:
        if len(setup.voices) > 1:
            console.print(f"[{voice.label}]")
        turns, answer = conversation.turns.setdefault(voice.label, []), StreamedAnswer()
        try:
            for grown in stream_answer(voice, [*system, *turns, asked], setup.sampling):
                print(escape_control_chars(grown.text[len(answer.text) :]), end="", flush=True)
                answer = grown
        except (EngineError, KeyboardInterrupt) as error:  # on a terminal Ctrl-C stops the answer
            if not sys.stdin.isatty():
                raise
            if isinstance(error, EngineError):
                console.print(f"error: {error}")
                return
        print(flush=True)
        if answer.ended:
            turns += [asked, {"role": "assistant", "content": answer.text}]
        console.print(describe_speed(answer) if answer.ended else "stopped; this turn is forgotten")
