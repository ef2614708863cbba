"""The process: a socket, uvicorn, and an end that lets running requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from .app import make_app
from .service import Service

# Beyond the time that requests get: for the answers that tell them of the end to be sent.
_GRACE_SECONDS = 5


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything is loaded; port 0 takes a free one.

    Raises:
        OSError: the address is not of this machine, or is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None


def is_loopback(sock: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def url_of(sock: socket.socket) -> str:
    """Address of a listening socket, for people."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    service: Service, sock: socket.socket, *, access_log: bool, on_ready: Callable[[], None]
) -> int | None:
    """Serves until SIGTERM or Ctrl-C; the signal, or None where the server ended by itself.

    After the signal nothing is accepted any more, and running requests get
    `settings.shutdown_seconds` to finish; a second signal ends them at once.
    """
    server = ApiServer(service, access_log=access_log, on_ready=on_ready)
    asyncio.run(server.serve(sockets=[sock]))
    return server.received


class ApiServer(uvicorn.Server):
    """uvicorn's server with our end: drain, then close the engine, then leave.

    Args:
        service: what to serve; closed at the end.
        access_log: write a line for each request to stderr.
        on_ready: called once requests can come.
    """

    def __init__(self, service: Service, *, access_log: bool, on_ready: Callable[[], None]) -> None:
        patience = int(service.settings.shutdown_seconds) + _GRACE_SECONDS
        config = uvicorn.Config(
            make_app(service),
            http="h11",
            ws="none",
            lifespan="on",
            log_level="info" if access_log else "warning",
            access_log=access_log,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=patience,
        )
        super().__init__(config)
        self._service, self._on_ready = service, on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self.received: int | None = None
        self._told = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was obeyed is not raised again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First drains; told again it ends the running requests; a third time it just leaves."""
        self.received = sig
        self.should_exit = True
        self._told += 1
        self.force_exit = self._told > 2
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain if self._told == 1 else self._close)

    def _drain(self) -> None:
        self._service.engine.drain()
        assert self._loop is not None
        self._loop.call_later(self._service.settings.shutdown_seconds, self._close)

    def _close(self) -> None:
        """Tells those who still wait that it is over, without holding up the event loop."""
        threading.Thread(target=self._service.engine.close, daemon=True).start()
