"""A tier below host memory that is a dictionary, for the simulation: what a real one does, at once."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
from fake_device import Device

from hetero.batch import Step
from hetero.kv.below import copy_out, hold, insert, let_go, reserve
from hetero.kv.manager import KVManager
from hetero.kv.prefix_tree import Node, chain_key
from hetero.request import Request


class Quiet:
    """A hetero.kv.below.Below that does nothing."""

    has_work, has_more, held = False, False, ()

    def left(self, node: Node) -> None: ...

    def plan(self, idle: bool) -> None: ...

    def ended(self, step: Step, good: bool) -> None: ...

    def cleared(self) -> None: ...

    def hold(self, request: Request) -> bool:
        return False

    def cancel(self, request_id: str) -> Request | None:
        return None

    def take_in(self) -> list[Request]:
        return []

    def check_invariants(self) -> None: ...


class SimulatedBelow(Quiet):
    """Keeps the content of every full block that it can get hold of."""

    def __init__(self, kv: KVManager, device: Device, rng: random.Random):
        self.kv, self.device, self.rng = kv, device, rng
        self.blocks: dict[bytes, dict[int, np.ndarray]] = {}
        self.queue: deque[Node] = deque()  # to be copied out
        self.fetched = 0
        kv.below = self

    def left(self, node: Node) -> None:
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        self.queue += path[::-1]

    def plan(self, idle: bool) -> None:
        for _ in range(self.rng.randint(0, 3)):
            if self.queue and self.kv.tree.attached(node := self.queue.popleft()):
                copy_out(self.kv, node, evict=self.rng.random() < 0.3)

    def cleared(self) -> None:
        self.queue.clear()

    def ended(self, step: Step, good: bool) -> None:
        nodes = [self.kv.host.slots[move.group].owner(move.slot) for move in step.spills]
        for node in nodes if good else ():
            if node is None:
                continue
            slots = hold(self.kv, node)
            known = self.blocks.setdefault(self.kv.tree.key(node), {})
            known.update({g: self.device.host[g][slot].copy() for g, slot in slots.items()})
            let_go(self.kv, slots)

    def hold(self, request: Request) -> bool:
        """Brings what is known of a request's prompt to host memory at once."""
        self._bring(request)
        return False

    def _bring(self, request: Request) -> None:
        size, node = self.kv.block_size, self.kv.tree.root_of(request.cache_scope)
        key = self.kv.tree.key(node)
        for i in range((len(request.prompt_token_ids) - 1) // size):
            tokens = tuple(request.token_ids(i * size, (i + 1) * size))
            key = chain_key(key, tokens)
            child = node.children.get(tokens)
            if child is None:
                child = self._fetch(node, tokens, key)
            if child is None:
                return
            assert self.kv.tree.key(child) == key
            node = child

    def _fetch(self, parent: Node, tokens: tuple[int, ...], key: bytes) -> Node | None:
        content = self.blocks.get(key)
        slots = reserve(self.kv, content) if content else None
        if content is None or slots is None:
            return None
        for g, slot in slots.items():
            self.device.host[g][slot] = content[g]
        node = insert(self.kv, parent, tokens, slots)
        self.kv.check_invariants()
        let_go(self.kv, slots)
        self.fetched += node is not None
        return node
