"""The page of `gemsmith chat --web`: every voice answers the same prompt in a column of its own.

Gradio makes it. It loads nothing from elsewhere: fonts are the system's, and Gradio's telemetry is off.
"""

import asyncio
import html
import os
import queue
import secrets
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from gemsmith.errors import DataError, EngineError
from gemsmith.serve.chat.terminal import PLACE, ChatSetup, ImageSupport, Turns, make_content, text_in, urls_in
from gemsmith.serve.client.stream import ChatModel, SamplingParams, StreamedAnswer, describe_speed, stream_answer
from gemsmith.tasks.base import Question
from gemsmith.tasks.messages import images_of, text_of

# Before Gradio is imported, which reads it then.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import gradio
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
MOST_BYTES = 64 * 2**20
BODY_S = 60.0
TOKEN, COOKIE = "GEMSMITH_CHAT_TOKEN", "gemsmith-chat"
"""The variable whose value, where it is set, a browser must bring: once in the address, from then on as a cookie."""
# Gradio's own scripts and styles are inline, and some are evaluated; nothing is fetched from elsewhere.
SAFETY_HEADERS = {
    "content-security-policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
}
SHOWN_ROWS = 200
FRAME_S = 0.05  # at most so often a column is drawn again; each time costs the browser the whole conversation
TITLE_CHARACTERS = 70
Heard = StreamedAnswer | EngineError  # what has come from a voice


def serve_page(setup: ChatSetup, port: int | None) -> tuple[str, gradio.Blocks]:
    """The page's address, and the page, which is up until it is closed. Raises OSError where the port is taken."""
    token, tokens = os.environ.get(TOKEN, ""), list[str]()
    uploads = tempfile.TemporaryDirectory(prefix="gemsmith-chat-")
    os.environ["GRADIO_TEMP_DIR"] = uploads.name
    page = make_page(setup)
    _, url, _ = page.queue(default_concurrency_limit=4).launch(
        server_name="127.0.0.1",
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        ssr_mode=False,
        # It keeps conversations in the browser, and lets any program on this machine use the user's Hugging Face token.
        run_history=False,
        app_kwargs={"middleware": [Middleware(Gate, tokens)]},
        footer_links=[],
        theme=gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        css=Path(__file__).with_name("page.css").read_text(encoding="utf-8"),
    )
    settings: Any = page.server.config
    settings.http_protocol_class = partial(open_connection, settings.http_protocol_class)
    tokens += [quote(token, safe="")] if token else []  # from now on: Gradio has asked its own server without one
    weakref.finalize(page, uploads.cleanup)  # at the latest when the process ends
    return f"{url}?{urlencode({'token': token})}" if token else str(url), page


def make_page(setup: ChatSetup) -> gradio.Blocks:
    voices, sight, rows = setup.voices, setup.sight, setup.rows()
    with gradio.Blocks(title=f"Gemsmith · {setup.title}", analytics_enabled=False) as page:
        gradio.Markdown(f"## {setup.title}")
        settings = _settings(voices, setup.sampling, setup.system)
        picked, expected = _row_picker(rows)
        shown: list[Any] = []  # of each voice, its conversation and its speed
        with gradio.Row():
            for voice in voices:
                with gradio.Column(min_width=300):
                    gradio.Markdown(f"### {voice.label}")
                    shown.append(gradio.HTML(draw_turns(voice, []), padding=False))
                    shown.append(gradio.Markdown("", elem_classes="speed"))
        prompt = gradio.Textbox(
            label="Prompt", info="Enter sends, Shift+Enter begins a line.", lines=1, max_lines=12, autofocus=True
        )
        attached = gradio.State([])
        images = gradio.HTML(elem_classes="attached", padding=False)
        with gradio.Row():
            send = gradio.Button("Send", variant="primary")
            stop = gradio.Button("Stop")
            new = gradio.Button("New conversation")
            add = gradio.UploadButton("Add an image", file_types=["image"], type="filepath", visible=sight.takes_images)
        said = gradio.State([[] for _ in voices])

        def answer(prompt: str, urls: list[str], said: list[Turns], system: str, *drawn: Any) -> Iterator[Any]:
            temperature, top_p, most, seed = drawn
            sampling = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=int(most), seed=seed)
            yield from answer_all(voices, prompt, urls, said, system, sampling)

        sends, asks = [prompt.submit, send.click], [prompt, attached, said, *settings]
        asked = [gradio.on(sends, answer, asks, [said, prompt, attached, images, *shown], show_progress="hidden")]
        stop.click(None, cancels=asked)
        empty = [part for voice in voices for part in (draw_turns(voice, []), "")]
        new.click(lambda: ([[] for _ in voices], [], "", *empty), None, [said, attached, images, *shown], cancels=asked)
        add.upload(lambda file, urls: attach(file, urls, sight), [add, attached], [attached, images])
        if rows:
            picked.change(
                lambda number: fill_in(rows, number, voices, sight),
                picked,
                [prompt, settings[0], expected, attached, images, said, *shown],
                cancels=asked,
            )
    return page


