"""Fetch an image by http(s), without letting a URL reach where it must not.

Each hop, the first address and every redirect, goes the same way::

    URL ──checked──> host, port ──resolved once──> addresses ──all public?──> connect to one of *those* addresses

The name is never resolved again, so it can not change its mind between check and connection, and TLS still verifies
the certificate against the name. One deadline covers everything, name resolution and slow headers included; the body
is read in pieces up to a limit. Proxies of the environment are not used, since they would resolve the name themselves.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import queue
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import quote, urljoin, urlsplit

from processors.errors import MediaFetchError, shorten

if TYPE_CHECKING:
    from processors.media import MediaOptions

__all__ = ["fetch_url", "is_public"]

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PIECE = 64 * 1024
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_HEADERS = {"Accept": "image/*,*/*;q=0.5", "Accept-Encoding": "identity", "User-Agent": "mmserve-processors"}
_SAFE = "/%:@!$&'()*+,;=~-._"


@dataclass(frozen=True, slots=True)
class _Target:
    """One hop: where to connect and what to ask for."""

    url: str
    secure: bool
    host: str
    port: int
    path: str


def fetch_url(url: str, options: MediaOptions) -> bytes:
    """The bytes at `url`.

    Raises:
        MediaFetchError: Refused (scheme, address, redirects, size), not answered in time, or answered with an error.
    """
    if not options.allow_urls:
        raise MediaFetchError(f"{shorten(url)} is refused: URLs are not allowed here (allow_urls)")
    deadline = time.monotonic() + options.url_timeout
    current = url
    for _ in range(options.max_redirects + 1):
        target = _parse(current)
        addresses = _resolve(target, deadline)
        refused = [a for a in addresses if not (options.allow_private_urls or is_public(a))]
        if refused:
            raise MediaFetchError(
                f"{shorten(current)} is refused: {shorten(target.host, 60)} leads to {refused[0]}, which is not a "
                "public address (allow_private_urls)"
            )
        location, body = _get(target, addresses, options.max_image_bytes, deadline)
        if location is None:
            return body
        current = urljoin(current, location)
    raise MediaFetchError(f"{shorten(url)} redirects more than {options.max_redirects} times (max_redirects)")


def is_public(address: str) -> bool:
    """Whether an IP address is one that anybody on the internet may reach.

    Addresses that carry another one (IPv4-mapped, NAT64, 6to4, Teredo) are as public as that one.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        carried = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in _NAT64:
            carried.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if any(inner is not None and not is_public(str(inner)) for inner in carried):
            return False
        if ip.ipv4_mapped is not None:
            return True
    return ip.is_global and not ip.is_multicast


def _parse(url: str) -> _Target:
    """Take a URL apart, refusing what different parsers read in different ways."""
    shown = shorten(url)
    if any(ord(c) <= 32 or ord(c) == 127 or c == "\\" for c in url):
        raise MediaFetchError(f"{shown} is refused: it contains spaces, control characters or backslashes")
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode("ascii")
        path, query = (quote(part, safe=_SAFE + more) for part, more in ((parts.path or "/", ""), (parts.query, "?[]")))
    except ValueError as error:
        raise MediaFetchError(f"{shown} is no valid URL: {shorten(str(error), 60)}") from error
    if parts.scheme not in ("http", "https"):
        raise MediaFetchError(f"{shown} is refused: only http and https are fetched, not {shorten(parts.scheme, 20)}")
    if parts.username is not None or parts.password is not None:
        raise MediaFetchError("a URL with a user name or password is refused")
    if not host:
        raise MediaFetchError(f"{shown} names no host")
    secure = parts.scheme == "https"
    if query:
        path += f"?{query}"
    return _Target(url, secure, host, port if port is not None else (443 if secure else 80), path)


