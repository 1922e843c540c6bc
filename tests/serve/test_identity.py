import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from gemsmith.serve.server import ask, describe_answer, has_nonce, new_nonce, with_nonce

HTML = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>It works!</html>"
REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/v1/models\r\nContent-Length: 0\r\n\r\n"


@contextlib.contextmanager
def stranger(*pieces: bytes, pause_s: float = 0.0, closes: bool = True) -> Iterator[tuple[str, list[bytes]]]:
    """A program that answers each connection with these pieces; its address, and what it was sent."""
    heard: list[bytes] = []
    ended = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            heard.append(connection.recv(4096))
            for piece in pieces:
                connection.sendall(piece)
                if ended.wait(pause_s):
                    return
            if not closes:
                ended.wait(600)

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", heard
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("pieces", "described"),
    [
        ([HTML], "HTTP 200"),
        ([REDIRECT], "HTTP 302"),
        ([b"HTTP/1.1 200 OK\r\n\r\n", b"[" * 100_000], "HTTP 200"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "not HTTP"),
        ([b"\x1b[2J\xff\x00 "], "not HTTP"),
        ([], "no answer"),
    ],
    ids=["HTML", "a redirect", "JSON too deep to read", "SSH", "control characters", "silence"],
)
def test_a_strangers_answer_proves_nothing_and_is_named(pieces: list[bytes], described: str) -> None:
    with stranger(*pieces) as (url, _):
        answer = ask(url, timeout_s=60)
    assert answer is not None and describe_answer(answer) == described
    assert not has_nonce(answer, new_nonce())


def test_a_redirect_is_not_followed() -> None:
    instance_id = new_nonce()
    with stranger(f'{{"data": [{{"id": "{instance_id}"}}]}}'.encode()) as (ours, heard):
        redirect = f"HTTP/1.1 302 Found\r\nLocation: {ours}/v1/models\r\nContent-Length: 0\r\n\r\n".encode()
        with stranger(redirect) as (url, _):
            assert not has_nonce(ask(url, timeout_s=60) or b"", instance_id)
    assert not heard


@pytest.mark.parametrize(
    "pieces", [[HTML[:15]], [bytes([byte]) for byte in HTML * 20]], ids=["stops midway", "a byte now and then"]
)
def test_an_answer_that_never_ends_is_cut_after_the_time(pieces: list[bytes]) -> None:
    begin_s = time.monotonic()
    with stranger(*pieces, pause_s=0.05, closes=False) as (url, _):
        answer = ask(url, timeout_s=0.5) or ask(url, timeout_s=20)  # where this machine is slow to begin one
    assert answer and answer.startswith(b"HTTP/1.1") and time.monotonic() - begin_s < 60


def test_an_endless_answer_is_cut_at_a_length() -> None:
    with stranger(b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 2**20] * 50) as (url, _):
        assert len(ask(url, timeout_s=60) or b"") < 2 * 2**20


def test_where_nobody_listens_there_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert ask(f"http://127.0.0.1:{port}", timeout_s=60) is None


def test_the_key_is_sent_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    with stranger(HTML) as (url, heard):
        ask(url, timeout_s=60)
    assert b"\r\nAuthorization: Bearer s3cret\r\n" in heard[0]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (["--served-model-name", "m", "--seed", "0"], ["--served-model-name", "m", "N", "--seed", "0"]),
        (["--served-model-name", "m"], ["--served-model-name", "m", "N"]),
        (
            ["--served-model-name", "m", "--seed", "0", "--served_model_name", "m", "other"],
            ["--served-model-name", "m", "--seed", "0", "--served_model_name", "m", "other", "N"],
        ),
        (
            ["--served-model-name", "m", "--served-model-name=other", "--seed", "0"],
            ["--served-model-name", "m", "--served-model-name", "other", "N", "--seed", "0"],
        ),
    ],
)
def test_the_nonce_is_the_last_of_the_names_that_count(given: list[str], made: list[str]) -> None:
    assert with_nonce(given, "N") == made


def test_no_two_nonces_are_the_same() -> None:
    assert new_nonce() != new_nonce()
