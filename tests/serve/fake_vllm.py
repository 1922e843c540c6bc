"""Stands in for the Python of an environment that holds vLLM. What it does is told by $FAKE_VLLM, a JSON object:

die: print this many lines and end with code 3 · hang: never answer · status: what chats are answered with · body: what
they are answered with, as text · hang_chats: never answer those · die_after: end with code 3 once this many are
answered · answers: prompt -> answer, an image in it as its SHA-256 · asked: a file for a line of each chat · reads:
the ids that it reads each prompt as · results: what the bench client saves for each cell · beats: how often, each 0.3
s, it first tells that tokens came · stall: then never tell or save more, and ignore SIGTERM · end: then end with code 0
· pids: a file for the ids of all processes · models: what goes over the wire for each GET /v1/models in turn, null for
the names that are served, which is also what follows · drip_s: between each two bytes of that · effect: what the
adapter of --lora-modules adds to log-probabilities · engine: what it logs of itself · metrics: what /metrics answers ·
version_json: what /version does. As strict ones do, it refuses a chat whose max_tokens --max-model-len has no room for
after the prompt, of which it takes a word for a token.
"""

import base64
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOLD: dict[str, Any] = json.loads(os.environ.get("FAKE_VLLM", "{}"))
NAMES: dict[str, str] = {}
"""Of a model -> where its weights are."""
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        wire = TOLD["models"].pop(0) if self.path == "/v1/models" and TOLD.get("models") else None
        if wire is None:
            models = [
                {"id": name, "max_model_len": TOLD.get("length", 640), "root": root} for name, root in NAMES.items()
            ]
            cards = {"object": "list", "data": models}
            known = {"/v1/models": cards, "/version": TOLD.get("version_json", {}), "/metrics": TOLD.get("metrics", "")}
            self.reply(200, known.get(self.path, {}))
            return
        self.close_connection = True
        for byte in wire.encode():
            self.wfile.write(bytes([byte]))
            time.sleep(TOLD.get("drip_s", 0))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if TOLD.get("hang_chats"):
            time.sleep(600)
        if self.path == "/v1/chat/completions" and "die_after" in TOLD:
            TOLD["die_after"] -= 1
            if TOLD["die_after"] < 0:
                print("RuntimeError: out of memory", flush=True)
                os._exit(3)
        if TOLD.get("status", 200) != 200:
            self.reply(TOLD["status"], {"error": {"message": "the fake refuses"}})
            return
        if "body" in TOLD:
            self.reply(200, TOLD["body"])
            return
        words = sum(len(text_of(turn["content"]).split()) for turn in asked.get("messages", ()))
        room = TOLD.get("length", 640) - words
        if self.path == "/v1/chat/completions" and asked.get("max_tokens", 1) > room:
            wrong = f"max_tokens={asked.get('max_tokens')} cannot be greater than max_model_len={room + words}"
            self.reply(400, {"error": {"message": wrong}})
            return
        tuned = not asked["model"].endswith("-base")
        if asked.get("logprobs"):
            likely = {"token_id:5": -0.5 - TOLD.get("effect", 0) * tuned, "token_id:6": -2}
            count = asked["max_tokens"]
            found = {"tokens": ["token_id:5"] * count, "top_logprobs": [likely] * count}
            self.reply(200, {"choices": [{"text": "", "finish_reason": "length", "logprobs": found}]})
            return
        answer = (
            TOLD.get("answers", {}).get(text_of(asked["messages"][-1]["content"]), "I do not know")
            if tuned
            else "module nothing;endmodule"
        )
        reason = "length" if answer == "I do not know" else "stop"
        if "asked" in TOLD:
            with Path(TOLD["asked"]).open("a") as file:
                file.write(json.dumps(asked) + "\n")
        if asked.get("stream"):
            events = [{"choices": [{"delta": {"content": answer}, "finish_reason": reason}]}]
            events += [{"choices": [], "usage": {"completion_tokens": min(len(answer), room)}}]
            self.reply(200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")
            return
        ids = {"prompt_token_ids": TOLD["reads"]} if "reads" in TOLD and asked.get("return_token_ids") else {}
        self.reply(200, {"asked": asked, "choices": [{"message": {"content": answer}, "finish_reason": reason}], **ids})

    def reply(self, status: int, body: dict[str, Any] | str) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def text_of(content: Any) -> str:
    """A message's text, with the SHA-256 of each image's bytes in its place."""
    if isinstance(content, str):
        return content
    return "".join(
        part["text"]
        if part["type"] == "text"
        else hashlib.sha256(base64.b64decode(part["image_url"]["url"].partition(",")[2])).hexdigest()
        for part in content
    )


def serve(arguments: list[str]) -> None:
    pids = [os.getpid(), *start_children()] if "pids" in TOLD else []
    if pids:
        Path(TOLD["pids"]).write_text(json.dumps(pids))
    if TOLD.get("die"):
        print(
            "\n".join(f"line {number}" for number in range(TOLD["die"])),
            "RuntimeError: no memory for the cache",
            sep="\n",
            flush=True,
        )
        sys.exit(3)
    if TOLD.get("hang"):
        time.sleep(600)
    first = len(arguments) - arguments[::-1].index("--served-model-name")  # the last counts
    names = itertools.takewhile(lambda word: not word.startswith("-"), arguments[first:])
    NAMES.update(dict.fromkeys(names, arguments[arguments.index("--model") + 1]))
    if "--lora-modules" in arguments:
        name, _, root = arguments[arguments.index("--lora-modules") + 1].partition("=")
        NAMES[name] = root
    print(TOLD.get("engine", ""), flush=True)
    if "--max-model-len" in arguments:
        TOLD["length"] = int(arguments[arguments.index("--max-model-len") + 1])
    host, port = (arguments[arguments.index(name) + 1] for name in ("--host", "--port"))
    ThreadingHTTPServer((host, int(port)), Handler).serve_forever()


def start_children() -> list[int]:
    """One in our group and one in a session of its own, neither of which SIGTERM ends."""
    pids = []
    for alone in (False, True):
        child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=alone)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        pids.append(child.pid)
    return pids


def bench(asked: Path, heard: Path) -> None:
    number = 0
    while not ("end" in TOLD and number >= len(TOLD["results"])):
        for line in asked.read_text().splitlines()[number:]:
            measure(number, json.loads(line)["arguments"], heard)
            number += 1
        time.sleep(0.02)


def measure(number: int, arguments: list[str], heard: Path) -> None:
    for beat in range(TOLD.get("beats", 0)):
        time.sleep(0.3)
        heard.write_text(str(beat))
    if number >= len(TOLD["results"]):
        if TOLD.get("stall"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        print("ValueError: Initial test run failed")
        sys.exit(1)
    folder, file, prompts = (
        arguments[arguments.index(name) + 1] for name in ("--result-dir", "--result-filename", "--num-prompts")
    )
    print("Error 0: Bad Request", flush=True)
    result = TOLD["results"][number]
    (Path(folder) / file).write_text(
        result if isinstance(result, str) else json.dumps({key: repeated(result[key], int(prompts)) for key in result})
    )


def repeated(value: Any, count: int) -> Any:
    """What a result tells of each request, of so many."""
    return list(itertools.islice(itertools.cycle(value), count)) if isinstance(value, list) else value


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["-m", "vllm.entrypoints.openai.api_server", *rest]:
            serve(rest)
        case [client, file, heard] if client.endswith("client.py"):
            bench(Path(file), Path(heard))
        case unknown:
            sys.exit(f"the fake knows no {unknown}")
