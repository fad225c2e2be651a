"""URLs: every hop checked, connected to the checked address, within a deadline and a size."""

from __future__ import annotations

import gzip
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from pictures import noise

from processors import MediaError, MediaFetchError, MediaOptions, load_image
from processors.fetch import fetch_url, is_public

LOCAL = MediaOptions(allow_private_urls=True, url_timeout=5.0, max_image_bytes=100_000)

PICTURE = noise(21, 13, 4)

Answer = Callable[[BaseHTTPRequestHandler], None]


def _plain(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "5")
    handler.end_headers()
    handler.wfile.write(b"hello")


def _picture(handler: BaseHTTPRequestHandler) -> None:
    stream = io.BytesIO()
    PICTURE.save(stream, "PNG")
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(stream.getvalue())


def _redirect(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(302)
    handler.send_header("Location", handler.path.partition("?to=")[2])
    handler.end_headers()


def _endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b"x" * 10_000)


def _announced(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100000000")
    handler.end_headers()


def _short(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "50")
    handler.end_headers()
    handler.wfile.write(b"hello")


def _drip(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nX-Slow: ")
    for _ in range(100):
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.05)


def _missing(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(404)
    handler.end_headers()


def _circle(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(302)
    handler.send_header("Location", "/circle")
    handler.end_headers()


def _raw(answer: bytes) -> Answer:
    """A server that says these bytes and no more, and closes."""

    def say(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(answer)
        handler.close_connection = True

    return say


def _slow_body(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(100):
        handler.wfile.write(b"1\r\nx\r\n")
        handler.wfile.flush()
        time.sleep(0.05)


def _never_ending_chunk(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    handler.wfile.write(b"fffffff\r\n")
    for _ in range(1000):
        handler.wfile.write(b"x" * 10_000)


_BOMB = gzip.compress(bytes(50_000_000))

LIES: dict[str, tuple[Answer, str]] = {
    "/gzip": (_raw(b"HTTP/1.0 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + _BOMB), "compressed"),
    "/gzip-chunked": (
        _raw(b"HTTP/1.1 200 OK\r\nContent-Encoding: GZIP\r\nTransfer-Encoding: chunked\r\n\r\n"),
        "compressed",
    ),
    "/slow-body": (_slow_body, "not answered in time"),
    "/chunk": (_never_ending_chunk, "more than 100000 bytes"),
    "/bad-chunk": (_raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n"), "can not be fetched"),
    "/no-chunk": (_raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "can not be fetched"),
    "/cut-chunk": (_raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\nabc"), "can not be fetched"),
    "/silent": (_raw(b""), "can not be fetched"),
    "/noise": (_raw(b"\x00\xff" * 50_000), "can not be fetched"),
    "/headers": (_raw(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 5000 + b"\r\n"), "can not be fetched"),
    "/long-header": (_raw(b"HTTP/1.1 200 OK\r\nA: " + b"b" * 200_000 + b"\r\n\r\n"), "can not be fetched"),
    "/nowhere": (_raw(b"HTTP/1.0 302 Found\r\n\r\n"), "without saying where"),
    "/user": (_raw(b"HTTP/1.0 302 Found\r\nLocation: http://user:secret@127.0.0.1/\r\n\r\n"), "user name or password"),
    "/gopher": (_raw(b"HTTP/1.0 302 Found\r\nLocation: gopher://127.0.0.1/x\r\n\r\n"), "only http and https"),
    "/data": (_raw(b"HTTP/1.0 302 Found\r\nLocation: data:image/png;base64,AAAA\r\n\r\n"), "only http and https"),
    "/empty": (_raw(b"HTTP/1.0 204 No Content\r\n\r\n"), "204"),
    "/part": (_raw(b"HTTP/1.0 206 Partial Content\r\n\r\nabc"), "206"),
}
"""Servers that lie, with what is said about them."""


class _Handler(BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, Answer]] = {
        "/plain": _plain,
        "/picture": _picture,
        "/redirect": _redirect,
        "/circle": _circle,
        "/endless": _endless,
        "/announced": _announced,
        "/short": _short,
        "/drip": _drip,
        "/missing": _missing,
        **{path: answer for path, (answer, _) in LIES.items()},
    }

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("Host")))  # type: ignore[attr-defined]
        try:
            self.answers[self.path.partition("?")[0]](self)
        except OSError:
            self.close_connection = True  # the client has gone, as it should

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


class Server(ThreadingHTTPServer):
    """A server on a free port of the loopback interface that remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def test_fetches_where_it_is_allowed(server: Server) -> None:
    assert fetch_url(f"{server.url}/plain", LOCAL) == b"hello"
    assert server.seen == [("/plain", f"127.0.0.1:{server.server_port}")]


def test_a_picture_behind_a_redirect_is_a_picture(server: Server) -> None:
    assert load_image(f"{server.url}/redirect?to=/picture", LOCAL).tobytes() == PICTURE.tobytes()
    with pytest.raises(MediaError, match=r"the image at 'http.*/plain' is no image of a known format"):
        load_image(f"{server.url}/plain", LOCAL)


def test_follows_redirects_up_to_the_limit(server: Server) -> None:
    assert fetch_url(f"{server.url}/redirect?to=/plain", LOCAL) == b"hello"
    with pytest.raises(MediaFetchError, match="redirects more than 5 times"):
        fetch_url(f"{server.url}/circle", LOCAL)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "0.0.0.0",
        "2130706433",
        "0x7f000001",
        "127.1",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "10.0.0.1",
        "192.168.1.1",
        "172.16.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "[fe80::1]",
        "[fc00::1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "224.0.0.1",
        "255.255.255.255",
    ],
)
def test_addresses_that_are_not_public_are_refused(host: str) -> None:
    with pytest.raises(MediaFetchError, match=r"not a public address|not known"):
        fetch_url(f"http://{host}:9/", MediaOptions(url_timeout=2.0))


def test_no_request_reaches_a_refused_address(server: Server) -> None:
    with pytest.raises(MediaFetchError, match="not a public address"):
        fetch_url(f"{server.url}/plain", MediaOptions())
    assert server.seen == []


def test_a_redirect_is_checked_like_the_first_address(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host passes as public; the redirect's target does not."""
    monkeypatch.setattr("processors.fetch.is_public", lambda address: address == "127.0.0.1")
    with pytest.raises(MediaFetchError, match="not a public address"):
        fetch_url(f"{server.url}/redirect?to=http://127.0.0.2:{server.server_port}/plain", MediaOptions())
    assert [path for path, _ in server.seen] == [f"/redirect?to=http://127.0.0.2:{server.server_port}/plain"]


def test_a_redirect_can_not_leave_http(server: Server) -> None:
    with pytest.raises(MediaFetchError, match="only http and https"):
        fetch_url(f"{server.url}/redirect?to=file:///etc/hostname", LOCAL)


def test_the_connection_goes_to_the_address_that_was_checked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that changes its mind after the check is not asked again."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def fake(host: str, port: int, *args: object, **kwargs: object) -> object:
        asked.append(host)
        return (
            real("127.0.0.1", port, *args, **kwargs) if host == "pictures.test" else real(host, port, *args, **kwargs)
        )  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", fake)
    url = f"http://pictures.test:{server.server_port}/plain"
    assert fetch_url(url, LOCAL) == b"hello"
    assert asked.count("pictures.test") == 1
    assert server.seen[0][1] == f"pictures.test:{server.server_port}"
    with pytest.raises(MediaFetchError, match=r"127\.0\.0\.1, which is not a public"):
        fetch_url(url, MediaOptions())


@pytest.mark.parametrize("path", ["/endless", "/announced"])
def test_the_size_is_capped(server: Server, path: str) -> None:
    with pytest.raises(MediaFetchError, match="max_image_bytes"):
        fetch_url(f"{server.url}{path}", LOCAL)


def test_a_body_that_ends_early_is_refused(server: Server) -> None:
    with pytest.raises(MediaFetchError):
        fetch_url(f"{server.url}/short", LOCAL)


def test_a_dripping_server_meets_the_deadline(server: Server) -> None:
    start = time.monotonic()
    with pytest.raises(MediaFetchError, match="in time"):
        fetch_url(f"{server.url}/drip", MediaOptions(allow_private_urls=True, url_timeout=0.3))
    assert time.monotonic() - start < 2.0


def test_a_slow_resolver_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(*args: object, **kwargs: object) -> list[object]:
        release.wait(5)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with pytest.raises(MediaFetchError, match="in time"):
        fetch_url("http://pictures.test/", MediaOptions(url_timeout=0.1))
    release.set()


@pytest.mark.parametrize("path", LIES)
def test_servers_that_lie_are_refused_with_the_reason(server: Server, path: str) -> None:
    with pytest.raises(MediaFetchError, match=LIES[path][1]) as caught:
        fetch_url(f"{server.url}{path}", replace(LOCAL, url_timeout=0.5 if path == "/slow-body" else 5.0))
    assert len(str(caught.value)) < 400
    assert "secret" not in str(caught.value)


def test_a_redirect_without_a_scheme_is_checked_too(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("processors.fetch.is_public", lambda address: address == "127.0.0.1")
    with pytest.raises(MediaFetchError, match="not a public address"):
        fetch_url(f"{server.url}/redirect?to=//127.0.0.3:{server.server_port}/plain", MediaOptions())


def test_an_error_status_is_named(server: Server) -> None:
    with pytest.raises(MediaFetchError, match="404"):
        fetch_url(f"{server.url}/missing", LOCAL)


@pytest.mark.parametrize(
    "url",
    [
        "http://user@127.0.0.1/",
        "http://example.com:secret@127.0.0.1/",
        "http://",
        "http://[::1/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1\\@example.com/",
        "http://127.0.0.1/a b",
        "http://127.0.0.1/\r\nX: y",
        "http://127.0.0.1/\ud800",
        "http://127.0.0.1/?\udfff",
        "http://\ud800.com/",
        "http://" + "a" * 70 + ".com/",
        "http://" + "x" * 100_000,
    ],
)
def test_odd_urls_are_refused_with_a_short_message(url: str) -> None:
    with pytest.raises(MediaFetchError) as caught:
        fetch_url(url, LOCAL)
    assert len(str(caught.value)) < 400
    assert "secret" not in str(caught.value)


def test_urls_can_be_switched_off() -> None:
    with pytest.raises(MediaFetchError, match="allow_urls"):
        fetch_url("http://127.0.0.1/", MediaOptions(allow_urls=False))


@pytest.mark.parametrize(("address", "public"), [("8.8.8.8", True), ("2606:4700::1", True), ("::", False)])
def test_what_is_public(address: str, public: bool) -> None:
    assert is_public(address) is public
