"""What the launcher is told: at once, and once more after each new connection, as much of it as still holds."""

from __future__ import annotations

import time

from trainer.agent.client import BeatClient
from trainer.beats import Message

MAX_EVENTS = 100  # said again; older ones have been heard, or are no loss


class News:
    """The newest message of each kind, and every event."""

    def __init__(self) -> None:
        self._newest: dict[str, Message] = {}
        self._events: list[Message] = []
        self.client: BeatClient | None = None  # who carries them; it asks `listed`, so it comes second

    def tell(self, message: Message) -> None:
        """Say something that holds until something newer of its kind is said, or it is forgotten."""
        self._newest = {**self._newest, message["type"]: message}  # the thread that beats reads it
        self.say(message)

    def say(self, message: Message) -> None:
        """Say something that is not said again."""
        if self.client is not None:
            self.client.send(message)

    def note(self, event: str) -> None:
        """Tell that something happened just now."""
        message: Message = {"type": "event", "event": event, "time": time.time()}
        self._events = [*self._events, message][-MAX_EVENTS:]
        self.say(message)

    def repeat(self, kind: str) -> None:
        """Say the newest of a kind again, if there is one."""
        if kind in self._newest:
            self.say(self._newest[kind])

    def get(self, kind: str) -> Message | None:
        """The newest of a kind that still holds."""
        return self._newest.get(kind)

    def forget(self, *kinds: str) -> None:
        """These do not hold any more."""
        self._newest = {kind: message for kind, message in self._newest.items() if kind not in kinds}

    def listed(self) -> list[Message]:
        """Everything that is to be said after a new connection."""
        return [*self._events, *self._newest.values()]
