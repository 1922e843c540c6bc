"""The page, in a headless Chromium where there is one."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import gradio
import httpx
import pytest

from gemsmith.serve.chat.terminal import ImageSupport
from gemsmith.serve.chat.web import attach, draw_turns

from .browser import CHROMIUM, open_browser

PROMPT = "document.querySelector('textarea[data-testid=textbox]:not([disabled])')"
ENTER = {"key": "Enter", "code": 13, "text": "\r"}
browser = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")]


@pytest.fixture
def page(speaker):
    command = [sys.executable, str(Path(__file__).with_name("page_process.py")), speaker.url]
    env = os.environ | {"GEMSMITH_CHAT_TOKEN": "a secret;"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def tab(tmp_path):
    with open_browser(tmp_path / "profile") as opened:
        yield opened


def open_page(tab, url, *, width=1280, height=900, dark=False):
    tab.open(url, width=width, height=height, dark=dark)
    tab.wait_for("document.activeElement && document.activeElement.tagName == 'TEXTAREA'")


def send(tab, *, turns):
    """Presses Enter until so many answers are there: the page takes no prompt while it ends the one before."""
    tab.wait_for(f"{PROMPT}.value.startsWith('prompt')")
    for _ in range(60):
        tab.press(**ENTER)
        with contextlib.suppress(AssertionError):
            return tab.wait_for(f"document.querySelectorAll('.turns pre.assistant').length == {turns}", timeout_s=1)
    raise AssertionError(f"no answer to what was sent; the page: {text_of(tab)[:500]}")


def text_of(tab):
    return tab.evaluate("document.body.innerText")


def test_what_a_model_writes_is_never_a_tag(speaker):
    drawn = draw_turns(speaker.voice(), [{"role": "assistant", "content": "<script>x</script> & more"}])
    assert "&lt;script&gt;x&lt;/script&gt; &amp; more" in drawn


def test_telemetry_is_off():
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"


class TestInChromium:
    pytestmark = browser

    @pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
    def test_the_keyboard_alone_gets_an_answer_from_both_models(self, tab, page, speaker, width, dark):
        speaker.pieces = ("module m;\n", "  // <b>x</b>\n", "endmodule")
        open_page(tab, page, width=width, dark=dark)
        tab.type("Write m.")
        tab.press(**ENTER)
        tab.wait_for("document.querySelectorAll('.turns pre.assistant').length == 2")
        tab.wait_for("document.body.innerText.split('7 tokens in').length == 3")
        shown = tab.evaluate("[...document.querySelectorAll('.turns pre.assistant')].map(one => one.innerText)")
        assert shown == ["module m;\n  // <b>x</b>\nendmodule"] * 2
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert not tab.errors
        assert all("127.0.0.1" in url or url.startswith(("data:", "blob:", "about:")) for url in tab.requested)

    def test_the_page_loads_nothing_from_elsewhere_though_something_asks_it_to(self, tab, page):
        open_page(tab, page)
        tab.evaluate("addEventListener('securitypolicyviolation', event => { window.refused = event.blockedURI })")
        tab.evaluate("(() => { new Image().src = 'https://evil.example/a.png' })()")
        tab.wait_for("window.refused == 'https://evil.example/a.png'")

    def test_what_a_model_writes_is_shown_and_runs_and_loads_nothing(self, tab, page, speaker):
        speaker.pieces = (
            "<script>window.ran = 1</script>",
            "<img src='https://evil.example/a.png' onerror='window.ran = 2'>",
            "<iframe srcdoc='<script>top.ran = 3</script>'></iframe>",
            "</pre><svg onload='window.ran = 4'></svg>[a](javascript:ran=5)",
        )
        open_page(tab, page)
        tab.evaluate("addEventListener('securitypolicyviolation', event => { window.refused = event.blockedURI })")
        tab.type("prompt 1")
        send(tab, turns=2)
        tab.wait_for("document.body.innerText.split('7 tokens in').length == 3")
        shown = tab.evaluate("[...document.querySelectorAll('.turns pre.assistant')].map(one => one.innerText)")
        assert shown == ["".join(speaker.pieces)] * 2
        assert tab.evaluate("document.querySelectorAll('.turns :is(script, img, iframe, svg, a)').length") == 0
        assert tab.evaluate("[window.ran, window.refused].every(one => one === undefined)")
        assert not any("evil.example" in url for url in tab.requested)

    @pytest.mark.parametrize(
        ("tag", "address", "directive"),
        [
            ("script", "https://evil.example/a.js", "script-src-elem"),
            ("iframe", "https://evil.example/", "frame-src"),
            ("object", "/config", "object-src"),
        ],
    )
    def test_what_the_policy_forbids_is_blocked_and_reported(self, tab, page, tag, address, directive):
        open_page(tab, page)
        tab.evaluate(
            "addEventListener('securitypolicyviolation', event => { window.broke = event.effectiveDirective })"
        )
        place = "data" if tag == "object" else "src"
        tab.evaluate(
            f"(() => {{ const evil = document.createElement('{tag}'); evil.{place} = '{address}';"
            " document.body.append(evil); })()"
        )
        tab.wait_for(f"window.broke == '{directive}'")

    def test_what_is_no_script_is_not_run_as_one(self, tab, page):
        """As X-Content-Type-Options: nosniff has it: without, the JSON would be read as JavaScript."""
        open_page(tab, page)
        tab.evaluate(
            "(() => { const script = document.createElement('script'); script.src = '/config';"
            " script.onload = () => { window.loaded = 'run' }; script.onerror = () => { window.loaded = 'refused' };"
            " document.body.append(script); })()"
        )
        tab.wait_for("window.loaded")
        assert tab.evaluate("window.loaded") == "refused"

    def test_a_second_prompt_brings_what_was_said_before(self, tab, page, speaker):
        open_page(tab, page)
        for number in (1, 2):
            tab.type(f"prompt {number}")
            send(tab, turns=2 * number)
            tab.wait_for("document.body.innerText.split('7 tokens in').length == 3")
        assert [turn["content"] for turn in speaker.asked[-1]["messages"]] == ["prompt 1", "Hello", "prompt 2"]

    def test_what_is_typed_during_an_answer_stays(self, tab, page, speaker):
        speaker.pieces, speaker.wait_s = ("word ",) * 30, 0.05
        open_page(tab, page)
        tab.type("prompt 1")
        send(tab, turns=2)
        tab.type("prompt 2")
        tab.wait_for("document.body.innerText.split('7 tokens in').length == 3")
        assert tab.evaluate(f"{PROMPT}.value") == "prompt 2"

    def test_a_held_out_row_fills_in_its_prompt_and_shows_its_answer(self, tab, page):
        open_page(tab, page)
        # Once more where the page was not ready to open its list yet.
        tab.wait_for(
            "(() => { const field = document.querySelector('input[role=listbox], input[aria-haspopup], .wrap input');"
            " if (document.querySelector('[role=option]')) return true; field.blur(); field.focus(); return false; })()"
        )
        tab.press("ArrowDown", code=40)
        tab.press("ArrowDown", code=40)
        tab.press(**ENTER)
        tab.wait_for("[...document.querySelectorAll('textarea')].some(one => one.value.startsWith('row '))")
        assert tab.evaluate("[...document.querySelectorAll('textarea')].some(one => one.value.startsWith('answer '))")

    def test_an_answer_can_be_stopped_and_the_request_ends(self, tab, page, speaker):
        speaker.pieces, speaker.wait_s = ("word ",) * 5000, 0.02
        open_page(tab, page)
        tab.type("endless")
        tab.press(**ENTER)
        tab.wait_for("!!document.querySelector('.turns pre.assistant')")
        tab.evaluate("[...document.querySelectorAll('button')].find(one => one.innerText == 'Stop').click()")
        assert speaker.hung_up.wait(60)

    def test_a_server_that_fails_is_said_in_its_column(self, tab, page, speaker):
        speaker.status = 500
        open_page(tab, page)
        tab.type("hi")
        tab.press(**ENTER)
        tab.wait_for("document.querySelectorAll('.turns pre.failed').length == 2")
        assert "demo-base" in text_of(tab) and "answered 500" in text_of(tab)


def test_an_upload_is_deleted_once_it_has_been_looked_at(tmp_path):
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(gradio.Error, match="is none of"):
        attach(str(tmp_path / "a.png"), [], ImageSupport())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_server_refuses_other_sites_and_floods_and_who_has_no_token_and_keeps_no_upload(page):
    here, address = urlsplit(page).netloc, page.partition("?")[0]
    upload = f"{address}gradio_api/upload"
    assert httpx.get(address).status_code == 403 == httpx.post(upload, files={"files": b"x"}).status_code
    with httpx.Client() as browser:
        assert browser.get(page).status_code == 200 == browser.get(address).status_code
        assert browser.get(page, headers={"Host": "evil.example"}).status_code == 403
        # Gradio's history of runs would ask the Hub with the user's token.
        assert browser.get(f"{address}gradio_api/run-history/buckets").status_code == 404
        foreign = {"Origin": "https://evil.example"}
        assert browser.post(upload, headers=foreign, files={"files": b"x"}).status_code == 403
        assert browser.post(upload, content=(bytes(2**20) for _ in range(65))).status_code == 413
        kept = browser.post(upload, headers={"Origin": f"http://{here}"}, files={"files": ("a.png", b"x")})
    assert kept.status_code == 200 and "gemsmith-chat-" in kept.json()[0]
