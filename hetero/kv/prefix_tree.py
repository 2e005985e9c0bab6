"""A tree over token ids: which blocks hold the KV of which prefix."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

Tokens = tuple[int, ...]


class Node:
    """The KV of one block of tokens after the prefix that its ancestors spell.

    `tokens` has block_size ids, or fewer in a tail, which has no children. `blocks[g]` is the
    block of KV group g, None where that group no longer holds these tokens. `step_id` is the
    step that fills the newest of `blocks`: until it has been submitted they must not be copied.
    """

    __slots__ = ("blocks", "children", "keys", "parent", "step_id", "tokens")

    def __init__(self, tokens: Tokens, blocks: list[int | None], parent: Node | None, step_id: int):
        self.tokens = tokens
        self.blocks = blocks
        self.parent = parent  # None in the root and once dropped
        self.step_id = step_id
        self.children: dict[Tokens, Node] = {}
        self.keys: list[Tokens] = []  # of `children`, sorted


class PrefixTree:
    """Structure only: reference counts and pools are the manager's business.

      root ── (t0 .. t15) ── (t16 .. t31) ── (t32 .. t36)     a tail
                         └── (u16 .. u31)

    Finding a child by all its tokens is O(1), by a common beginning O(log children).
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.root = Node((), [], None, 0)
        self.num_nodes = 0  # without the root

    def attached(self, node: Node) -> bool:
        """False once `node` was dropped."""
        return node.parent is not None or node is self.root

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
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check_invariants(self) -> None:
        """Raise AssertionError unless keys, links and lengths agree. O(nodes)."""
        count = 0
        for node in [self.root, *self.nodes()]:
            assert node.keys == sorted(node.children), "sorted keys and children differ"
            for tokens, child in node.children.items():
                assert child.parent is node and child.tokens == tokens
                assert 0 < len(tokens) <= self.block_size
                assert len(tokens) == self.block_size or not child.children, "a tail has children"
                count += 1
        assert count == self.num_nodes


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading elements are equal."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
