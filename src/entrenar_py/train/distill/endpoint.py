"""Asks an OpenAI-compatible server, several prompts at a time, again where that may help."""

from __future__ import annotations

import email.utils
import http.client
import json
import math
import os
import reprlib
import socket
import ssl
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import entrenar_py
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping, json_text
from entrenar_py.shared.wording import counted
from entrenar_py.train.distill.prompts import (
    REFUSED,
    TRUNCATED,
    WHOLE,
    Answer,
    Failed,
    Prompt,
    Result,
)
from entrenar_py.train.model.conversations import Conversation, Message
from entrenar_py.train.model.settings import Completions

_SENT = ("role", "content", "name", "tool_calls", "tool_call_id")  # others are not OpenAI's
_SHOWN_CHARS = 200
VALUES_MAX = 2**16  # of a reply: an answer has a few, calls of functions some hundred
# How answers end, by OpenAI and by servers that say it in their own words.
_WHOLE = ("stop", "tool_calls", "function_call", "eos", "eos_token", "end_turn", "stop_sequence")
_TRUNCATED = ("length", "max_tokens", "model_length")


class BadReplyError(ValueError):
    """A reply that holds no answer, and why."""


def request_of(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    """Return the path below the base URL, and the part of the body that is the prompt."""
    if not isinstance(prompt.asked, Conversation):
        return "completions", {"prompt": prompt.asked}
    body: dict[str, Any] = {"messages": [_message(one) for one in prompt.asked.messages]}
    if prompt.asked.tools:
        body["tools"] = list(prompt.asked.tools)
    return "chat/completions", body


def _message(message: Message) -> Message:
    """Return a message as OpenAI has it: the arguments of calls are JSON in a text."""
    sent = {key: message[key] for key in _SENT if key in message}
    if "tool_calls" in sent:
        sent["tool_calls"] = [_call_of(*one) for one in enumerate(sent["tool_calls"])]
    return sent


def _call_of(number: int, call: Message) -> Message:
    function = call["function"]
    arguments = json.dumps(function["arguments"], default=str)
    return {"id": f"call_{number}", **call, "function": {**function, "arguments": arguments}}


def answer_of(body: bytes) -> Answer:
    """Return the answer in a reply's body. Raises BadReplyError."""
    record = _record(body)
    choices = record.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping):
        raise BadReplyError(f"a reply without choices ({problem_of(body)})")
    message = choice.get("message")
    said: Mapping[str, Any] = message if isinstance(message, Mapping) else choice
    content = said.get("content") if said is message else said.get("text")
    calls = said.get("tool_calls") or []
    if not isinstance(content, str | None) or not isinstance(calls, list):
        raise BadReplyError(f"a reply whose answer is no text ({problem_of(body)})")
    content, reason = content or "", choice.get("finish_reason")
    try:
        json.dumps([content, calls], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadReplyError("an answer with half of a character") from error
    ended = reason.lower() if isinstance(reason, str) else None
    if ended in _TRUNCATED:
        return Answer(TRUNCATED, content)
    if said.get("refusal") or ended == "content_filter":
        return Answer(REFUSED, content)
    if ended not in _WHOLE:
        told = "does not say how it ended" if reason is None else f"ended by {reason!r}"
        raise BadReplyError(f"an answer that {escaping.shortened(told)} (finish_reason)")
    if not (content.strip() or calls):
        return Answer(REFUSED, content)
    return Answer(WHOLE, content, calls)


def _record(body: bytes) -> Mapping[str, Any]:
    try:
        record = json_text.load(body, values_max=VALUES_MAX)
    except ValueError as error:
        raise BadReplyError(f"a reply that is not whole JSON ({error})") from error
    if not isinstance(record, Mapping):
        raise BadReplyError(f"a reply that is no object of JSON ({problem_of(body)})")
    return record


def problem_of(body: bytes) -> str:
    """Return what a body says of an error, in a few words."""
    try:
        record = json_text.load(body, values_max=VALUES_MAX)
    except ValueError:
        record = body.decode(errors="replace")
    if isinstance(record, Mapping):
        error = record.get("error", record.get("message", record.get("detail", record)))
        record = error.get("message", error) if isinstance(error, Mapping) else error
    text = record if isinstance(record, str) else reprlib.repr(record)
    return escaping.line(escaping.shortened(text, chars_max=_SHOWN_CHARS)) or "nothing"


REPLY_BYTES_MAX = 2**24
# What a reply has beside its answer, and what JSON makes of a token (128 characters, 6 bytes each).
_AROUND_BYTES, _TOKEN_BYTES = 2**20, 2**10
CONNECT_S = 30.0
FIRST_WAIT_S = 1.0  # before a request is tried again; then twice as long each time
WAIT_S_MAX = 600.0
HOPELESS = 16  # prompts in a row that the server failed; the others are not asked then
_TICK_S = 0.2
_READ_BYTES = 2**16  # at a time
_AGAIN = (408, 409, 425, 429)  # statuses below 500 that another try may change
_REFUSALS = {
    401: "name the environment variable with the right key in distill.text.key_variable",
    403: "use a key that may use the model (distill.text.key_variable)",
    404: "check the base URL, which usually ends with /v1, and distill.text.served_model",
}


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where requests go: a base URL whose parts are known to be usable."""

    url: str
    host: str
    port: int | None
    path: str
    is_secure: bool

    @property
    def is_local(self) -> bool:
        """True if requests stay on this machine."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def address(url: str) -> Address:
    """Return the parts of a base URL. Raises UsageError."""
    advice = "use a base URL such as http://host:8000/v1"
    if not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(f"endpoint={url!r}: it has characters that no URL has; {advice}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # as a connection does
    except ValueError as error:
        raise UsageError(f"endpoint={url!r}: {error}; {advice}") from error
    if "@" in parts.netloc:  # not shown: it may be a password
        raise UsageError(
            "endpoint has a user or a password in its URL; leave them out, and name the "
            "environment variable with the key in distill.text.key_variable"
        )
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise UsageError(f"endpoint={url!r}: it has no http:// or https://, or no host; {advice}")
    path = parts.path.rstrip("/")
    if parts.query or parts.fragment or path.endswith("/completions"):
        raise UsageError(f"endpoint={url!r}: it is more than a base URL; {advice}")
    is_secure = parts.scheme == "https"
    shown = f"[{host}]" if ":" in host else host
    told = f"{parts.scheme}://{shown}{'' if port is None else f':{port}'}{path}"
    return Address(url=told, host=host, port=port, path=path, is_secure=is_secure)


def key(variable: str | None) -> str | None:
    """Return the API key in the environment's `variable`, None without one.

    Raises UsageError, which does not show it.
    """
    if variable is None:
        return None
    found = os.environ.get(variable, "").strip()
    if not found:
        raise UsageError(
            f"distill.text.key_variable={variable}: the environment has no such variable, or an "
            f"empty one; set it to the endpoint's key (export {variable}=...)"
        )
    if not found.isascii() or not found.isprintable() or " " in found:
        raise UsageError(
            f"distill.text.key_variable={variable}: its value has characters that no key has, such "
            "as spaces or line ends; set it to the key alone"
        )
    return found


class _TroubleError(Exception):
    """A request without an answer, and whether to try again, after some seconds if they are told.

    `is_servers` is False for what is the prompt's own fault.
    """

    def __init__(
        self, reason: str, *, again: bool, after_s: float | None = None, is_servers: bool = True
    ) -> None:
        super().__init__(reason)
        self.again, self.after_s, self.is_servers = again, after_s, is_servers


@dataclass(frozen=True)
class _Unserved(Failed):
    """A prompt that the server failed, so that it may fail all others, too."""


@dataclass
class _Asking:
    """The requests of one call: whether they are given up, and the open connections."""

    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    deadlines: dict[http.client.HTTPConnection, float] = field(default_factory=dict)

    @contextmanager
    def open(self, connection: http.client.HTTPConnection, seconds: float) -> Iterator[None]:
        """List a connection in the body, as one that has to be done within `seconds`."""
        with self.lock:
            self.deadlines[connection] = time.monotonic() + seconds
        try:
            yield
        finally:
            with self.lock:
                del self.deadlines[connection]
            connection.close()

    def give_up(self, *, all_of_them: bool) -> None:
        """End the connections that are overdue, or all, whatever their threads wait for."""
        with self.lock:
            for connection, deadline in self.deadlines.items():
                sock: Any = connection.sock
                if sock is not None and (all_of_them or time.monotonic() > deadline):
                    with suppress(OSError):  # ended already
                        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Endpoint:
    """A server and how it is asked. It has the key, which nothing prints."""

    def __init__(self, section: Completions, place: Address, *, seed: int) -> None:
        """Raises UsageError if the model's name or the key is missing."""
        if section.served_model is None:
            raise UsageError(
                "distill.text.served_model is missing: the name that the endpoint "
                f"{place.url} has for the model (its /models lists them)"
            )
        self._section, self._place, self._seed = section, place, seed
        self._model, self._key = section.served_model, key(section.key_variable)
        self._bytes_max = min(REPLY_BYTES_MAX, _AROUND_BYTES + _TOKEN_BYTES * section.new_tokens)
        self._tls = ssl.create_default_context() if place.is_secure else None

    @property
    def shows_key(self) -> bool:
        """True if the key goes to another machine in a form that anyone between can read."""
        return self._key is not None and not self._place.is_secure and not self._place.is_local

    @property
    def day(self) -> None:
        """The server has the template, and a clock of its own."""
        return

    @property
    def identity(self) -> list[str]:
        """The source of the answers: URL and model."""
        return [self._place.url, self._model]

    def answers(
        self, prompts: Sequence[Prompt], stopping: threading.Event
    ) -> Generator[tuple[Prompt, Result], None, None]:
        """Yield each prompt with its answer, or why it has none, in the order in which they come.

        Once `stopping` is set, or the caller leaves, what is asked is given up. Raises UsageError
        for a reply that any prompt would have.
        """
        asking, left, in_a_row = _Asking(), iter(prompts), 0
        flying = dict[Future[Result | None], Prompt]()
        pool = ThreadPoolExecutor(self._section.concurrent, thread_name_prefix="endpoint")
        try:
            while not stopping.is_set():
                room = self._section.concurrent - len(flying)
                for prompt in islice(left, room if in_a_row < HOPELESS else 0):
                    flying[pool.submit(self._answer, prompt, asking)] = prompt
                if not flying:
                    break
                done, _ = wait(flying, timeout=_TICK_S, return_when=FIRST_COMPLETED)
                asking.give_up(all_of_them=False)
                # An error ends all this: the answers that came with it first.
                for future in sorted(done, key=lambda one: one.exception() is not None):
                    prompt, result = flying.pop(future), future.result()
                    assert result is not None, "only what is given up has none"
                    in_a_row = in_a_row + 1 if isinstance(result, _Unserved) else 0
                    yield prompt, result
            asking.ended.set()
            for future, prompt in flying.items():  # came in this moment
                result = future.result() if future.done() and not future.exception() else None
                if result is not None:
                    yield prompt, result
            for prompt in () if stopping.is_set() else left:
                yield prompt, Failed(f"not asked, since {HOPELESS} prompts in a row had failed")
        finally:
            asking.ended.set()
            while wait(flying, timeout=0).not_done:
                asking.give_up(all_of_them=True)
                wait(flying, timeout=_TICK_S)
            pool.shutdown()

    def _answer(self, prompt: Prompt, asking: _Asking) -> Result | None:
        """Return the answer to a prompt, or why there is none; None if it was given up."""
        tries, next_s = self._section.retries + 1, FIRST_WAIT_S
        for number in range(1, tries + 1):
            try:
                return self._ask(prompt, asking)
            except _TroubleError as trouble:
                if asking.ended.is_set():
                    return None
                if number == tries or not trouble.again:
                    kind = _Unserved if trouble.is_servers else Failed
                    return kind(f"{trouble} ({counted(number, 'time')} asked)")
                due_s = next_s if trouble.after_s is None else max(next_s, trouble.after_s)
                if asking.ended.wait(min(due_s, WAIT_S_MAX)):
                    return None
                next_s *= 2
        raise AssertionError("the last try returns")

    def _ask(self, prompt: Prompt, asking: _Asking) -> Answer:
        path, body = request_of(prompt)
        section = self._section
        body |= {
            "model": self._model,
            "max_tokens": section.new_tokens,
            "temperature": section.temperature,
        }
        if section.temperature:
            body["seed"] = seed_of(prompt, self._seed) % 2**31
        status, after_s, reply = self._exchange(f"{self._place.path}/{path}", body, asking)
        told = f"the endpoint answers {status} ({problem_of(reply)})"
        if status in _REFUSALS or 300 <= status < 400:
            advice = _REFUSALS.get(status, "give the URL that it points to")
            raise UsageError(f"endpoint={self._place.url}: {told}; {advice}")
        if status in _AGAIN or status >= 500:
            raise _TroubleError(told, again=True, after_s=after_s)
        if status != http.client.OK:
            raise _TroubleError(told, again=False, is_servers=False)
        try:
            return answer_of(reply)
        except BadReplyError as problem:
            raise _TroubleError(f"the endpoint sends {problem}", again=True) from problem

    def _exchange(
        self, path: str, body: dict[str, Any], asking: _Asking
    ) -> tuple[int, float | None, bytes]:
        """Return the status of a reply, when to come again, and its body."""
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "User-Agent": f"entrenar-py/{entrenar_py.__version__}",
            "Connection": "close",
        }
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        limit_s, began_s = self._section.timeout_s, time.monotonic()
        connection = self._connection(min(CONNECT_S, limit_s))
        try:
            with asking.open(connection, limit_s):
                connection.connect()
                connection.sock.settimeout(limit_s)
                if asking.ended.is_set():
                    raise _TroubleError("given up", again=False)
                sent = json.dumps(body, default=str).encode()
                connection.request("POST", path, sent, headers)
                reply = connection.getresponse()
                found = _body(reply, self._bytes_max)
        except ssl.SSLCertVerificationError as error:
            raise UsageError(
                f"endpoint={self._place.url}: its certificate is not trusted "
                f"({error.verify_message}); use the name that it is for, or let the system trust "
                "its issuer (SSL_CERT_FILE)"
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            if time.monotonic() - began_s >= limit_s:
                told = f"no whole answer within {limit_s:g} s (distill.text.timeout_s)"
            else:
                why = self._hidden(str(error) or type(error).__name__)
                told = f"no connection, or one that broke ({why})"
            raise _TroubleError(told, again=True) from error
        if time.monotonic() - began_s >= limit_s:
            told = f"no whole answer within {limit_s:g} s (distill.text.timeout_s)"
            raise _TroubleError(told, again=True)
        if len(found) > self._bytes_max:
            told = (
                f"the endpoint sends more than {self._bytes_max} bytes, the most that are read for "
                f"{self._section.new_tokens} tokens (distill.text.new_tokens)"
            )
            raise _TroubleError(told, again=False)
        if self._key is not None:  # some send it back
            found = _without(self._key, found)
        after_s = _seconds(reply.getheader("Retry-After"), reply.getheader("Date"))
        return reply.status, after_s, found

    def _connection(self, connect_s: float) -> http.client.HTTPConnection:
        place = self._place
        if self._tls is None:
            return http.client.HTTPConnection(place.host, place.port, timeout=connect_s)
        return http.client.HTTPSConnection(
            place.host, place.port, timeout=connect_s, context=self._tls
        )

    def _hidden(self, text: str) -> str:
        """Return a server's text without the key, which some send back."""
        return text if self._key is None else text.replace(self._key, "***")


def _body(reply: http.client.HTTPResponse, bytes_max: int) -> bytes:
    """Return a reply's body, or a byte more than is allowed.

    Raises HTTPException for one that breaks off, and ValueError for sizes that are no numbers.
    """
    found = bytearray()
    while len(found) <= bytes_max and (part := reply.read1(_READ_BYTES)):
        found += part
    if reply.length and len(found) <= bytes_max:
        raise http.client.IncompleteRead(bytes(found), reply.length)
    return bytes(found[: bytes_max + 1])


def _without(key: str, body: bytes) -> bytes:
    """Return a body in which stars stand for the key, however JSON has written it."""
    with suppress(ValueError):  # else it is hidden where it stands as it is
        body = json.dumps(json_text.load(body, values_max=VALUES_MAX)).encode()
    for form in {key, json.dumps(key)[1:-1]}:
        body = body.replace(form.encode(), b"***")
    return body


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return the seed of a prompt's answer: the same whenever it is asked."""
    return (int(prompt.digest, 16) ^ seed) % 2**63


def _seconds(given: str | None, now: str | None) -> float | None:
    """Return what a Retry-After says: seconds, or a date; None for nothing of both.

    A date is compared with `now`, the answer's own date, since clocks differ, and jump.
    """
    if given is None:
        return None
    try:
        found = float(given)
    except ValueError:
        try:
            due, sent = (email.utils.parsedate_to_datetime(one or "") for one in (given, now))
            found = (due - sent).total_seconds()
        except (TypeError, ValueError, OverflowError):  # one may be without a time zone
            return None
    return max(0.0, found) if math.isfinite(found) else None
