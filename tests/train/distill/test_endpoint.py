"""`entrenar distill text` with a server: what it answers, and what is made of it."""

from __future__ import annotations

import errno
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.train.distill import endpoint
from entrenar_py.train.service import exit_codes
from tests.train.distill import server as servers
from tests.train.distill.configured import chats, config, said, write_rows, written
from tests.train.distill.server import Reply, chat, completion, serving
from tests.train.wire_io.certificates import Authority

ALL: dict[str, Any] = {"synthetic_share": 1.0}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.01)


def ask(path: Path, *more: str) -> int:
    """Return the exit code of the command."""
    return cli.main(["distill", "text", str(path), *more])


def test_whole_answers_become_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each distinct prompt is asked once; rows have its conversation, the answer, and originals."""
    rows: list[dict[str, Any]] = [
        *chats(["one", "two", "one"]),
        {"messages": [*chats(["three"])[0]["messages"], {"role": "user", "content": "four"}]},
        {"instruction": "five", "system": "be brief"},
    ]
    with serving(lambda prompt, _: chat(f"on {prompt}")) as server:
        path = config(tmp_path, rows, endpoint=f"{server.url}/", concurrent=2)
        assert ask(path) == exit_codes.DONE
    assert sorted(server.prompts) == ["five", "four", "one", "two"]
    assert server.most_at_once <= 2
    found = written(tmp_path)
    assert said(tmp_path)[:4] == ["on one", "on two", "on four", "on five"]
    assert found[2]["messages"][1]["weight"] == 0, "not this teacher's answer"
    assert found[3]["messages"][0] == {"role": "system", "content": "be brief"}
    assert len(found) == 6, "two original rows, of which there are no more"
    sent = next(body for _, _, body in server.asked if len(body["messages"]) == 3)
    assert (sent["model"], sent["max_tokens"], sent["temperature"]) == ("big", 512, 0.0)
    assert {tuple(one) for one in sent["messages"]} == {("role", "content")}
    assert {place for place, _, _ in server.asked} == {"/v1/chat/completions"}
    told = capsys.readouterr().out
    assert "4 prompts in" in told
    assert "(1 more ask the same)" in told
    assert "6 rows, 4 synthetic, 2 original" in told
    assert "data.train has 2 rows too few" in told


def test_a_text_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `task: text` the row is the prompt and what follows; equal rows are written once."""
    answers = {"a": "bc", "ab": "c", "x": " y"}
    rows = [{"text": text} for text in answers]
    with serving(lambda prompt, _: completion(answers[prompt])) as server:
        path = config(tmp_path, rows, task="text", endpoint=server.url, **ALL)
        assert ask(path) == exit_codes.DONE
    assert {place for place, _, _ in server.asked} == {"/v1/completions"}
    assert written(tmp_path) == [{"text": "abc"}, {"text": "x y"}]
    shown = capsys.readouterr()
    assert "1 duplicate," in shown.out
    assert "can lose what is rare in real ones" in shown.err


def test_what_may_pass_is_asked_again(tmp_path: Path) -> None:
    """500, half a line, no JSON, no choices, 429 and a broken connection are tried again."""
    bad = {
        "500": Reply(body={"error": {"message": "busy"}}, status=500),
        "half": Reply(body=chat("whole").body, is_cut=True),
        "no JSON": Reply(body=b"<html>"),
        "no choices": Reply(body={"choices": []}),
        "429": Reply(body={}, status=429, headers={"Retry-After": "0"}),
        "half a character": chat("\ud800"),
        "nothing": Reply(body=b""),
    }
    with serving(lambda prompt, before: chat("right") if before else bad[prompt]) as server:
        assert ask(config(tmp_path, chats([*bad]), endpoint=server.url, **ALL)) == exit_codes.DONE
    assert sorted(server.prompts) == sorted([*bad] * 2)
    assert said(tmp_path) == ["right"] * len(bad)


def test_a_server_says_when_to_come_again(tmp_path: Path) -> None:
    """A request waits as long as Retry-After says."""
    late = Reply(body={}, status=429, headers={"Retry-After": "0.5"})
    began = time.monotonic()
    with serving(lambda _, before: chat("right") if before else late) as server:
        assert ask(config(tmp_path, chats(["a"]), endpoint=server.url, **ALL)) == exit_codes.DONE
    assert time.monotonic() - began >= 0.5


