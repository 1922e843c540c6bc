"""Requests as browsers, other sites and floods send them."""

import asyncio
from functools import partial

import pytest
import uvicorn

from gemsmith.serve.chat import web
from gemsmith.serve.chat.web import Gate, open_connection
from support.cases import each

HERE = {"host": "127.0.0.1:7860"}


def ask(headers, *parts, kind="http", query="", tokens=(), sent=None, late_s=0.0):
    """The status of the answer, and what the application behind the gate has read."""
    sent, read = [] if sent is None else sent, []
    coming = [{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts]

    async def receive():
        await asyncio.sleep(late_s)
        return coming.pop(0) if coming else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    async def application(_scope, receive, send):
        while (message := await receive())["type"] != "http.disconnect":
            read.append(message["body"])
        await send({"type": "http.response.start", "status": 200})

    pairs = headers.items() if isinstance(headers, dict) else headers
    scope = {"type": kind, "headers": [(name.encode(), value.encode()) for name, value in pairs]}
    asyncio.run(Gate(application, tokens)(scope | {"query_string": query.encode()}, receive, send))
    return sent[0].get("status", sent[0]["type"]), b"".join(read)


@pytest.mark.parametrize(
    "headers",
    [
        HERE,
        {"host": "localhost:9000", "origin": "http://localhost:9000"},  # through a tunnel
        {"host": "[::1]:7860"},
        HERE | {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"},
        HERE | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    ],
)
def test_the_page_itself_a_tunnel_to_it_and_a_link_to_it_are_let_in(headers):
    assert ask(headers, b"a", b"b") == (200, b"ab")


@each(
    "headers",
    [
        {},
        {"host": "evil.example:7860"},  # its name points to this machine
        {"host": "127.0.0.1.evil.example"},
        {"host": "evil.example@127.0.0.1.nip.io"},
        {"host": "[::1"},
        [("host", "127.0.0.1:7860"), ("host", "evil.example")],
        HERE | {"origin": "https://evil.example"},
        HERE | {"origin": "null"},
        HERE | {"origin": "http://127.0.0.1:3000"},  # another server of this machine
        HERE | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    ],
)
def test_another_site_is_refused_whatever_it_sends(headers):
    assert ask(headers, b"a") == (403, b"")
    assert ask(headers, b"", kind="websocket")[0] == "websocket.close"


def test_a_body_is_bounded_whether_its_length_is_said_or_not(monkeypatch):
    monkeypatch.setattr(web, "MOST_BYTES", 10)
    assert ask(HERE, b"12345", b"67890") == (200, b"1234567890")
    assert ask(HERE | {"content-length": "11"}, b"1") == (413, b"")
    assert ask(HERE, b"12345", b"67890", b"1", b"2") == (413, b"")


def test_a_body_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(web, "BODY_S", 0.01)
    assert ask(HERE, b"1", late_s=1) == (408, b"")


def test_where_there_is_a_token_the_address_or_the_cookie_that_it_gives_must_have_it():
    sent: list[dict] = []
    assert ask(HERE, b"", query="token=a%3Bb", tokens=["a%3Bb"], sent=sent) == (200, b"")
    cookie = dict(sent[0]["headers"])[b"set-cookie"].decode()
    assert cookie.endswith("; HttpOnly; SameSite=Strict; Path=/")
    assert ask(HERE | {"cookie": cookie.partition(";")[0]}, b"", tokens=["a%3Bb"]) == (200, b"")
    for headers, query in ((HERE, ""), (HERE, "token=b"), (HERE | {"cookie": "gemsmith-chat=b"}, "")):
        assert ask(headers, b"", query=query, tokens=["a%3Bb"]) == (403, b"")
        assert ask(headers, b"", query=query, tokens=["a%3Bb"], kind="websocket")[0] == "websocket.close"


def test_answers_forbid_what_the_page_does_not_need():
    for asked in (HERE, {"host": "evil.example"}, HERE | {"content-length": "99999999999"}):
        sent: list[dict] = []
        ask(asked, b"", sent=sent)
        headers = dict(sent[0]["headers"])
        assert headers[b"x-content-type-options"] == b"nosniff" and b"set-cookie" not in headers
        assert b"default-src 'self' " in (policy := headers[b"content-security-policy"])
        assert b"frame-ancestors 'none'" in policy and b"http" not in policy


def test_a_connection_on_which_no_request_comes_is_closed_and_one_that_waits_for_its_answer_is_not(monkeypatch):
    monkeypatch.setattr(web, "BODY_S", 0.2)

    async def application(_scope, _receive, send):
        await asyncio.sleep(1)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def hear(*parts):
        config = uvicorn.Config(application, port=0, lifespan="off", log_level="critical")
        config.load()
        config.http_protocol_class = partial(open_connection, config.http_protocol_class)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
        for part in parts:
            writer.write(part)
        heard = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        server.should_exit = True
        await serving
        return heard

    whole = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    for sent in ((), (whole[:20],)):
        assert asyncio.run(hear(*sent)) == b""
    assert asyncio.run(hear(whole, whole[:20])).startswith(b"HTTP/1.1 200 ")
