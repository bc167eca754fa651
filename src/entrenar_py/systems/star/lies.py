"""The `lie` faults of a scenario: false messages that a worker sends instead of correct ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from entrenar_py.shared import trace
from entrenar_py.shared.faults import Fault
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import Computed, Message, TreeNode
from entrenar_py.train.wire_io.injections import Said

_TOO_MUCH = bytes(4)


class Liar:
    """Replaces messages of one worker by the lies that `planned` returns.

    All other messages are unchanged. `told` is called with each lie before it is sent; after that
    `planned` must not return the lie again.
    """

    def __init__(
        self, planned: Callable[[], Iterable[Fault]], told: Callable[[Fault], None]
    ) -> None:
        self._planned, self._told = planned, told
        # the first message of each type and step
        self._said: dict[tuple[type[Message], int], Said] = {}

    def speak(self, message: Message, payload: Buffer) -> list[Said]:
        """Return the messages to send instead of `message` and `payload`."""
        step = getattr(message, "step", None)
        lies = [one for one in self._planned() if (one.step, one.at) == (step, _name(message))]
        if step is None:
            return [(message, payload)]
        self._remember(message, payload, step)
        if not lies:
            return [(message, payload)]
        self._told(lies[0])
        return self._lie(lies[0].value, message, payload, step)

    def _remember(self, message: Message, payload: Buffer, step: int) -> None:
        """Keep the messages of this and the previous step if a lie may send one of them again."""
        if any(one.value == "old_step" for one in self._planned()):
            self._said.setdefault((type(message), step), (message, bytes(payload)))
            self._said = {place: s for place, s in self._said.items() if place[1] >= step - 1}

    def _lie(self, value: str | None, message: Message, payload: Buffer, step: int) -> list[Said]:
        match value, message:
            case "old_step", _:
                # A worker that was absent in the previous step invents its message of that step.
                earlier = replace(message, step=step - 1)  # type: ignore[call-arg]
                return [self._said.get((type(message), step - 1), (earlier, payload))]
            case "too_long", _:
                return [(message, bytes(payload) + _TOO_MUCH)]
            case "not_mine", TreeNode():
                # The sibling: a worker that computed both nodes would send their parent.
                return [(replace(message, index=message.index ^ 1), payload)]
            case "not_mine", Computed():
                return [
                    (replace(message, shards=(*message.shards, message.shards[-1] + 1)), payload)
                ]
            case "twice", _:
                return [(message, payload), (message, payload)]
            case "for_another", _:
                return [(message, _of_another(bytes(payload)))]
        raise AssertionError(f"{value} is no lie at {message}")


def _name(message: Message) -> str:
    return type(message).__name__


def _of_another(payload: bytes) -> bytes:
    """Return the events in `payload` with the next rank instead of the worker's own."""
    events = trace.load_events(payload)
    return trace.dump_events(
        replace(one, rank=one.rank + 1) if isinstance(one, trace.Shard | trace.Update) else one
        for one in events
    )
