"""Responses that `previous_response_id` can go on from, in bounded memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from hetero.server.errors import encode

MAX_BYTES = 64 << 20
Item = dict[str, Any]


@dataclass(slots=True)
class Stored:
    """As JSON, of which the size is known: as objects, `[[],[],…]` would take twenty times as much."""

    client: str
    json: bytes  # of [response, items]
    previous: str | None

    def read(self) -> tuple[dict[str, Any], list[Item]]:
        """(the response, what the client sent with the request). What it got is response["output"]."""
        response, items = json.loads(self.json)
        return response, items

    @property
    def size(self) -> int:
        return len(self.json)


class ResponseStore:
    """Responses by id, each seen only by the client that made it.

    A response goes on from a chain of others. The chain is used as a whole, its beginning last, so that of
    a chain the latest response is forgotten first, and what is here can be gone on from:

        least recently used -> | leaf  parent  root | leaf  parent  root | <- most recently used
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """`max_bytes` bounds the JSON of all that is kept."""
        self._max_bytes = max_bytes
        self._size = 0
        self._entries: OrderedDict[str, Stored] = OrderedDict()

    def add(self, client: str, response: dict[str, Any], items: list[Item], previous: str | None) -> None:
        """Keep a response; older ones leave for it. It is not kept if its conversation is too large."""
        stored = Stored(client, encode([response, items]).encode(), previous)
        self._entries[response["id"]] = stored
        self._size += stored.size
        self._use(response["id"])
        while self._size > self._max_bytes:
            self._forget(next(iter(self._entries)))

    def get(self, client: str, response_id: str) -> Stored | None:
        stored = self._entries.get(response_id)
        return stored if stored is not None and stored.client == client else None

    def history(self, client: str, response_id: str) -> list[Item] | None:
        """What went in and came out up to and with this response, in order; None if part of it is gone."""
        chain: list[Stored] = []
        name: str | None = response_id
        while name is not None:
            stored = self.get(client, name)
            if stored is None:
                return None
            chain.append(stored)
            name = stored.previous
        self._use(response_id)
        read = (stored.read() for stored in reversed(chain))
        return [item for response, items in read for item in (*items, *response["output"])]

    def remove(self, client: str, response_id: str) -> bool:
        """Whether it was there. What went on from it can be read, but not gone on from."""
        if self.get(client, response_id) is None:
            return False
        self._forget(response_id)
        return True

    def _use(self, response_id: str) -> None:
        name: str | None = response_id
        while name is not None and name in self._entries:
            self._entries.move_to_end(name)
            name = self._entries[name].previous

    def _forget(self, response_id: str) -> None:
        self._size -= self._entries.pop(response_id).size

    def check_invariants(self) -> None:
        assert self._size == sum(stored.size for stored in self._entries.values()) <= self._max_bytes
        order = {name: place for place, name in enumerate(self._entries)}
        for name, stored in self._entries.items():
            if stored.previous in order:
                assert order[name] < order[stored.previous]