def _settings(voices: Sequence[ChatModel], sampling: SamplingParams, system: str) -> list[Any]:
    most = min([max(8192, sampling.max_tokens), *(voice.max_model_len for voice in voices if voice.max_model_len)])
    with gradio.Accordion("System prompt and sampling", open=False):
        prompt = gradio.Textbox(label="System prompt", value=system, lines=2)
        with gradio.Row():
            temperature = gradio.Slider(0, 2, value=sampling.temperature, step=0.05, label="Temperature (0: greedy)")
            top_p = gradio.Slider(0.01, 1, value=sampling.top_p, step=0.01, label="Top-p")
            tokens = min(most, sampling.max_tokens)
            max_tokens = gradio.Slider(1, most, value=tokens, step=1, label="Most tokens of an answer")
            seed = gradio.Number(value=sampling.seed, precision=0, label="Seed (empty: none)")
    return [prompt, temperature, top_p, max_tokens, seed]


def _row_picker(rows: Sequence[Question]) -> tuple[Any, Any]:
    choices = []
    for number, row in enumerate(rows[:SHOWN_ROWS], start=1):
        text = PLACE * len(images_of(row.messages)) + " ".join(text_of(row.messages[-1]).split())
        more = "…" if len(text) > TITLE_CHARACTERS else ""
        choices.append((f"{number}: {text[:TITLE_CHARACTERS]}{more}", number - 1))
    with gradio.Row(visible=bool(rows)):
        picked = gradio.Dropdown(choices, value=None, label="Held-out row", info="Fills in its prompt.")
        answer = gradio.Textbox(label="Expected answer", interactive=False, lines=3, max_lines=8, elem_classes="exact")
    return picked, answer


def fill_in(
    rows: Sequence[Question], number: int | None, voices: Sequence[ChatModel], sight: ImageSupport
) -> tuple[Any, ...]:
    """A row's prompt and system prompt, its expected answer and its images, and the turns before the last one."""
    if number is None:
        return (gradio.skip(), gradio.skip(), "", [], "", *(gradio.skip(),) * (1 + 2 * len(voices)))
    try:
        system, turns, asked = sight.split(rows[number])
    except DataError as error:
        raise gradio.Error(str(error)) from None
    said = [list(turns) for _ in voices]
    shown = [part for voice in voices for part in (draw_turns(voice, turns), "")]
    urls = urls_in(asked)
    return (text_in(asked), system, rows[number].expected, urls, _draw_images(urls), said, *shown)


def attach(file: str, urls: list[str], sight: ImageSupport) -> tuple[list[str], str]:
    """The images that go with the next prompt, and their HTML."""
    try:
        urls = [*urls, sight.look(file)]
    except DataError as error:
        raise gradio.Error(str(error)) from None
    finally:
        Path(file).unlink(missing_ok=True)
    return urls, _draw_images(urls)


def _draw_images(urls: Sequence[str]) -> str:
    return "".join(f'<img src="{html.escape(url)}" alt="image {number}">' for number, url in enumerate(urls, 1))


def answer_all(
    voices: Sequence[ChatModel], prompt: str, urls: list[str], said: list[Turns], system: str, sampling: SamplingParams
) -> Iterator[tuple[Any, ...]]:
    """What the page shows while all voices answer at once: turns, the prompt's box, images, and each column.

    The box is emptied once, as the prompt leaves it: what is typed during the answer stays. A turn that was stopped or
    that failed is not remembered: it stays on the page until the next one.
    """
    if not prompt.strip():
        yield (gradio.skip(),) * (4 + 2 * len(voices))
        return
    asked = {"role": "user", "content": make_content(prompt, urls)}
    opening = [{"role": "system", "content": system}] if system.strip() else []
    found: list[Heard] = [StreamedAnswer() for _ in voices]
    yield (said, "", [], "", *_columns(voices, said, asked, found))
    messages = [[*opening, *turns, asked] for turns in said]
    as_it_is = (gradio.skip(),) * 3
    for found in _frames(voices, messages, sampling):
        yield (said, *as_it_is, *_columns(voices, said, asked, found))
    remembered = [
        turns if isinstance(one, EngineError) else [*turns, asked, {"role": "assistant", "content": one.text}]
        for turns, one in zip(said, found, strict=True)
    ]
    yield (remembered, *as_it_is, *_columns(voices, said, asked, found))


def _frames(voices: Sequence[ChatModel], messages: list[Turns], sampling: SamplingParams) -> Iterator[list[Heard]]:
    """What has come from each voice, at most every FRAME_S; closing the iterator ends the requests."""
    news: queue.SimpleQueue[tuple[int, Heard | None]] = queue.SimpleQueue()
    closed = threading.Event()

    def listen(place: int, voice: ChatModel) -> None:
        try:
            for answer in stream_answer(voice, messages[place], sampling):
                if closed.is_set():
                    return
                news.put((place, answer))
        except EngineError as error:
            news.put((place, error))
        finally:
            news.put((place, None))

    found: list[Heard] = [StreamedAnswer() for _ in voices]
    for place, voice in enumerate(voices):
        threading.Thread(target=listen, args=(place, voice), daemon=True).start()
    left = len(voices)
    try:
        while left:
            changes = [news.get()]
            while not news.empty():
                changes.append(news.get())
            for place, change in changes:
                if change is None:
                    left -= 1
                else:
                    found[place] = change
            yield list(found)
            closed.wait(FRAME_S)
    finally:
        closed.set()