def _resolve(target: _Target, deadline: float) -> list[str]:
    """All addresses of the host. The resolver has no time limit of its own, so it runs beside and may be left."""
    answers: queue.SimpleQueue[list[str] | OSError | UnicodeError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            answers.put(list(dict.fromkeys(str(entry[4][0]) for entry in found)))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    threading.Thread(target=ask, name="resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=_left(target, deadline))
    except queue.Empty:
        raise _late(target) from None
    if isinstance(answer, Exception):
        raise MediaFetchError(f"the host {shorten(target.host, 60)} is not known: {shorten(str(answer), 80)}")
    if not answer:
        raise MediaFetchError(f"the host {shorten(target.host, 60)} has no address")
    return answer


def _get(target: _Target, addresses: list[str], max_image_bytes: int, deadline: float) -> tuple[str | None, bytes]:
    """(where a redirect leads, nothing) or (None, the body)."""
    with _Guarded(target, addresses, deadline) as connection:
        try:
            connection.request("GET", target.path, headers=_HEADERS)
            with contextlib.closing(connection.getresponse()) as response:  # it holds the socket too
                return _read(response, target, max_image_bytes, deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if time.monotonic() >= deadline:
                raise _late(target) from error
            raise MediaFetchError(f"{shorten(target.url)} can not be fetched: {_reason(error)}") from error


def _read(
    response: http.client.HTTPResponse, target: _Target, max_image_bytes: int, deadline: float
) -> tuple[str | None, bytes]:
    if response.status in _REDIRECTS:
        location = response.getheader("Location")
        if not location:
            raise MediaFetchError(f"{shorten(target.url)} redirects without saying where")
        return location, b""
    if response.status != 200:
        raise MediaFetchError(f"{shorten(target.url)} answered {response.status} {shorten(response.reason, 40)}")
    if response.getheader("Content-Encoding", "identity").lower() != "identity":
        raise MediaFetchError(f"{shorten(target.url)} is compressed on the way, which was not asked for")
    return None, _body(response, target, max_image_bytes, deadline)


def _body(response: http.client.HTTPResponse, target: _Target, max_image_bytes: int, deadline: float) -> bytes:
    announced = response.getheader("Content-Length")
    if announced is not None and announced.strip().isdigit() and int(announced) > max_image_bytes:
        raise MediaFetchError(
            f"{shorten(target.url)} has {int(announced)} bytes, over {max_image_bytes} (max_image_bytes)"
        )
    pieces: list[bytes] = []
    total = 0
    while piece := response.read1(_PIECE):
        total += len(piece)
        if total > max_image_bytes:
            raise MediaFetchError(f"{shorten(target.url)} has more than {max_image_bytes} bytes (max_image_bytes)")
        if time.monotonic() >= deadline:
            raise _late(target)
        pieces.append(piece)
    if time.monotonic() >= deadline:
        raise _late(target)  # cut off while the headers dripped in: what was parsed of them looks complete
    if response.length:
        raise MediaFetchError(f"{shorten(target.url)} ended {response.length} bytes early")
    return b"".join(pieces)


class _Guarded:
    """A connection to one of the checked addresses that is cut when the deadline passes."""

    def __init__(self, target: _Target, addresses: list[str], deadline: float) -> None:
        self._target = target
        self._deadline = deadline
        self._socket = self._connect(addresses)
        # A timeout on the socket starts again with every byte; the timer ends a server that drips.
        self._timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._cut)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> http.client.HTTPConnection:
        target = self._target
        if target.secure:
            try:
                context = ssl.create_default_context()
                self._socket = context.wrap_socket(self._socket, server_hostname=target.host)
            except OSError as error:
                self._close()
                if time.monotonic() >= self._deadline:
                    raise _late(target) from error
                raise MediaFetchError(f"{shorten(target.url)} can not be fetched: {_reason(error)}") from error
        host = f"[{target.host}]" if ":" in target.host else target.host
        default = 443 if target.secure else 80
        connection = http.client.HTTPConnection(host, target.port)
        connection.default_port = default
        connection.sock = self._socket
        connection.auto_open = 0
        return connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _connect(self, addresses: list[str]) -> socket.socket:
        reason = "no address"
        for address in addresses:
            try:
                timeout = _left(self._target, self._deadline)
                return socket.create_connection((address, self._target.port), timeout=timeout)
            except OSError as error:
                reason = _reason(error)
        raise MediaFetchError(f"{shorten(self._target.url)} can not be reached: {reason}")

    def _cut(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed already

    def _close(self) -> None:
        self._timer.cancel()
        self._socket.close()


def _left(target: _Target, deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _late(target)
    return left


def _late(target: _Target) -> MediaFetchError:
    return MediaFetchError(f"{shorten(target.url)} was not answered in time (url_timeout)")


def _reason(error: Exception) -> str:
    return shorten(str(error), 80) if str(error) else type(error).__name__
