"""A tree over token ids: which blocks hold the KV of which prefix."""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from hashlib import blake2b

Tokens = tuple[int, ...]
KEY_BYTES = 16


class Node:
    """The KV of one block of tokens after the prefix that its ancestors spell.

    `tokens` has block_size ids, or fewer in a tail, which has no children. `blocks[g]` is the
    block of KV group g, None where the device no longer holds these tokens, `slots[g]` likewise the
    slot in host memory. `step_id` is the step that fills the newest of `blocks`: until it has been
    submitted they must not be copied. `below`: it came from a tier below host memory. `is_end`:
    a prompt ended behind it, and may come again.
    """

    __slots__ = (
        "below", "blocks", "chain_key", "children", "is_end", "keys", "parent", "slots", "step_id", "tokens"
    )  # fmt: skip

    def __init__(self, tokens: Tokens, blocks: list[int | None], parent: Node | None, step_id: int):
        self.tokens = tokens
        self.blocks = blocks
        self.slots: list[int | None] = [None] * len(blocks)
        self.below = False
        self.is_end = False
        self.chain_key: bytes | None = None  # see PrefixTree.key
        self.parent = parent  # None in a root and once dropped
        self.step_id = step_id
        self.children: dict[Tokens, Node] = {}
        self.keys: list[Tokens] = []  # of `children`, sorted

    @property
    def is_empty(self) -> bool:
        """Whether nothing holds these tokens any more, nor any behind them."""
        return not self.children and not any(self.blocks) and all(slot is None for slot in self.slots)


class PrefixTree:
    """Structure only: reference counts and pools are the manager's business.

      root ── (t0 .. t15) ── (t16 .. t31) ── (t32 .. t36)     a tail
                         └── (u16 .. u31)

    There is a root for each scope: what one scope has cached is never found from another. "" is the
    scope of all that is shared. Finding a child by all its tokens is O(1), by a common beginning
    O(log children).
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.roots: dict[str, Node] = {}
        self.root = self.root_of("")
        self.num_nodes = 0  # without the roots

    def root_of(self, scope: str) -> Node:
        """The root of a scope, new when it is the first time."""
        root = self.roots.get(scope)
        if root is None:
            root = self.roots[scope] = Node((), [], None, 0)
            root.chain_key = blake2b(scope.encode("utf-8", "surrogateescape"), digest_size=KEY_BYTES).digest()
        return root

    def attached(self, node: Node) -> bool:
        """False once `node` was dropped."""
        return node.parent is not None or not node.tokens

    def key(self, node: Node) -> bytes:
        """The name of an attached node's whole prefix, KEY_BYTES long: see chain_key. Worked out once."""
        missing = []
        while node.chain_key is None:
            missing.append(node)
            if node.parent is None:
                raise ValueError("a dropped node has no prefix")
            node = node.parent
        key = node.chain_key
        for each in reversed(missing):
            key = each.chain_key = chain_key(key, each.tokens)
        return key

    def insert(self, parent: Node, tokens: Tokens, blocks: list[int | None], step_id: int) -> Node:
        """A new child. `parent` must be attached and full, and have no child with these tokens."""
        if tokens in parent.children or len(parent.tokens) not in (0, self.block_size):
            raise ValueError("a node needs a full parent and new tokens")
        node = Node(tokens, blocks, parent, step_id)
        parent.children[tokens] = node
        insort(parent.keys, tokens)
        self.num_nodes += 1
        return node

    def closest(self, parent: Node, tokens: Tokens) -> tuple[Node, int] | None:
        """The child that shares the longest beginning with `tokens`, and that length (> 0).

        In sorted order the longest common beginning is always with a neighbour.
        """
        at = bisect_left(parent.keys, tokens)
        best: tuple[Node, int] | None = None
        for key in parent.keys[max(0, at - 1) : at + 1]:
            length = common_length(key, tokens)
            if length > (best[1] if best else 0):
                best = parent.children[key], length
        return best

    def shorter_tail(self, node: Node) -> Node | None:
        """A tail beside `node` whose tokens are a beginning of it, thus of no more use."""
        assert node.parent is not None
        keys = node.parent.keys
        at = bisect_left(keys, node.tokens)
        if at and node.tokens[: len(keys[at - 1])] == keys[at - 1]:
            return node.parent.children[keys[at - 1]]
        return None

    def drop(self, node: Node) -> list[Node]:
        """Detach `node` with its subtree; all of its nodes, no longer attached."""
        if node.parent is None:
            raise ValueError("the root and dropped nodes cannot be dropped")
        keys = node.parent.keys
        del node.parent.children[node.tokens]
        del keys[bisect_left(keys, node.tokens)]
        gone = [node]
        for each in gone:  # grows while it is walked
            gone += each.children.values()
            each.parent = None
            each.children = {}
            each.keys = []
        self.num_nodes -= len(gone)
        return gone

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check_invariants(self) -> None:
        """Raise AssertionError unless keys, links and lengths agree. O(nodes)."""
        count = 0
        for node in [*self.roots.values(), *self.nodes()]:
            assert node.keys == sorted(node.children), "sorted keys and children differ"
            for tokens, child in node.children.items():
                assert child.parent is node and child.tokens == tokens
                assert 0 < len(tokens) <= self.block_size
                assert len(tokens) == self.block_size or not child.children, "a tail has children"
                count += 1
        assert count == self.num_nodes


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a prefix that ends with `tokens`: BLAKE2b of the key before and the ids as int32.

    Little-endian. A root's is that of its scope's name.
    """
    return blake2b(parent + struct.pack(f"<{len(tokens)}i", *tokens), digest_size=KEY_BYTES).digest()


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading elements are equal."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
