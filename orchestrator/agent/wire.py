"""Events and actions as JSON frames, and a channel that survives reconnects.

Each side numbers its messages and keeps them until the other side has acknowledged them; after a reconnect the
unacknowledged ones are sent again and the receiver drops those that it has seen. So the core sees every event of
an agent once and in order for as long as both processes live.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from orchestrator.core import messages
from orchestrator.errors import ProtocolError

FRAME_BYTES_MAX = 16 << 20
UNACKNOWLEDGED_MAX = 100_000
_EVENTS: dict[str, type] = {kind.__name__: kind for kind in get_args(messages.Event)}
_ACTIONS: dict[str, type] = {kind.__name__: kind for kind in get_args(messages.Action)}
_TYPES = {**_EVENTS, **_ACTIONS}


@lru_cache(maxsize=len(_TYPES))
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_TYPES[name])


def encode(message: Any) -> dict[str, Any]:
    """A message as a JSON object with its type's name."""
    return {"type": type(message).__name__, "body": asdict(message)}


def decode_event(frame: Any) -> messages.Event:
    """What an agent says to its supervisor. Raises ProtocolError for anything else, an action included."""
    event: messages.Event = _decode(frame, _EVENTS)
    return event


def decode_action(frame: Any) -> messages.Action:
    """What a supervisor says to an agent. Raises ProtocolError for anything else, an event included."""
    action: messages.Action = _decode(frame, _ACTIONS)
    return action


def _decode(frame: Any, types: Mapping[str, type]) -> Any:
    try:
        name = frame["type"]
        if name not in types:
            raise ProtocolError(f"unknown message type {name!r}")
        return _adapter(name).validate_python(frame["body"])
    except (KeyError, TypeError, ValidationError) as error:
        raise ProtocolError(f"not a message: {error}") from error


class Channel:
    """One end of a numbered, acknowledged stream of messages."""

    def __init__(self) -> None:
        self._next = 1
        self._unacknowledged: deque[tuple[int, str]] = deque()
        self._received = 0
        self._sent = 0
        self._wake = asyncio.Event()

    @property
    def received(self) -> int:
        """Number of the last message taken in."""
        return self._received

    @property
    def backlog(self) -> int:
        """Messages that the peer has not acknowledged."""
        return len(self._unacknowledged)

    def post(self, message: Any) -> None:
        """Queue a message for the other side."""
        self._post_frame(encode(message))

    def post_dismissal(self) -> None:
        """Queue the word that the other side may end."""
        self._post_frame({"type": "dismiss", "body": {}})

    def _post_frame(self, frame: dict[str, Any]) -> None:
        if len(self._unacknowledged) >= UNACKNOWLEDGED_MAX:
            raise ProtocolError(f"{UNACKNOWLEDGED_MAX} messages wait for a peer that does not answer")
        self._unacknowledged.append((self._next, json.dumps({"number": self._next, **frame})))
        self._next += 1
        self._wake.set()

    def reset(self) -> None:
        """The peer is another process than before: what was said to the old one does not concern it."""
        self._next, self._received, self._sent = 1, 0, 0
        self._unacknowledged.clear()

    def reconnect(self, received_by_peer: int) -> None:
        """A new connection: forget what the peer has, send the rest again.

        Raises ProtocolError if the peer has more than was ever sent: it speaks of another process's messages.
        """
        self.acknowledge(received_by_peer)
        self._sent = received_by_peer
        self._wake.set()

    def acknowledge(self, number: int) -> None:
        """The peer has everything up to `number`."""
        if not 0 <= number < self._next:
            raise ProtocolError(f"the peer acknowledges message {number}; {self._next - 1} were sent")
        while self._unacknowledged and self._unacknowledged[0][0] <= number:
            self._unacknowledged.popleft()

    async def outgoing(self) -> list[str]:
        """Wait for unsent frames; then all of them, with the latest acknowledgement."""
        while True:
            frames = [text for number, text in self._unacknowledged if number > self._sent]
            if frames:
                self._sent = self._unacknowledged[-1][0]
                return frames
            self._wake.clear()
            await self._wake.wait()

    def acknowledgement(self) -> str:
        """A frame that tells the peer what arrived."""
        return json.dumps({"ack": self._received})

    def take(self, text: str) -> dict[str, Any] | None:
        """Take in a frame; None for an acknowledgement or one that was seen before."""
        try:
            frame = json.loads(text)
            if "ack" in frame:
                self.acknowledge(_whole_number(frame["ack"]))
                return None
            number = _whole_number(frame["number"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProtocolError(f"not a frame: {error}") from error
        if number <= self._received:
            return None
        if number != self._received + 1:
            raise ProtocolError(f"message {number} follows {self._received}")
        self._received = number
        return dict(frame)


def _whole_number(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.100} is no whole number")
    return value
