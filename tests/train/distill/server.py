"""An OpenAI-compatible server on this machine, which answers as a test tells it to."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-secret-of-the-tests"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A status, headers and a body, of which half is sent if it is cut.

    One that drips sends a header now and then, and never ends.
    """

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False
    drips: bool = False


Script = Callable[[str, int], Reply]  # of a prompt, and how often it was asked before


@dataclass
class Server:
    """Its base URL, and all that it was asked: paths, headers and bodies."""

    url: str
    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    most_at_once: int = 0
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def prompts(self) -> list[str]:
        """The prompts that it was asked, in order."""
        return [prompt_of(body) for _, _, body in self.asked]


def prompt_of(body: dict[str, Any]) -> str:
    """Return the last words of a request."""
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


def chat(content: str | None, *, reason: str | None = "stop", **message: Any) -> Reply:
    """Return an answer to a conversation."""
    said = {"role": "assistant", "content": content, **message}
    return Reply(body={"choices": [{"index": 0, "message": said, "finish_reason": reason}]})


def completion(text: str, *, reason: str = "stop") -> Reply:
    """Return what follows a text."""
    return Reply(body={"choices": [{"index": 0, "text": text, "finish_reason": reason}]})


@contextmanager
def sending(reply: bytes) -> Iterator[str]:
    """Answer the first connection with bytes that need not be HTTP; yield the base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(reply)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


@contextmanager
def serving(script: Script, context: ssl.SSLContext | None = None) -> Iterator[Server]:
    """Serve what `script` says until the end of the body; over TLS with a `context`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                before = server.prompts.count(prompt_of(body))
                server.asked.append((self.path, dict(self.headers), body))
                server.now += 1
                server.most_at_once = max(server.most_at_once, server.now)
            try:
                self._send(script(prompt_of(body), before))
            except OSError:  # the client has left
                return
            finally:
                with server.lock:
                    server.now -= 1

        def _send(self, reply: Reply) -> None:
            data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            while reply.drips:
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                time.sleep(0.02)
            self.send_response(reply.status)
            for name, value in {**reply.headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if reply.is_cut else data)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """Print nothing: a client that leaves is what tests are about."""

    with Quiet(("127.0.0.1", 0), Handler) as own:
        scheme = "http"
        if context is not None:
            own.socket, scheme = context.wrap_socket(own.socket, server_side=True), "https"
        server = Server(f"{scheme}://127.0.0.1:{own.server_address[1]}/v1")
        thread = threading.Thread(target=own.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            own.shutdown()
            thread.join()
