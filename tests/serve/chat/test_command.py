"""What `gemsmith chat` is told, and whom it then talks to."""

import contextlib
import io
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from gemsmith.errors import InputError, MachineError
from gemsmith.recipe.load import dump_recipe
from gemsmith.recipe.schema import ResolvedValue
from gemsmith.runs.run import find_run
from gemsmith.serve.chat import terminal
from gemsmith.serve.chat.web import answer_all
from gemsmith.serve.client.stream import ChatModel, SamplingParams
from gemsmith.serve.server import running_server
from gemsmith.serve.settings import ServeSettings

NOTHING = {"sampling": SamplingParams(), "system": "", "web": False, "port": None}


@pytest.fixture
def told(monkeypatch):
    seen = {}
    monkeypatch.setattr(terminal, "chat_loop", lambda setup: seen.update(vars(setup)))
    return seen


@pytest.fixture
def listed(monkeypatch):
    """What the server lists: `listed(a={"root": "/a"})`."""

    def make(**models):
        cards = [{"id": name, **card} for name, card in models.items()]
        monkeypatch.setattr("gemsmith.serve.client.endpoint._ask", lambda _url: {"data": cards})

    return make


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_an_address_may_end_as_an_openai_client_wants_it(told, listed, url):
    listed(a={"max_model_len": 640}, b={"max_model_len": "many"})
    terminal.chat_with_url(url, ["a", "b"], **NOTHING)
    assert [(voice.url, voice.model) for voice in told["voices"]] == [("http://host:1", "a"), ("http://host:1", "b")]
    assert [voice.max_model_len for voice in told["voices"]] == [640, None]


def test_an_adapter_has_the_room_of_its_base(told, listed):
    listed(base={"max_model_len": 640}, mine={"max_model_len": None, "parent": "base"})
    terminal.chat_with_url("http://host:1", ["mine"], **NOTHING)
    assert told["voices"][0].max_model_len == 640


def test_an_address_alone_is_its_only_model_under_the_first_of_its_names(told, listed):
    listed(demo={"root": "/weights"}, another_name_of_it={"root": "/weights"})
    terminal.chat_with_url("http://host:1", [], **NOTHING)
    assert [voice.model for voice in told["voices"]] == ["demo"]


@pytest.mark.parametrize(
    ("models", "message"), [([], "--model is missing; http://h has a, b$"), (["c"], "--model c: http://h has a, b")]
)
def test_of_several_models_one_is_to_be_named(told, listed, models, message):
    listed(a={"root": "/a"}, alias={"root": "/a"}, b={"root": "/b"})
    with pytest.raises(InputError, match=message):
        terminal.chat_with_url("http://h", models, **NOTHING)


@pytest.mark.parametrize("url", ["a:1", "http://a:b", "http://", "ftp://a"])
def test_what_is_no_address_is_one_line(url):
    with pytest.raises(InputError, match="must be http"):
        terminal.chat_with_url(url, [], **NOTHING)


@pytest.fixture
def short_run(exported_run, fake_vllm):
    """A run whose server has room for 352 tokens, fewer than an answer may have by default."""
    fake_vllm(answers={"hi there": "Hello"})
    short = {"data": {"max_length": 288}, "eval": {"max_tokens": 64}}
    short["bench"] = {"input_tokens": [64], "output_tokens": 32}
    return exported_run(short | {"serve": {"max_model_len": 352}})


@contextlib.contextmanager
def serving(run):
    with running_server(run.merged, name="demo", settings=ServeSettings(max_model_len=352), log=run.logs / "x") as up:
        yield up.url


@pytest.mark.parametrize("of_a_run", [True, False])
def test_a_first_prompt_with_default_settings_is_answered_in_the_terminal(short_run, gemsmith, monkeypatch, of_a_run):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi there\n"))
    with contextlib.nullcontext() if of_a_run else serving(short_run) as url:
        code, out, err = gemsmith("chat", *([short_run.path] if of_a_run else ["--url", url]))
    assert (code, out) == (0, "Hello\n"), err


def test_a_first_prompt_with_default_settings_is_answered_on_the_page(short_run):
    with serving(short_run) as url:
        voices = [ChatModel(label=label, url=url, model="demo", max_model_len=352) for label in ("base", "tuned")]
        *_, last = answer_all(voices, "hi there", [], [[], []], "", SamplingParams())
    asked, answered = {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "Hello"}
    assert last[0] == [[asked, answered]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("of_a_run", [True, False])
def test_the_page_in_the_browser_asks_with_its_own_settings(short_run, of_a_run):
    """As its script does: what stands in its settings is sent with the prompt."""
    with contextlib.nullcontext() if of_a_run else serving(short_run) as url:
        asked = [str(short_run.path), "--model", "tuned"] if of_a_run else ["--url", url]
        command = [sys.executable, "-m", "gemsmith", "chat", *asked, "--web"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            page = process.stdout.readline().strip().rstrip("/")
            try:
                shown = httpx.get(f"{page}/config").json()["components"]
                values = {one["props"].get("label"): one["props"] for one in shown}
                slider = values["Most tokens of an answer"]
                names = ("System prompt", "Temperature (0: greedy)", "Top-p", "Most tokens of an answer")
                data = ["hi there", *(values[name]["value"] for name in names), None]
                event = httpx.post(f"{page}/gradio_api/call/answer", json={"data": data}).json()["event_id"]
                told = httpx.get(f"{page}/gradio_api/call/answer/{event}", timeout=60).text
            finally:
                process.send_signal(signal.SIGINT)
    assert (slider["maximum"], slider["value"]) == (352, 352)
    assert "event: complete" in told and ">Hello</pre>" in told.rpartition("event: ")[2].encode().decode(
        "unicode_escape"
    )


def test_a_server_for_conversations_has_room_for_them(short_run, told, monkeypatch):
    """Up to what the model reads, where the length is only what eval needs; a length of the user's stays."""
    recipe = find_run(short_run.path)

    def room(*overrides):
        terminal.chat_with_run(
            short_run.path, overrides, models=["tuned"], skip_verify_check=True, read_questions=list, **NOTHING
        )
        return told["voices"][0].max_model_len

    assert room() == 352
    short_run.recipe_file.write_text(dump_recipe(recipe, [ResolvedValue("serve.max_model_len", 352, "eval's")]))
    assert room() == 2048
    monkeypatch.setattr(terminal, "CONVERSATION_TOKENS", 1000)
    assert room() == 1000 and room("serve.max_model_len=400") == 400
    assert find_run(short_run.path) == recipe


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line(speaker):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments = ["chat", "--url", speaker.url, "--model", "demo-tuned", "--web"]
        arguments += ["--port", str(taken.getsockname()[1])]
        done = subprocess.run(
            [sys.executable, "-m", "gemsmith", *arguments], check=False, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --port: ") and done.stderr.count("\n") == 1
    assert MachineError.exit_code == 2