def _columns(voices: Sequence[ChatModel], said: list[Turns], asked: dict[str, Any], found: list[Heard]) -> list[str]:
    shown: list[str] = []
    for voice, turns, one in zip(voices, said, found, strict=True):
        if isinstance(one, EngineError):
            last, speed = {"role": "failed", "content": str(one)}, "failed"
        else:
            last, speed = {"role": "assistant", "content": one.text}, describe_speed(one)
        shown += [draw_turns(voice, [*turns, asked, last]), speed]
    return shown


def draw_turns(voice: ChatModel, turns: Turns) -> str:
    """HTML of a conversation, each text exactly as it was written: no tag and no Markdown of it is drawn."""
    drawn = ""
    for turn in turns:
        images, text = _draw_images(urls_in(turn["content"])), html.escape(text_in(turn["content"]))
        drawn += f'<pre class="{turn["role"]}">{images}{text}</pre>'
    label = html.escape(f"conversation with {voice.label}")
    return f'<div class="turns" role="log" aria-label="{label}" tabindex="0"><div>{drawn}</div></div>'


def open_connection(protocol: Callable[..., Any], **settings: Any) -> Any:
    """A connection of uvicorn's, closed where no request comes on it for BODY_S, for which uvicorn waits for ever."""
    connection = protocol(**settings)

    def close_idle(before: Any) -> None:
        last = connection.cycle  # a request and its answer
        if last is before and (last is None or last.response_complete):
            connection.transport.close()
        elif not connection.transport.is_closing():
            asyncio.get_running_loop().call_later(BODY_S, close_idle, last)

    asyncio.get_running_loop().call_later(BODY_S, close_idle, None)
    return connection


class Gate:
    """An ASGI middleware: 403 for who has no business here, 413 for a body of more than MOST_BYTES, 408 for a slow one.

    A site that the user visits can send requests to this machine, which their Origin tells, or let its own name point
    here, which their Host tells. A program on this machine, or another user's browser, is kept out by `tokens` alone.
    """

    def __init__(self, app: ASGIApp, tokens: Sequence[str] = ()) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def refuse(status: int, line: str) -> None:
            refusal: ASGIApp = WebSocketClose(code=1008)
            if scope["type"] == "http":
                refusal = PlainTextResponse(f"{line}\n", status, headers=SAFETY_HEADERS | {"connection": "close"})
            await refusal(scope, receive, send)

        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        asked = HTTPConnection(scope)
        if not _is_ours(asked.headers):
            return await refuse(403, "open the page by its own address: another site may not use it")
        in_address = quote(asked.query_params.get("token", ""), safe="")
        given = in_address or asked.cookies.get(COOKIE, "")
        # Browsers fetch the page's manifest, which says nothing of a chat, without a cookie.
        keys = () if scope.get("path") == "/manifest.json" else self._tokens
        if not all(secrets.compare_digest(key.encode(), given.encode()) for key in keys):
            return await refuse(403, f"open the page by the address that was printed, which has ${TOKEN} in it")
        body: list[Message] = []
        read_bytes = max((int(size) for size in asked.headers.getlist("content-length") if size.isdigit()), default=0)
        try:
            async with asyncio.timeout(BODY_S):
                while scope["type"] == "http" and read_bytes <= MOST_BYTES and (not body or body[-1].get("more_body")):
                    body.append(await receive())
                    read_bytes = max(read_bytes, sum(len(part.get("body", b"")) for part in body))
        except TimeoutError:
            return await refuse(408, f"a request must be here within {BODY_S:g} s")
        if read_bytes > MOST_BYTES:
            return await refuse(413, f"a request has at most {MOST_BYTES:,} bytes")

        async def read() -> Message:
            return body.pop(0) if body else await receive()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {"headers": [], **message}
                MutableHeaders(scope=message).update(SAFETY_HEADERS)
                if self._tokens and in_address:
                    cookie = f"{COOKIE}={in_address}; HttpOnly; SameSite=Strict; Path=/"
                    MutableHeaders(scope=message).append("set-cookie", cookie)
            await send(message)

        return await self._app(scope, read, answer)


def _is_ours(headers: Headers) -> bool:
    """Whether the request was sent to this machine by a name of its own, and by no other site's page."""
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    try:
        if len(hosts) != 1 or urlsplit(f"//{hosts[0]}").hostname not in HOSTS:
            return False
    except ValueError:
        return False
    # An image or a script that another site's page asks for has no Origin; a link to the page is followed.
    foreign = headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate"
    return not foreign and all(origin in (f"http://{hosts[0]}", f"https://{hosts[0]}") for origin in origins)