def test_a_date_to_come_again_is_compared_with_the_servers_clock() -> None:
    """This machine's may be wrong, or jump. An answer without a date says nothing."""
    due, sent = "Fri, 31 Dec 1999 23:59:59 GMT", "Fri, 31 Dec 1999 23:59:49 GMT"
    assert endpoint._seconds(due, sent) == 10
    assert endpoint._seconds(sent, due) == 0
    assert [endpoint._seconds(due, one) for one in (None, "now", due[:-4])] == [None] * 3
    said = [endpoint._seconds(one, sent) for one in (None, "soon", "nan", "-1", "3")]
    assert said == [None] * 3 + [0, 3]


def test_retries_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt that always fails is listed, the others are written; a second start asks it."""
    is_mended = threading.Event()

    def script(prompt: str, _: int) -> Reply:
        if prompt == "bad" and not is_mended.is_set():
            return Reply(body={"error": {"message": "out of memory"}}, status=503)
        return chat(f"on {prompt}")

    with serving(script) as server:
        path = config(tmp_path, chats(["good", "bad"]), endpoint=server.url, retries=2, **ALL)
        assert ask(path) == exit_codes.WRONG
        assert server.prompts.count("bad") == 3
        shown = capsys.readouterr().out
        assert f"{tmp_path / 'prompts.jsonl'}:2: the endpoint answers 503 (out of memory)" in shown
        assert "(tried 3 times)" in shown
        assert said(tmp_path) == ["on good"]
        is_mended.set()
        assert ask(path) == exit_codes.DONE
    assert server.prompts.count("good") == 1
    assert said(tmp_path) == ["on good", "on bad"]


def test_a_bad_request_fails_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A 400 is not tried again, and is the matter of its prompt alone."""
    no = Reply(body={"error": "too long"}, status=400)
    with serving(lambda prompt, _: no if prompt == "long" else chat("yes")) as server:
        path = config(tmp_path, chats(["long", "short"]), endpoint=server.url, **ALL)
        assert ask(path) == exit_codes.WRONG
    assert server.prompts.count("long") == 1
    assert "answers 400 (too long) (tried 1 time)" in capsys.readouterr().out


def test_a_dead_server_is_not_asked_for_ever(tmp_path: Path) -> None:
    """After some failures in a row the other prompts are not asked, and the command says so."""
    down = Reply(body={}, status=500)
    texts = [str(n) for n in range(60)]
    with serving(lambda *_: down) as server:
        path = config(tmp_path, chats(texts), endpoint=server.url, retries=0, **ALL)
        assert ask(path) == exit_codes.WRONG
    assert endpoint.HOPELESS <= len(server.asked) < endpoint.HOPELESS + 4
    assert not (tmp_path / "answers.jsonl").exists()


