"""Serves the page for a test until stdin ends: `python page_process.py URL`.

A process of its own, since Gradio leaves sockets and event loops behind.
"""

import sys

from gemsmith.serve.chat.terminal import ChatSetup
from gemsmith.serve.chat.web import serve_page
from gemsmith.serve.client.stream import ChatModel, SamplingParams
from gemsmith.tasks.base import Question
from gemsmith.tasks.messages import text_message

ROWS = [Question(messages=(text_message("user", f"row {n}"),), expected=f"answer {n}", origin="") for n in (1, 2)]

if __name__ == "__main__":
    voices = [ChatModel(label=label, url=sys.argv[1], model=f"demo-{label}") for label in ("base", "tuned")]
    setup = ChatSetup(voices=voices, title="demo", sampling=SamplingParams(), rows=lambda: ROWS)
    url, page = serve_page(setup, None)
    print(url, flush=True)
    sys.stdin.read()
    page.close(verbose=False)
