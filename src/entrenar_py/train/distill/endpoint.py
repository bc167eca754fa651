"""Sends prompts to an OpenAI-compatible server, several at a time, with retries where they help.

All requests run as tasks of one event loop, which runs only while the caller waits for an answer.
So whatever a request waits for (a name, a connection, the next byte) ends when the request is
cancelled or times out, and no thread is left behind.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import os
import reprlib
import ssl
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import entrenar_py
from entrenar_py.shared import package_data
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

if TYPE_CHECKING:
    import httpx2

_SENT = ("role", "content", "name", "tool_calls", "tool_call_id")  # OpenAI knows no other keys
_SHOWN_CHARS = 200
VALUES_MAX = 2**16  # JSON values in a reply: an answer has a few, function calls some hundred
# How answers end, in the words of OpenAI and of other servers.
_WHOLE = ("stop", "tool_calls", "function_call", "eos", "eos_token", "end_turn", "stop_sequence")
_TRUNCATED = ("length", "max_tokens", "model_length")


class BadReplyError(ValueError):
    """Raised for a reply that holds no answer; says why."""


def request_of(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    """Return the path below the base URL, and the part of the body that holds the prompt."""
    if not isinstance(prompt.asked, Conversation):
        return "completions", {"prompt": prompt.asked}
    body: dict[str, Any] = {"messages": [_message(one) for one in prompt.asked.messages]}
    if prompt.asked.tools:
        body["tools"] = list(prompt.asked.tools)
    return "chat/completions", body


def _message(message: Message) -> Message:
    sent = {key: message[key] for key in _SENT if key in message}
    if "tool_calls" in sent:
        sent["tool_calls"] = [_call_of(*one) for one in enumerate(sent["tool_calls"])]
    return sent


def _call_of(number: int, call: Message) -> Message:
    function = call["function"]
    arguments = json.dumps(function["arguments"], default=str)
    return {"id": f"call_{number}", **call, "function": {**function, "arguments": arguments}}


def answer_of(body: bytes) -> Answer:
    """Return the answer in a reply's body. Raises BadReplyError if it holds none."""
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
        raise BadReplyError(f"a reply with an answer that is not text ({problem_of(body)})")
    content, reason = content or "", choice.get("finish_reason")
    try:
        json.dumps([content, calls], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadReplyError("an answer with half a character (a lone surrogate)") from error
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
        raise BadReplyError(f"a reply that is not complete JSON ({error})") from error
    if not isinstance(record, Mapping):
        raise BadReplyError(f"a reply that is not a JSON object ({problem_of(body)})")
    return record


def problem_of(body: bytes) -> str:
    """Return the error message in a body, shortened."""
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
# Bytes of a reply around its answer, and of a token in JSON (128 characters, 6 bytes each).
_AROUND_BYTES, _TOKEN_BYTES = 2**20, 2**10
CONNECT_S = 30.0
FIRST_WAIT_S = 1.0  # before the first retry; doubled for each further retry
WAIT_S_MAX = 600.0
HOPELESS = 16  # after the server fails this many prompts in a row, no more are sent
_TICK_S = 0.2  # between checks for signals
_AGAIN = (408, 409, 425, 429)  # statuses below 500 for which a retry may help
_REFUSALS = {
    401: "name the environment variable with the right key in distill.text.key_variable",
    403: "use a key that may use the model (distill.text.key_variable)",
    404: "check the base URL, which usually ends with /v1, and distill.text.served_model",
}


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address of the requests: a base URL that has been checked."""

    url: str
    host: str
    is_secure: bool

    @property
    def is_local(self) -> bool:
        """True if requests stay on this machine."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def address(url: str) -> Address:
    """Return the parts of a base URL. Raises UsageError if it is not one."""
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
        raise UsageError(f"endpoint={url!r}: it is longer than a base URL; {advice}")
    shown = f"[{host}]" if ":" in host else host
    whole = f"{parts.scheme}://{shown}{'' if port is None else f':{port}'}{path}"
    return Address(url=whole, host=host, is_secure=parts.scheme == "https")


def key(variable: str | None) -> str | None:
    """Return the API key in the environment variable `variable`; None if `variable` is None.

    Raises UsageError if the variable is empty or its value can't be a key. The message doesn't show
    the value.
    """
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value:
        raise UsageError(
            f"distill.text.key_variable={variable}: the environment has no such variable, or an "
            f"empty one; set it to the endpoint's key (export {variable}=...)"
        )
    if not value.isascii() or not value.isprintable() or " " in value:
        raise UsageError(
            f"distill.text.key_variable={variable}: its value has characters that no key has, such "
            "as spaces or line ends; set it to the key alone"
        )
    return value


class _TroubleError(Exception):
    """Raised when a request gets no answer. `again` says whether to retry.

    The retry waits `after_s` seconds, or the usual time if None. `is_servers` is False if the
    prompt itself is at fault.
    """

    def __init__(
        self, reason: str, *, again: bool, after_s: float | None = None, is_servers: bool = True
    ) -> None:
        super().__init__(reason)
        self.again, self.after_s, self.is_servers = again, after_s, is_servers


@dataclass(frozen=True)
class _Unserved(Failed):
    """A prompt's failure that is the server's fault, so that all other prompts may fail, too."""


class Endpoint:
    """An OpenAI-compatible server that answers prompts. The API key is never printed."""

    def __init__(self, section: Completions, place: Address, *, seed: int) -> None:
        """Raises UsageError if the model's name, the key or the HTTP library is missing."""
        if section.served_model is None:
            raise UsageError(
                "distill.text.served_model is missing: the name that the endpoint "
                f"{place.url} has for the model (its /models lists them)"
            )
        self._section, self._place, self._seed = section, place, seed
        self._model, self._key = section.served_model, key(section.key_variable)
        self._bytes_max = min(REPLY_BYTES_MAX, _AROUND_BYTES + _TOKEN_BYTES * section.new_tokens)
        self._http = _library()

    @property
    def shows_key(self) -> bool:
        """True if the key is sent unencrypted to another machine."""
        return self._key is not None and not self._place.is_secure and not self._place.is_local

    @property
    def day(self) -> None:
        """None: the server applies the template, with its own clock."""
        return

    @property
    def identity(self) -> list[str]:
        """Texts that identify the source: the URL and the model's name."""
        return [self._place.url, self._model]

    def answers(
        self, prompts: Sequence[Prompt], stopping: threading.Event
    ) -> Generator[tuple[Prompt, Result], None, None]:
        """Yield each prompt with its answer, or the reason why it has none, in order of arrival.

        Once `stopping` is set or the caller leaves, pending requests are cancelled. Raises
        UsageError for a reply that any prompt would get.
        """
        left, in_a_row = iter(prompts), 0
        flying = dict[asyncio.Task[Result], Prompt]()
        loop, client = asyncio.new_event_loop(), self._client()
        try:
            while not stopping.is_set():
                room = self._section.concurrent - len(flying)
                for prompt in islice(left, room if in_a_row < HOPELESS else 0):
                    flying[loop.create_task(self._answer(prompt, client))] = prompt
                if not flying:
                    break
                waiting = asyncio.wait(flying, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
                done, _ = loop.run_until_complete(waiting)
                # An error ends the loop, so the answers that came with it are yielded first.
                for task in sorted(done, key=lambda task: task.exception() is not None):
                    prompt, result = flying.pop(task), task.result()
                    in_a_row = in_a_row + 1 if isinstance(result, _Unserved) else 0
                    yield prompt, result
            for prompt in () if stopping.is_set() else left:
                yield prompt, Failed(f"not sent, since {HOPELESS} prompts in a row had failed")
        finally:
            loop.run_until_complete(_end(client, flying))
            loop.close()

    def _client(self) -> httpx2.AsyncClient:
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # the bytes of a reply are counted as they arrive
            "User-Agent": f"entrenar-py/{entrenar_py.__version__}",
            "Connection": "close",
        }
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        client: httpx2.AsyncClient = self._http.AsyncClient(
            headers=headers,
            timeout=self._http.Timeout(None, connect=CONNECT_S),
            limits=self._http.Limits(),  # `answers` limits the number of requests
            verify=ssl.create_default_context() if self._place.is_secure else True,
            trust_env=False,  # a proxy of the environment would see the key
        )
        return client

    async def _answer(self, prompt: Prompt, client: httpx2.AsyncClient) -> Result:
        """Return the answer to a prompt, or the reason why it has none."""
        tries, next_s = self._section.retries + 1, FIRST_WAIT_S
        for number in range(1, tries + 1):
            try:
                return await self._ask(prompt, client)
            except _TroubleError as trouble:
                if number == tries or not trouble.again:
                    kind = _Unserved if trouble.is_servers else Failed
                    return kind(f"{trouble} (tried {counted(number, 'time')})")
                due_s = next_s if trouble.after_s is None else max(next_s, trouble.after_s)
                await asyncio.sleep(min(due_s, WAIT_S_MAX))
                next_s *= 2
        raise AssertionError("the last try returns")

    async def _ask(self, prompt: Prompt, client: httpx2.AsyncClient) -> Answer:
        path, body = request_of(prompt)
        section = self._section
        body |= {
            "model": self._model,
            "max_tokens": section.new_tokens,
            "temperature": section.temperature,
        }
        if section.temperature:
            body["seed"] = seed_of(prompt, self._seed) % 2**31
        status, after_s, reply = await self._exchange(path, body, client)
        said = f"the endpoint answers {status} ({problem_of(reply)})"
        if status in _REFUSALS or 300 <= status < 400:
            advice = _REFUSALS.get(status, "give the URL that it points to")
            raise UsageError(f"endpoint={self._place.url}: {said}; {advice}")
        if status in _AGAIN or status >= 500:
            raise _TroubleError(said, again=True, after_s=after_s)
        if status != 200:
            raise _TroubleError(said, again=False, is_servers=False)
        try:
            return answer_of(reply)
        except BadReplyError as problem:
            raise _TroubleError(f"the endpoint sends {problem}", again=True) from problem

    async def _exchange(
        self, path: str, body: dict[str, Any], client: httpx2.AsyncClient
    ) -> tuple[int, float | None, bytes]:
        """Send a request; return the reply's status, the seconds until a retry, and the body.

        The seconds are None if the reply doesn't say when to retry.
        """
        content = json.dumps(body, default=str).encode()
        request = client.build_request("POST", f"{self._place.url}/{path}", content=content)
        try:
            async with asyncio.timeout(self._section.timeout_s):
                reply = await client.send(request, stream=True)
                try:
                    data = await _body(reply, self._bytes_max)
                finally:
                    await reply.aclose()
        except TimeoutError as error:
            limit = f"{self._section.timeout_s:g} s (distill.text.timeout_s)"
            raise _TroubleError(f"no complete answer within {limit}", again=True) from error
        except (self._http.HTTPError, OSError) as error:
            raise self._broken(error) from error
        if len(data) > self._bytes_max:
            raise _TroubleError(
                f"the endpoint sends more than {self._bytes_max} bytes, the most that are read for "
                f"{self._section.new_tokens} tokens (distill.text.new_tokens)",
                again=False,
            )
        if self._key is not None:  # some servers echo it
            data = _without(self._key, data)
        after_s = _seconds(reply.headers.get("Retry-After"), reply.headers.get("Date"))
        return reply.status_code, after_s, data

    def _broken(self, error: BaseException) -> Exception:
        """Return the error for a failed connection: for this prompt alone, or for all of them."""
        first = _first_cause(error)
        if isinstance(first, ssl.SSLCertVerificationError):
            return UsageError(
                f"endpoint={self._place.url}: its certificate is not trusted "
                f"({first.verify_message}); use the name that it is for, or let the system trust "
                "its issuer (SSL_CERT_FILE)"
            )
        reason = str(first) or type(first).__name__
        if self._key is not None:  # some servers echo it
            reason = reason.replace(self._key, "***")
        return _TroubleError(f"no connection, or a broken one ({reason})", again=True)


def _library() -> Any:
    try:
        import httpx2
    except ImportError as error:
        raise UsageError(
            f"distill.text.endpoint needs {error.name}; {package_data.extra_advice('finetune')}"
        ) from error
    return httpx2


async def _end(client: httpx2.AsyncClient, tasks: Iterable[asyncio.Task[Result]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()


async def _body(reply: httpx2.Response, bytes_max: int) -> bytes:
    """Return a reply's body, at most one byte more than is allowed."""
    body = bytearray()
    async for part in reply.aiter_raw():
        body += part
        if len(body) > bytes_max:
            break
    return bytes(body[: bytes_max + 1])


def _first_cause(error: BaseException) -> BaseException:
    """Return the error at the start of a chain, since the library's own errors say little."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(cause := error.__cause__ or error.__context__, Exception):
            error = cause
        else:  # also if the cause is a cancellation, by which a time-out ends a request
            return error


def _without(key: str, body: bytes) -> bytes:
    """Return a body in which stars replace the key, however JSON has escaped it."""
    with suppress(ValueError):  # if it is not JSON, only the unescaped key is replaced
        body = json.dumps(json_text.load(body, values_max=VALUES_MAX)).encode()
    for form in {key, json.dumps(key)[1:-1]}:
        body = body.replace(form.encode(), b"***")
    return body


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return the seed of a prompt's answer, which is the same each time the prompt is asked."""
    return (int(prompt.digest, 16) ^ seed) % 2**63


def _seconds(due: str | None, now: str | None) -> float | None:
    """Return the seconds to wait by a Retry-After header, a number or a date; else None.

    A date is compared with `now`, the reply's own Date header, since clocks differ, and jump.
    """
    if due is None:
        return None
    try:
        seconds = float(due)
    except ValueError:
        try:
            then, sent = (email.utils.parsedate_to_datetime(date or "") for date in (due, now))
            seconds = (then - sent).total_seconds()
        except (TypeError, ValueError, OverflowError):  # one may be without a time zone
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