@pytest.mark.parametrize("status", [401, 403, 404, 301])
def test_a_refusal_ends_the_command(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first such answer ends it, with one message that does not have the key."""
    monkeypatch.setenv("THE_KEY", servers.KEY)
    no = Reply(body={"error": {"message": f"{'x' * 150} not {servers.KEY}"}}, status=status)
    with serving(lambda *_: no) as server:
        path = config(
            tmp_path, chats(["a", "b"]), endpoint=server.url, key_variable="THE_KEY", concurrent=1
        )
        assert ask(path) == exit_codes.INVALID
    assert len(server.asked) == 1
    assert server.asked[0][1]["Authorization"] == f"Bearer {servers.KEY}"
    shown = capsys.readouterr()
    assert f"the endpoint answers {status}" in shown.err
    assert shown.err.count("\n") == 1
    assert "sk-" not in shown.out + shown.err
    assert "sk-" not in (tmp_path / "answers.jsonl.journal").read_text(encoding="utf-8")


def test_truncation_and_refusals_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are neither written nor asked again."""
    answers = {
        "long": chat("and so", reason="length"),
        "no": chat(None, refusal="I can't"),
        "filtered": chat("x", reason="content_filter"),
        "empty": chat(" "),
        "good": chat("yes"),
    }
    with serving(lambda prompt, _: answers[prompt]) as server:
        path = config(tmp_path, chats([*answers]), endpoint=server.url, **ALL)
        for _ in range(2):
            assert ask(path) == exit_codes.DONE
            shown = capsys.readouterr().out
            assert "not written: 1 truncated, 3 refused or empty, 0 duplicates, 0 failed" in shown
            assert "distill.text.new_tokens=512" in shown
    assert len(server.asked) == len(answers)
    assert said(tmp_path) == ["yes"]


@pytest.mark.parametrize("reason", ["abort", "error", None, 7])
def test_an_answer_that_was_broken_off_is_not_learned(
    tmp_path: Path, reason: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers that give up say so in words of their own."""
    with serving(lambda *_: chat("and then", reason=reason)) as server:
        path = config(tmp_path, chats(["a"]), endpoint=server.url, retries=1, **ALL)
        assert ask(path) == exit_codes.WRONG
    assert len(server.asked) == 2
    told = "does not say how it ended" if reason is None else f"ended by {reason!r}"
    assert f"an answer that {told} (finish_reason)" in capsys.readouterr().out
    assert not (tmp_path / "answers.jsonl").exists()


def test_endings_in_other_words(tmp_path: Path) -> None:
    answers = {"a": chat("x", reason="max_tokens"), "b": chat("y", reason="EOS")}
    with serving(lambda prompt, _: answers[prompt]) as server:
        assert ask(config(tmp_path, chats([*answers]), endpoint=server.url, **ALL)) == 0
    assert said(tmp_path) == ["y"]


@pytest.mark.parametrize("status", [200, 400, 503])
@pytest.mark.parametrize("form", [r"sk-secret\u002dof-the-tests", "sk-secret-of-the-tests"])
def test_a_key_that_comes_back_is_hidden(
    tmp_path: Path,
    status: int,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """However JSON has written it, in what is said and in what is written."""
    monkeypatch.setenv("KEY", servers.KEY)
    body = f'{{"error": {{"message": "{"x" * 190} {form}"}}}}'
    if status == 200:
        said_so = f'{{"content": "the key {form}"}}'
        body = f'{{"choices": [{{"message": {said_so}, "finish_reason": "stop"}}]}}'
    with serving(lambda *_: Reply(body=body.encode(), status=status)) as server:
        given: dict[str, Any] = {"endpoint": server.url, "key_variable": "KEY", "retries": 0}
        ask(config(tmp_path, chats(["a"]), **given, **ALL))
    shown = capsys.readouterr()
    written_too = "".join(path.read_text("utf-8") for path in tmp_path.glob("answers*"))
    for text in (shown.out, shown.err, written_too):
        assert "sk-secret" not in text


def test_a_reply_is_as_long_as_its_tokens_allow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One with more bytes, or more values, fails alone: 15 MB of lists took 1.2 GB."""
    lists = b'{"choices": [' + b"[]," * 10**5 + b"[]]}"
    answers = {
        "long": chat("x " * 2**20),
        "lists": Reply(body=lists),
        "lists of an error": Reply(body=lists, status=400),
        "whole": chat("yes, " * 2**17),  # commas within an answer are no values
    }
    with serving(lambda prompt, _: answers[prompt]) as server:
        path = config(tmp_path, chats([*answers]), endpoint=server.url, retries=0, **ALL)
        assert ask(path) == exit_codes.WRONG
    shown = capsys.readouterr().out
    assert "more than 1572864 bytes, the most that are read for 512 tokens" in shown
    assert "it seems to have 200003 values; at most 65536 are read" in shown
    assert said(tmp_path) == ["yes, " * 2**17]


def test_a_size_that_is_none_is_a_broken_connection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chunk of -5 bytes."""
    with servers.sending(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nab") as url:
        path = config(tmp_path, chats(["a"]), endpoint=url, retries=0, timeout_s=5, **ALL)
        assert ask(path) == exit_codes.WRONG
    shown = capsys.readouterr()
    assert "1 failed" in shown.out
    assert "Traceback" not in shown.err


def test_calls_of_functions_are_kept(tmp_path: Path) -> None:
    """An answer that calls a function is a row with the call; a damaged call is a failure."""
    function = {"name": "look", "arguments": '{"at": 1}'}
    call = [{"id": "c1", "type": "function", "function": function}]
    tools = [{"name": "look", "parameters": {}}]
    before: dict[str, Any] = {"role": "assistant", "tool_calls": [{"function": function}]}
    told = {"role": "tool", "content": "2", "tool_call_id": "c0"}
    messages = [{"role": "user", "content": "see"}, before, told]
    with serving(lambda *_: chat(None, reason="tool_calls", tool_calls=call)) as server:
        rows = [{"messages": messages, "tools": tools}]
        assert ask(config(tmp_path, rows, endpoint=server.url, **ALL)) == exit_codes.DONE
        sent = server.asked[0][2]
        assert sent["messages"][1]["tool_calls"][0]["function"] == {
            "name": "look",
            "arguments": '{"at": 1}',
        }
        assert sent["tools"][0]["type"] == "function"
        (row,) = written(tmp_path)
        assert row["messages"][-1]["tool_calls"] == call
        assert row["tools"] == sent["tools"]
    call[0]["function"] = {"name": "look", "arguments": "{"}
    with serving(lambda *_: chat(None, tool_calls=call)) as server:
        path = config(tmp_path, rows, endpoint=server.url, **ALL)
        assert ask(path) == exit_codes.WRONG


def test_a_server_that_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A request ends after `timeout_s`, also where a server sends a bit now and then."""
    over = threading.Event()

    def script(prompt: str, before: int) -> Reply:
        if prompt == "drips":
            return Reply(body={}, drips=True) if not before else chat("late")
        if not before:
            over.wait(30)
        return chat("late")

    with serving(script) as server:
        path = config(tmp_path, chats(["slow", "drips"]), endpoint=server.url, timeout_s=0.3, **ALL)
        began = time.monotonic()
        assert ask(path) == exit_codes.DONE
        assert time.monotonic() - began < 10
        path = config(tmp_path, chats(["slow"]), endpoint=server.url, timeout_s=0.3, retries=0)
        for name in ("answers.jsonl.journal", "answers.jsonl"):
            (tmp_path / name).unlink()
        server.asked.clear()
        assert ask(path) == exit_codes.WRONG
        assert "no complete answer within 0.3 s" in capsys.readouterr().out
        over.set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_gives_up_what_is_asked(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The requests in flight are given up at once, and what has come is kept."""
    over, told_s = threading.Event(), list[float]()

    def script(prompt: str, _: int) -> Reply:
        if prompt == "slow":
            told_s.append(time.monotonic())
            signal.raise_signal(number)
            over.wait(30)
        return chat(f"on {prompt}")

    with serving(script) as server:
        path = config(
            tmp_path, chats(["fast", "slow", "never"]), endpoint=server.url, concurrent=1, **ALL
        )
        threads = threading.active_count()
        assert ask(path) == exit_codes.STOPPED
        assert time.monotonic() - told_s[0] < 10
        over.set()
        assert "start it again to send the 2 prompts" in capsys.readouterr().out
        assert server.prompts == ["fast", "slow"]
        assert threading.active_count() <= threads + 1, "but for the server's"
    assert not (tmp_path / "answers.jsonl").exists()
    with serving(lambda prompt, _: chat(f"on {prompt}")) as other:
        # The journal belongs to the other address; asked there, it is asked anew.
        assert ask(path, "--endpoint", other.url) == exit_codes.DONE
    assert "has 1 answer from different settings" in capsys.readouterr().out


def test_other_settings_are_asked_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sampling settings and the model each have their own answers; how they are asked has none."""
    with serving(lambda prompt, before: chat(f"{prompt} {before}")) as server:
        changes: list[dict[str, Any]] = [
            {},
            {"temperature": 0.5},
            {"new_tokens": 9},
            {"served_model": "other"},
            {"concurrent": 1, "retries": 0, "timeout_s": 9.0, "synthetic_share": 0.7},
        ]
        for change in changes:
            assert ask(config(tmp_path, chats(["a"]), endpoint=server.url, **change)) == 0
    assert [body.get("seed") is not None for _, _, body in server.asked] == [0, 1, 0, 0]
    assert "has 2 answers from different settings" in capsys.readouterr().out
    assert said(tmp_path)[0] == "a 0"


def test_a_torn_line_is_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A last line without its end, and one that is none, count as not asked."""
    with serving(lambda prompt, before: chat(f"{prompt} {before}")) as server:
        path = config(tmp_path, chats(["a", "b", "c"]), endpoint=server.url, concurrent=1, **ALL)
        assert ask(path) == exit_codes.DONE
        kept = tmp_path / "answers.jsonl.journal"
        lines = kept.read_bytes().splitlines(keepends=True)
        kept.write_bytes(lines[0] + b"{}\n" + lines[2][:-9])
        assert ask(path) == exit_codes.DONE
        assert server.prompts == ["a", "b", "c", "b", "c"]
        assert "1 damaged line" in capsys.readouterr().out
        assert len(kept.read_bytes().splitlines()) == 4
    assert said(tmp_path) == ["a 0", "b 1", "c 1"]


def test_two_commands_do_not_share_a_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second command on the same rows is refused while the first one runs."""
    codes = list[int]()

    def script(*_: Any) -> Reply:
        codes.append(ask(path))
        return chat("x")

    with serving(script) as server:
        path = config(tmp_path, chats(["a"]), endpoint=server.url)
        assert ask(path) == exit_codes.DONE
    assert codes == [exit_codes.INVALID]
    assert "another process is writing answers" in capsys.readouterr().err


def test_shares_and_parquet(tmp_path: Path) -> None:
    """The share of synthetic rows is kept; rows of other kinds are read; the draw is the seed's."""
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    with serving(lambda prompt, _: chat(f"on {prompt}")) as server:
        path = config(
            tmp_path,
            [],
            data={"train": "all.jsonl"},
            prompts="prompts.parquet",
            endpoint=server.url,
            synthetic_share=0.25,
        )
        table = arrow.Table.from_pylist([{"question": "q1"}, {"question": "q2"}])
        parquet.write_table(table, tmp_path / "prompts.parquet")
        write_rows(tmp_path / "all.jsonl", chats([f"old {n}" for n in range(40)]))
        assert ask(path) == exit_codes.DONE
        first = said(tmp_path)
        assert ask(path) == exit_codes.DONE
    assert said(tmp_path) == first
    assert first[:2] == ["on q1", "on q2"]
    assert len(first) == 8
    assert len({*first}) == 8
    assert json.dumps(first[2:]) != json.dumps([f"a person on old {n}" for n in range(6)])


def test_tls_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A certificate of an issuer that the system does not trust ends the command; else it works."""
    authority = Authority(tmp_path, "authority")
    own = authority.signed("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.cert, own.key)
    over = threading.Event()

    def script(_: str, before: int) -> Reply:
        if not before:
            over.wait(30)
        return chat("safe")

    with serving(script, context) as server:
        path = config(tmp_path, chats(["a"]), endpoint=server.url, timeout_s=0.5, **ALL)
        assert ask(path) == exit_codes.INVALID
        assert "its certificate is not trusted" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        assert ask(path) == exit_codes.DONE
        over.set()
    assert said(tmp_path) == ["safe"]


def test_killed_at_any_moment_it_goes_on(tmp_path: Path) -> None:
    """After kill -9 only prompts without an answer are asked; twice only those then in flight."""
    texts, in_flight = [str(n) for n in range(12)], 2
    process: list[subprocess.Popen[bytes]] = []
    over = threading.Event()

    def script(prompt: str, _: int) -> Reply:
        if len(server.asked) >= 8 and not over.is_set():
            process[0].kill()
            over.wait(30)
        return chat(f"on {prompt}")

    with serving(script) as server:
        path = config(tmp_path, chats(texts), endpoint=server.url, concurrent=in_flight, **ALL)
        command = "import sys; from entrenar_py.entrenar import main; sys.exit(main())"
        process.append(
            subprocess.Popen(
                [sys.executable, "-c", command, "distill", "text", str(path)],
                stdout=subprocess.DEVNULL,
            )
        )
        assert process[0].wait(60) == -signal.SIGKILL
        over.set()
        first = [*server.prompts]
        known = len((tmp_path / "answers.jsonl.journal").read_bytes().splitlines())
        assert not (tmp_path / "answers.jsonl").exists()
        assert known >= len(first) - in_flight > 0
        assert ask(path) == exit_codes.DONE
        second = server.prompts[len(first) :]
    assert len(second) == len(texts) - known
    assert {*first, *second} == {*texts}
    assert len(first) + len(second) - len(texts) <= in_flight
    assert said(tmp_path) == [f"on {text}" for text in texts]


def test_a_higher_limit_asks_truncated_prompts_alone(tmp_path: Path) -> None:
    """A whole answer is the same with more tokens allowed, and a truncated one with fewer."""

    def script(prompt: str, before: int) -> Reply:
        return chat(prompt, reason="length" if prompt == "long" and not before else "stop")

    with serving(script) as server:
        asked = list[int]()
        for limit in (100, 200, 200, 50, 100):
            before = len(server.asked)
            path = config(tmp_path, chats(["long", "short"]), endpoint=server.url, new_tokens=limit)
            assert ask(path) == exit_codes.DONE
            asked.append(len(server.asked) - before)
    assert asked == [2, 1, 0, 1, 0], "at 50 the whole answer may be too long, the other one is"


def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer that can't be kept ends the command, and what it asks."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def script(*_: Any) -> Reply:
        monkeypatch.setattr(os, "write", full)
        return chat("x")

    with serving(script) as server:
        path = config(tmp_path, chats([str(n) for n in range(9)]), endpoint=server.url)
        assert ask(path) == exit_codes.FAILED
        monkeypatch.undo()
        assert len(server.asked) < 9
    assert "can't be written (No space left on device); make room" in capsys.readouterr().err
