"""Messages between supervisor and agents: each comes through exactly, once and in order, whatever breaks between."""

from __future__ import annotations

import asyncio
import json
import random
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from orchestrator.agent import wire
from orchestrator.agent.wire import Channel, decode_action, decode_event, encode
from orchestrator.core import messages
from orchestrator.core.messages import CheckpointId, NodeLost, Note, OpenGeneration, Scalar, Tick
from orchestrator.errors import ProtocolError

MESSAGES: tuple[type, ...] = (*get_args(messages.Event), *get_args(messages.Action))


def decode(frame: Any) -> Any:
    """Whatever it is."""
    try:
        return decode_event(frame)
    except ProtocolError:
        return decode_action(frame)


def test_a_side_takes_only_what_the_other_may_say() -> None:
    """An agent gives no orders, and a supervisor reports nothing."""
    with pytest.raises(ProtocolError, match="unknown message type 'OpenGeneration'"):
        decode_event(encode(OpenGeneration(node="n", own=None)))
    with pytest.raises(ProtocolError, match="unknown message type 'Tick'"):
        decode_action(encode(Tick()))


def value_of(kind: Any, draw: random.Random) -> Any:
    """A random value of a field's type."""
    origin = get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return value_of(draw.choice(get_args(kind)), draw)
    if origin is tuple:
        return tuple(value_of(get_args(kind)[0], draw) for _ in range(draw.randrange(4)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {f"key {number}": value_of(get_args(kind)[1], draw) for number in range(draw.randrange(4))}
    if kind is type(None):
        return None
    if isinstance(kind, type) and issubclass(kind, Enum):
        return draw.choice(list(kind))
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return instance_of(kind, draw)
    values: dict[Any, Any] = {
        str: draw.choice(["", "node-1", 'é 😀 " \\ \n \u2028', "x" * 300]),
        int: draw.choice([0, 1, -1, draw.getrandbits(63)]),
        float: draw.choice([0.0, 1.5, -0.0, 1e-300, float(draw.getrandbits(40))]),
        bool: draw.random() < 0.5,
    }
    return values[kind]


def instance_of(kind: type, draw: random.Random) -> Any:
    """A random message."""
    hints = get_type_hints(kind)
    return kind(**{field.name: value_of(hints[field.name], draw) for field in fields(kind)})


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_comes_back(kind: type, seed: int) -> None:
    draw = random.Random(f"{seed} {kind.__name__}")
    for _ in range(30):
        message = instance_of(kind, draw)
        back = decode(json.loads(json.dumps(encode(message))))
        assert type(back) is kind
        assert back == message
        assert repr(back) == repr(message)  # 1 is not True, and a tuple is no list


def test_names_of_messages_are_unique() -> None:
    assert len({kind.__name__ for kind in MESSAGES}) == len(MESSAGES)


def test_nested_messages_come_back() -> None:
    action = OpenGeneration(node="n", own=None, avoid=(CheckpointId(generation=1, step=2),))
    assert decode(json.loads(json.dumps(encode(action)))) == action


@pytest.mark.parametrize(
    "frame",
    [
        None,
        5,
        "text",
        [],
        {},
        {"type": "Tick"},
        {"body": {}},
        {"type": "Unknown", "body": {}},
        {"type": ["Tick"], "body": {}},
        {"type": None, "body": {}},
        {"type": "CheckpointId", "body": {"generation": 1, "step": 2}},
        {"type": "NodeLost", "body": None},
        {"type": "NodeLost", "body": []},
        {"type": "NodeLost", "body": {}},
        {"type": "NodeLost", "body": {"node": "n"}},
        {"type": "NodeLost", "body": {"node": 5, "reason": "r"}},
        {"type": "NodeLost", "body": {"node": "n", "reason": None}},
        {"type": "Echoed", "body": {"node": "n", "generation": 1, "ballot": 1, "ranks": 5}},
        {"type": "Echoed", "body": {"node": "n", "generation": 1, "ballot": 1, "ranks": ["x"]}},
        {"type": "Echoed", "body": {"node": "n", "generation": 1.5, "ballot": 1, "ranks": []}},
        {"type": "Requested", "body": {"request": "explode", "by": "me"}},
        {"type": "OpenGeneration", "body": {"node": "n", "own": None, "avoid": [{"generation": 1}]}},
    ],
    ids=lambda frame: json.dumps(frame)[:60],
)
def test_what_is_no_message_is_refused(frame: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(frame)


# ----------------------------------------------------------------------------------------------------- channel


def unsent(channel: Channel) -> list[str]:
    """What the channel would send now, without waiting."""
    waiting = channel.outgoing()
    try:
        waiting.send(None)
    except StopIteration as done:
        frames: list[str] = done.value
        return frames
    waiting.close()
    return []


def message(number: int) -> NodeLost:
    return NodeLost(node=str(number), reason="")


def number_of(frame: dict[str, Any]) -> int:
    return int(decode(frame).node)


class Ends:
    """Two channels and a connection that may break at any moment, with frames on their way."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.channels = (Channel(), Channel())
        self.posted = [0, 0]
        self.taken: tuple[list[int], list[int]] = ([], [])
        self.flying: tuple[list[str], list[str]] = ([], [])

    def post(self, end: int) -> None:
        self.posted[end] += 1
        self.channels[end].post(message(self.posted[end]))

    def send(self, end: int) -> None:
        self.flying[end].extend(unsent(self.channels[end]))
        if self.draw.random() < 0.5:
            self.flying[end].append(self.channels[end].acknowledgement())

    def deliver(self, end: int) -> None:
        """Some of what `end` has sent arrives, in order."""
        for _ in range(self.draw.randrange(len(self.flying[end]) + 1)):
            frame = self.channels[1 - end].take(self.flying[end].pop(0))
            if frame is not None:
                self.taken[1 - end].append(number_of(frame))

    def reconnect(self) -> None:
        """All that is on its way is lost; each end tells the other what it has."""
        for end in (0, 1):
            self.flying[end].clear()
        received = [channel.received for channel in self.channels]
        for end in (0, 1):
            self.channels[end].reconnect(received[1 - end])


async def test_every_message_arrives_once_and_in_order_whatever_breaks(seed: int) -> None:
    """Lost frames, lost acknowledgements, repeated frames: the core sees each event once."""
    draw = random.Random(seed)
    for _ in range(40):
        ends = Ends(draw)
        for _ in range(draw.randrange(200)):
            act = draw.choice([ends.post, ends.post, ends.send, ends.deliver, ends.deliver])
            act(draw.randrange(2))
            if draw.random() < 0.05:
                ends.reconnect()
        ends.reconnect()
        for end in (0, 1):
            ends.send(end)
            while ends.flying[end]:
                ends.deliver(end)
        for end in (0, 1):
            assert ends.taken[1 - end] == list(range(1, ends.posted[end] + 1))


async def test_what_was_acknowledged_is_not_kept_or_sent_again() -> None:
    one, other = Channel(), Channel()
    for number in range(5):
        one.post(message(number))
    for frame in unsent(one)[:3]:
        other.take(frame)
    assert one.backlog == 5
    assert one.take(other.acknowledgement()) is None
    assert one.backlog == 2
    one.reconnect(other.received)
    assert [json.loads(frame)["number"] for frame in unsent(one)] == [4, 5]


async def test_a_frame_that_was_seen_is_dropped_and_one_that_is_missing_is_noticed() -> None:
    one, other = Channel(), Channel()
    for number in range(3):
        one.post(message(number))
    frames = unsent(one)
    assert other.take(frames[0]) is not None
    assert other.take(frames[0]) is None
    with pytest.raises(ProtocolError, match="message 3 follows 1"):
        other.take(frames[2])
    assert other.received == 1
    assert other.take(frames[1]) is not None


async def test_a_dismissal_is_a_numbered_message_too() -> None:
    one, other = Channel(), Channel()
    one.post(Tick())
    one.post_dismissal()
    taken = [other.take(frame) for frame in unsent(one)]
    assert [frame["type"] for frame in taken if frame is not None] == ["Tick", "dismiss"]


async def test_waiting_for_something_to_send_ends_with_it() -> None:
    channel = Channel()
    waiting = asyncio.create_task(channel.outgoing())
    await asyncio.sleep(0)
    assert not waiting.done()
    channel.post(Tick())
    assert len(await asyncio.wait_for(waiting, 1)) == 1
    waiting = asyncio.create_task(channel.outgoing())
    await asyncio.sleep(0)
    assert not waiting.done()
    channel.reconnect(0)  # nothing arrived: it is sent again
    assert len(await asyncio.wait_for(waiting, 1)) == 1


async def test_a_peer_that_has_more_than_was_sent_is_another_ones_peer() -> None:
    """An agent that was started anew under its old name: its messages must not count as received already."""
    channel = Channel()
    channel.post(Tick())
    with pytest.raises(ProtocolError, match=r"message 57; 1 were sent"):
        channel.reconnect(57)
    assert len(unsent(channel)) == 1
    with pytest.raises(ProtocolError, match="acknowledges message 2"):
        channel.take('{"ack": 2}')


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "5",
        '"ack"',
        '["ack"]',
        '["number"]',
        "{}",
        '{"number": null}',
        '{"number": "1"}',
        '{"number": 1.0}',
        '{"number": true}',
        '{"number": NaN}',
        '{"number": Infinity}',
        '{"ack": "1"}',
        '{"ack": null}',
        '{"ack": Infinity}',
        '{"ack": -1}',
        '{"number": 2}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:30],
)
async def test_what_is_no_frame_is_refused_and_changes_nothing(text: str) -> None:
    channel = Channel()
    channel.post(Tick())
    with pytest.raises(ProtocolError):
        channel.take(text)
    assert channel.received == 0
    assert len(unsent(channel)) == 1


async def test_a_peer_that_never_answers_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "UNACKNOWLEDGED_MAX", 10)
    channel = Channel()
    for _ in range(10):
        channel.post(Tick())
    with pytest.raises(ProtocolError, match="10 messages wait"):
        channel.post(Tick())


async def test_facts_keep_their_types() -> None:
    facts: dict[str, Scalar] = {"text": "1", "whole": 1, "number": 1.0, "yes": True, "nothing": None}
    one, other = Channel(), Channel()
    one.post(Note(kind="k", reason="r", facts=facts))
    (frame,) = unsent(one)
    taken = other.take(frame)
    back = decode(taken)
    assert {name: (type(value), value) for name, value in back.facts.items()} == {
        name: (type(value), value) for name, value in facts.items()
    }
