"""Every kind of message has a tag of its own; texts are shortened to fit a message."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.wire import frames, messages
from entrenar_py.train.wire.messages import MESSAGES, TEXT_CHARS_MAX, Message


def test_every_message_is_in_the_table_under_its_own_tag() -> None:
    """No tag is used twice, and no kind is missing."""
    here = [one for one in vars(messages).values() if isinstance(one, type)]
    kinds = {one for one in here if issubclass(one, Message) and one is not Message}
    assert set(MESSAGES.values()) == kinds
    assert all(kind.tag == tag and 0 <= tag < 256 for tag, kind in MESSAGES.items())


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=3_000))
def test_a_brief_text_fits(text: str) -> None:
    """A long text keeps its ends; one that fits is unchanged."""
    brief = messages.brief(text)
    assert len(brief) <= TEXT_CHARS_MAX
    assert brief == text or (text.startswith(brief[:300]) and text.endswith(brief[-300:]))
    frames.parse_header(21, frames.dump_header(messages.Leave(reason=brief)))
