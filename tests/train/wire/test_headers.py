"""Messages as JSON headers: every one is read back, and nothing else is accepted."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import frames
from entrenar_py.train.wire.messages import (
    LIST_MAX,
    MESSAGES,
    TEXT_CHARS_MAX,
    Message,
    NonFinite,
)
from tests.train.wire.speech import INT_MAX, said

KINDS = pytest.mark.parametrize("kind", MESSAGES.values(), ids=lambda kind: kind.__name__)
OF_EACH_KIND = settings(max_examples=40)  # messages; there are some twenty kinds
HELLO: dict[str, object] = {
    "backend": "cpu",
    "data": "d",
    "manifest": "m",
    "nonce": "0" * 32,
    "proof": "a" * 64,
    "port": None,
    "rank": None,
    "run": "r",
    "version": 1,
}
NODE: dict[str, object] = {
    "block": 0,
    "index": 0,
    "level": 0,
    "loss": 1.0,
    "round": 0,
    "step": 0,
    "weight": 1.0,
}
WELCOME: dict[str, object] = {
    "blocks": 1,
    "proof": "0" * 64,
    "rank": 0,
    "resumed": False,
    "step": 0,
}


def header(record: object) -> bytes:
    """Return `record` in canonical form."""
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def refusal(tag: int, sent: bytes) -> str | None:
    """Return why `sent` is refused, or None; then `dump` must write the same bytes."""
    try:
        assert frames.dump_header(frames.parse_header(tag, sent)) == sent
    except ProtocolError as error:
        return str(error)
    return None


@KINDS
@OF_EACH_KIND
@given(data=st.data())
def test_what_is_written_is_read_back(kind: type[Message], data: st.DataObject) -> None:
    """Every field keeps its bits: -0.0, NaN, infinities, largest numbers, any script."""
    message = data.draw(said(kind))
    assert repr(frames.parse_header(kind.tag, frames.dump_header(message))) == repr(message)


@KINDS
@OF_EACH_KIND
@given(data=st.data())
def test_two_messages_never_look_alike(kind: type[Message], data: st.DataObject) -> None:
    """Headers are equal exactly if the messages are."""
    one, other = data.draw(said(kind)), data.draw(said(kind))
    assert (frames.dump_header(one) == frames.dump_header(other)) == (repr(one) == repr(other))


@KINDS
@OF_EACH_KIND
@given(junk=st.binary(max_size=60))
def test_junk_is_refused(kind: type[Message], junk: bytes) -> None:
    """Any bytes are either canonical, or raise a ProtocolError that names the message."""
    complaint = refusal(kind.tag, junk)
    assert complaint is None or complaint.startswith(kind.__name__)


@KINDS
@OF_EACH_KIND
@given(
    data=st.data(),
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=5,
    ),
)
def test_any_value_in_any_field(kind: type[Message], data: st.DataObject, value: object) -> None:
    """A field's value is read exactly, or refused with the field's name."""
    record = json.loads(frames.dump_header(data.draw(said(kind, short=True))))
    name = data.draw(st.sampled_from(sorted(record) or ["odd"]))
    changed = header(record | {name: value})
    complaint = refusal(kind.tag, changed)
    named = f"{kind.__name__} {name}=", f"{kind.__name__} key={name!r}: allowed"
    assert complaint is None or complaint.startswith(named) or "canonical" in complaint


@pytest.mark.parametrize(
    ("tag", "changes", "complaint"),
    [
        (2, {"version": True}, "Hello version=True: use a whole number"),
        (2, {"version": 1.0}, r"Hello version=1.0: use a whole number"),
        (2, {"version": -1}, "Hello version=-1: use a whole number"),
        (2, {"version": 2**63}, "Hello version=9223372036854775808: use a whole number"),
        (2, {"version": None}, "Hello version=None: use a whole number"),
        (2, {"rank": False}, "Hello rank=False: use a whole number"),
        (2, {"rank": "0"}, "Hello rank='0': use a whole number"),
        (2, {"run": 1}, "Hello run=1: use text of at most 1000 characters"),
        (2, {"run": "x" * (TEXT_CHARS_MAX + 1)}, r"Hello run='x+\.\.\.x+': use text of at most"),
        (2, {"backend": "\ud800"}, r"Hello backend='\\ud800': use valid Unicode"),
        (2, {"nonce": "0" * 31}, "Hello nonce='0.*0': use 32 lower-case hex digits"),
        (2, {"nonce": "0" * 32 + "\n"}, "Hello nonce=.*: use 32 lower-case hex digits"),
        (2, {"nonce": "٣" * 32}, "Hello nonce=.*: use 32 lower-case hex digits"),
        (2, {"proof": "A" * 64}, "Hello proof='A.*': use 64 lower-case hex digits"),
        (2, {"proof": None}, "Hello proof=None: use 64 lower-case hex digits"),
        (2, {"more": 1}, "Hello key='more': allowed are version, run, "),
        (12, {"loss": 1}, "TreeNode loss=1: use a number with a decimal point"),
        (12, {"loss": True}, "TreeNode loss=True: use a number"),
        (12, {"loss": "NaN"}, "TreeNode loss='NaN': use a number"),
        (12, {"loss": "infinity"}, "TreeNode loss='infinity': use a number"),
        (12, {"loss": None}, "TreeNode loss=None: use a number"),
        (12, {"step": [[[]]]}, r"TreeNode step=\[\[\[\]\]\]: use a whole number"),
        (10, {"step": 0, "shards": "0"}, "Assign shards='0': use a list of at most"),
        (10, {"step": 0, "shards": [True]}, r"Assign shards=\[True\]: use a whole number"),
        (10, {"step": 0, "shards": [-1]}, r"Assign shards=\[-1\]: use a whole number"),
        (10, {"step": 0, "shards": [0] * (LIST_MAX + 1)}, "Assign shards=.*: use a list of at"),
        (3, {"resumed": 0}, "Welcome resumed=0: use true"),
        (3, {"blocks": -1}, "Welcome blocks=-1: use a whole number"),
        (12, {"block": 0.0}, "TreeNode block=0.0: use a whole number"),
        (23, {"problem": 5}, "Shutdown problem=5: use text"),
        (16, {}, "Commit without step"),
    ],
)
def test_a_wrong_field_is_named(tag: int, changes: dict[str, object], complaint: str) -> None:
    """The error has message, field, the value, shortened, and the allowed ones."""
    usual: dict[str, object] = {2: HELLO, 3: WELCOME, 12: NODE}.get(tag, {})
    with pytest.raises(ProtocolError, match=f"^{complaint}") as caught:
        frames.parse_header(tag, header({**usual, **changes}))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (b"", "its header can't be read"),
        (b"\xff", "its header can't be read"),
        (b"{", "its header can't be read"),
        (b'{"step":1', "its header can't be read"),
        (b'{"step":1}x', "its header can't be read"),
        (b'{"step":1,"step":1}', "its header can't be read ('step' appears 2 times)"),
        (b'{"step":' + b"[" * 65 + b"]" * 65 + b"}", "its header can't be read (nested more"),
        (b'{"step":' + b"[" * 10**6 + b"]" * 10**6 + b"}", "1000000 times '[' in its header: "),
        (b'{"step":[' + b"0," * 10**6 + b"0]}", "1000000 times ',' in its header: 67536 are poss"),
        (b"[" + b"{}," * 3000 + b"{}]", "3001 times '{' in its header: 2001 are possible"),
        (b'{"step":1' + b',"x":1' * 3000 + b"}", "3001 times ':' in its header: 2002 are possible"),
        (b'{"step":' + b"9" * 10**6 + b"}", "its header can't be read"),
        (b'{"step":' + b"[" * 60 + b"]" * 60 + b"}", "use a whole number"),
        (b'{"step":' + b"9" * 4_000 + b"}", "use a whole number"),
        (b"[]", "Commit []: use a mapping of step"),
        (b"null", "Commit None: use a mapping of step"),
        (b'{"step": 1}', "not in canonical form"),
        (b'{"step":1}\n', "not in canonical form"),
        (b'{"step":01}', "its header can't be read"),
        (b'{"\\u0073tep":1}', "not in canonical form"),
        ('{"step":1}'.encode("utf-16"), "its header can't be read"),
        (b'{"' + b"x" * 10**6 + b'":1}', "Commit key='xxx"),
        (b'{"step":1,"' + b"x" * 10**6 + b'":1}', "xxx': allowed are step"),
    ],
    ids=range(23),
)
def test_another_form_is_refused(sent: bytes, complaint: str) -> None:
    """Invalid, deep, long or doubled JSON is refused, and any spelling but `dump`'s."""
    with pytest.raises(ProtocolError) as caught:
        frames.parse_header(16, sent)
    assert str(caught.value).startswith("Commit")
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("spelled", [b"NaN", b"-Infinity", b"1e999", b"1.50", b"1.5e0", b"-0"])
def test_numbers_have_one_spelling(spelled: bytes) -> None:
    """Literals that Python accepts beyond JSON, and longer spellings, are refused."""
    assert refusal(12, header(NODE)) is None
    sent = header(NODE).replace(b'"loss":1.0', b'"loss":' + spelled)
    with pytest.raises(ProtocolError, match="TreeNode"):
        frames.parse_header(12, sent)


@pytest.mark.parametrize("tag", [0, 19, 26, 255])
def test_an_unknown_tag_is_refused(tag: int) -> None:
    """The error names the tag."""
    with pytest.raises(ProtocolError, match=f"tag={tag}: no message has it"):
        frames.parse_header(tag, b"{}")


def test_the_longest_of_everything_fits_a_frame() -> None:
    """The longest header that `parse` allows is within the limit of `frames`."""
    longest = NonFinite(
        step=INT_MAX,
        shard=INT_MAX,
        tensor="\U0001f600" * TEXT_CHARS_MAX,
        element=INT_MAX,
        loss=-math.pi * 1e-300,
        ids=(INT_MAX,) * LIST_MAX,
    )
    sent = frames.dump_header(longest)
    assert len(sent) <= frames.HEADER_BYTES_MAX
    assert frames.parse_header(longest.tag, sent) == longest
