"""Frames of hetero.pipeline.wire made by hand: right ones, and each kind of wrong one."""

from __future__ import annotations

import hmac
import json
import pickle
import struct
from collections.abc import Callable

import numpy as np

from hetero.pipeline.channel import MAX_HEAD_BYTES, Kind
from hetero.pipeline.wire import MAC_BYTES, PREFIX


def frame(head: bytes, payload: bytes = b"", *, key: bytes, count: int = 0, **lengths: int) -> bytes:
    """The `count`-th frame of a connection, with a right MAC; `lengths` may claim other ones."""
    claimed = (lengths.get("head_bytes", len(head)), lengths.get("payload_bytes", len(payload)))
    data = PREFIX.pack(b"HTRO", *claimed) + head + payload
    return data + hmac.digest(key, struct.pack("<Q", count) + data, "sha256")[:MAC_BYTES]


def head(kind: int = Kind.STEP, arrays: object = (), header: object = None) -> bytes:
    return json.dumps({"kind": kind, "header": header or {}, "arrays": arrays}).encode()


def ping(key: bytes, count: int = 0) -> bytes:
    """A frame that is right."""
    return frame(head(Kind.PING), key=key, count=count)


# What a frame with this key would be, for each way to get it wrong.
BAD_FRAMES: dict[str, Callable[[bytes], bytes]] = {
    "random bytes": lambda key: np.random.default_rng(5).bytes(4096),
    "2^40 bytes": lambda key: frame(head(arrays=[["u1", [1 << 39, 2]]]), key=key, payload_bytes=1 << 40),
    "2^40 bytes in an array": lambda key: frame(head(arrays=[["u1", [1 << 20, 1 << 20]]]), key=key),
    "long head": lambda key: frame(b"", key=key, head_bytes=MAX_HEAD_BYTES + 1),
    "unknown op": lambda key: frame(head(kind=99), key=key),
    "dtype 250": lambda key: frame(head(arrays=[[250, [4]]]), bytes(16), key=key),
    "unknown dtype": lambda key: frame(head(arrays=[["f8", [2]]]), bytes(16), key=key),
    "shape and payload differ": lambda key: frame(head(arrays=[["f4", [4, 4]]]), bytes(60), key=key),
    "negative shape": lambda key: frame(head(arrays=[["f4", [-4, -4]]]), bytes(64), key=key),
    "pickle": lambda key: pickle.dumps({"kind": 5}) + bytes(64),
    "pickle in a frame": lambda key: frame(pickle.dumps({"kind": 5, "header": {}, "arrays": []}), key=key),
    "no JSON object": lambda key: frame(b"[1, 2, 3]", key=key),
    "deep JSON": lambda key: frame(b"[" * 100_000, key=key),
    "not authentic": lambda key: ping(key)[:-1] + bytes([ping(key)[-1] ^ 1]),
    "other key": lambda key: ping(bytes(32)),
    "out of order": lambda key: ping(key, count=1),
}
