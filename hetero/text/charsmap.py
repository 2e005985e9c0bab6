"""The normalization table of unigram (T5's) vocabularies, walked before libllama may walk it.

Layout (sentencepiece's precompiled charsmap; llm_tokenizer_ugm in llama-vocab.cpp):

    | u32 nbytes | nbytes of u32: the nodes of a double array | replacements, each ended by a 0 |

A node: bits 0-7 and 31 the character it is for (LCHECK), bit 8 whether a text ends here, bits 10-30 and the
shift in bit 9 its BASE; the child for character c of a node at i is at i ^ BASE ^ c.
"""

from __future__ import annotations

import numpy as np

_CHARACTERS = np.arange(1, 256, dtype=np.int64)
_AT_ONCE = 1024  # nodes whose children are looked at in one go


def check_charsmap(table: bytes) -> str | None:
    """What is wrong with a table, None for nothing: some text would lead libllama out of its bounds."""
    if not table:
        return None
    nbytes = int.from_bytes(table[:4], "little")
    if len(table) < 4 or nbytes + 4 >= len(table):
        return f"announces {nbytes} bytes of nodes and has {len(table)} in all"
    nodes = np.frombuffer(table, "<u4", nbytes // 4, 4).astype(np.int64)
    replacements = table[4 + nbytes :]
    if replacements[-1] != 0:
        return "has a replacement without an end"
    if not len(nodes):
        return None
    bases = (nodes >> 10) << ((nodes & (1 << 9)) >> 6)
    seen = np.zeros(len(nodes), bool)
    waiting = [bases[:1]]  # places whose children have not been looked at
    while waiting:
        front = waiting.pop()
        if len(front) > _AT_ONCE:
            waiting.append(front[_AT_ONCE:])
            front = front[:_AT_ONCE]
        if (front | 0xFF).max(initial=0) >= len(nodes):
            return "has a node that leads out of it"
        front = np.unique(front[~seen[front]])
        seen[front] = True
        children = front[:, None] ^ _CHARACTERS
        children = children[nodes[children] & ((1 << 31) | 0xFF) == _CHARACTERS]
        after = children ^ bases[children]
        values = after[nodes[children] >> 8 & 1 == 1]
        if values.max(initial=0) >= len(nodes):
            return "has a node that leads out of it"
        if (nodes[values] & 0x7FFFFFFF).max(initial=0) >= len(replacements):
            return "has a replacement outside of it"
        if len(after):
            waiting.append(after)
    return None
