"""Damages GGUF files at random and loads them: header, configuration, vocabulary, chat template.

`python tests/gguf_fuzz.py FOLDER SEED COUNT FILE...` damages each FILE COUNT times and prints a line of JSON
for each time. It is a program of its own because what it looks for kills the process. The file that was
damaged last stays in FOLDER.
"""

from __future__ import annotations

import json
import math
import random
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gguf_tools import skip_value

from quant.types import GGML_TYPES

TEXT = "the <|im_start|>thing\n\n  é日本😸 <bos>\0\x7f1234 " + "ab" * 40
NUMBERS = [0, 1, 2, 3, 7, 31, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
FLOATS = [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-30, 1e30]
STRINGS = [b"", b"\0", b"a\0b", b"\xff\xfe", b"x" * 5000, "é\n".encode(), b"llama", b"none", b"<0x0A>"]
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
FLOAT_CODES = {6: "<f", 12: "<d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Parts:
    """A header taken apart: (key, type, payload) of each entry, (name, dims, type, offset) of each tensor."""

    entries: list[tuple[bytes, int, bytes]]
    tensors: list[tuple[bytes, tuple[int, ...], int, int]]

    def joined(self) -> bytes:
        out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.entries)))
        for key, type_id, payload in self.entries:
            out += _string(key) + struct.pack("<I", type_id & 0xFFFFFFFF) + payload
        for name, dims, type_id, offset in self.tensors:
            out += _string(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
            out += struct.pack("<IQ", type_id & 0xFFFFFFFF, offset)
        return bytes(out) + bytes(-len(out) % 32)


def take_apart(data: bytes) -> Parts:
    n_tensors, n_kv = struct.unpack_from("<QQ", data, 8)
    pos, entries, tensors = 24, [], []
    for _ in range(n_kv):
        end = skip_value(data, pos, STRING)
        key, pos = data[pos + 8 : end], end + 4
        (type_id,) = struct.unpack_from("<I", data, end)
        end = skip_value(data, pos, type_id)
        entries.append((key, type_id, data[pos:end]))
        pos = end
    for _ in range(n_tensors):
        end = skip_value(data, pos, STRING)
        name = data[pos + 8 : end]
        (n_dims,) = struct.unpack_from("<I", data, end)
        *dims, type_id, offset = struct.unpack_from(f"<{n_dims}QIQ", data, end + 4)
        tensors.append((name, tuple(dims), type_id, offset))
        pos = end + 4 + 8 * n_dims + 12
    return Parts(entries, tensors)


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _strings(payload: bytes) -> list[bytes]:
    """The elements of an array of strings, as far as they are whole."""
    items, pos = [], 12
    while pos + 8 <= len(payload):
        end = skip_value(payload, pos, STRING)
        items.append(payload[pos:end])
        pos = end
    return items


class Damage:
    """Damaged copies of a header, one after the other, chosen by a seed."""

    def __init__(self, header: bytes, seed: int):
        self.header, self.parts = header, take_apart(header)
        self.rng = random.Random(seed)

    def next(self) -> bytes:
        rng = self.rng
        if rng.random() < 0.35:
            return self.bytes_changed()
        parts = self.parts
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            change = rng.choice((self.entry, self.entry, self.vocabulary, self.vocabulary, self.tensor))
            parts = change(parts)
        return parts.joined()

    def bytes_changed(self) -> bytes:
        rng, damaged = self.rng, bytearray(self.header)
        if rng.random() < 0.1:
            return bytes(damaged[: rng.randrange(len(damaged))])
        for _ in range(rng.choice((1, 1, 2, 5, 20))):
            at = rng.randrange(4, len(damaged) - 8)
            new = (
                struct.pack("<Q", rng.choice(NUMBERS))
                if rng.random() < 0.4
                else rng.randbytes(rng.choice((1, 4)))
            )
            damaged[at : at + len(new)] = new
        return bytes(damaged)

    def entry(self, parts: Parts) -> Parts:
        """Of the metadata: gone, twice, of another type, of another value, or two values swapped."""
        rng, entries = self.rng, list(parts.entries)
        if not entries:
            return parts
        at, other = rng.randrange(len(entries)), rng.randrange(len(entries))
        key, type_id, payload = entries[at]
        kind = rng.randrange(6)
        if kind == 0:
            del entries[at]
        elif kind == 1:
            entries.append(entries[at])
        elif kind == 2:
            entries[at] = (key, rng.choice((*range(13), 77)), payload)
        elif kind == 3:
            entries[at], entries[other] = (key, *entries[other][1:]), (entries[other][0], type_id, payload)
        else:
            entries[at] = (key, type_id, self.value(type_id, payload))
        return replace(parts, entries=entries)

    def value(self, type_id: int, payload: bytes) -> bytes:
        rng = self.rng
        if type_id == STRING:
            return _string(rng.choice(STRINGS))
        if type_id == ARRAY and len(payload) >= 12:
            return self.array(payload)
        if type_id in FLOAT_CODES:
            return (
                struct.pack(FLOAT_CODES[type_id], rng.choice(FLOATS)) if rng.random() < 0.9 else payload[:-1]
            )
        return struct.pack("<Q", rng.choice(NUMBERS))[: SIZES.get(type_id, 4)]

    def array(self, payload: bytes) -> bytes:
        """Shorter, longer, of another type, or with some elements changed; damage twice may leave none."""
        rng = self.rng
        element, count = struct.unpack_from("<IQ", payload)
        kind = rng.randrange(5)
        if kind == 0:
            return struct.pack("<IQ", element, rng.choice(NUMBERS)) + payload[12:]
        if kind == 1:
            return struct.pack("<IQ", rng.choice(range(13)), count) + payload[12:]
        if element == STRING:
            items = _strings(payload)
        elif element in SIZES:
            size = SIZES[element]
            items = [payload[i : i + size] for i in range(12, len(payload), size)]
        else:
            return payload
        if kind == 2:
            items = items[: rng.randrange(len(items) + 1)]
        for _ in range(rng.choice((1, 3, 50)) if items else 0):
            item = self.value(element, rng.choice(items)) if rng.random() < 0.5 else rng.choice(items)
            items[rng.randrange(len(items))] = item
        return struct.pack("<IQ", element, len(items)) + b"".join(items)

    def vocabulary(self, parts: Parts) -> Parts:
        """Entries that only libllama looks at."""
        mine = [i for i, e in enumerate(parts.entries) if e[0].startswith(b"tokenizer.")]
        if not mine:
            return parts
        at = self.rng.choice(mine)
        key, type_id, payload = parts.entries[at]
        if key == b"tokenizer.ggml.model" and self.rng.random() < 0.7:
            payload = _string(
                self.rng.choice((b"llama", b"gpt2", b"bert", b"t5", b"rwkv", b"plamo2", b"gemma4"))
            )
        else:
            payload = self.value(type_id, payload)
        entries = list(parts.entries)
        entries[at] = (key, type_id, payload)
        return replace(parts, entries=entries)

    def tensor(self, parts: Parts) -> Parts:
        rng, tensors = self.rng, list(parts.tensors)
        if not tensors:
            return parts
        at = rng.randrange(len(tensors))
        name, dims, type_id, offset = tensors[at]
        kind = rng.randrange(6)
        if kind == 0:
            del tensors[at]
        elif kind == 1:
            tensors[at] = (
                rng.choice((b"", b"a\0", name + b"x", tensors[0][0], b"n" * 64)),
                dims,
                type_id,
                offset,
            )
        elif kind == 2:
            dims = tuple(rng.choice((d, d, rng.choice(NUMBERS))) for d in dims)
            tensors[at] = (name, dims, type_id, offset)
        elif kind == 3:
            tensors[at] = (name, dims, rng.choice((*GGML_TYPES, 4, 43, 2**31)), offset)
        elif kind == 4:
            tensors[at] = (name, dims, type_id, rng.choice((*NUMBERS, offset + 32)))
        else:
            tensors[at] = (
                name,
                dims[: rng.randrange(len(dims) + 1)] + (1,) * rng.randrange(3),
                type_id,
                offset,
            )
        return replace(parts, tensors=tensors)


def load(path: Path) -> list[str]:
    """Everything that happens to a file before its weights are read. The refusals, each one line."""
    from hetero.plan.make import GUESSED
    from hetero.prepare import LaunchError, prepare
    from hetero.settings import Settings
    from hetero.text.special import fim_tokens
    from hetero.text.template import ChatTemplate, TemplateError
    from hetero.text.tokenizer import Tokenizer
    from quant.gguf import GGUFError, open_gguf

    refusals = []
    for engine in ("auto", "llama"):
        try:
            prepare(Settings(model=str(path), engine=engine, device=("CPU",)), measure=GUESSED).gguf.close()
        except LaunchError as error:
            refusals.append(str(error))
    try:
        gguf = open_gguf(path)
    except GGUFError as error:
        return [*refusals, str(error)]
    with gguf:
        try:
            tokenizer = Tokenizer(path)
        except ValueError as error:
            return [*refusals, str(error)]
        for special in (False, True):
            ids = tokenizer.encode(TEXT, parse_special=special, add_special=special)
            assert all(0 <= i < tokenizer.n_vocab for i in ids), ids
            tokenizer.decode(ids)
        fim_tokens(tokenizer)
        template = ChatTemplate.from_gguf(gguf, tokenizer)
        if template is not None:
            with suppress(TemplateError):  # the answer to one request
                template.render([{"role": "user", "content": TEXT}])
    return refusals


def main(folder: Path, seed: int, count: int, files: list[Path]) -> None:
    import psutil

    from quant.gguf import open_gguf

    me, path = psutil.Process(), folder / "damaged.gguf"
    for file in files:
        with open_gguf(file) as gguf, file.open("rb") as source:
            damage, data_nbytes = Damage(source.read(gguf.head_nbytes), seed), gguf.nbytes - gguf.head_nbytes
        assert load(file) == [] or file.name.startswith("vocabulary"), load(file)
        before = me.memory_info().rss
        for number in range(count):
            header = damage.next()
            with path.open("wb") as target:
                target.write(header)
                target.truncate(len(header) + data_nbytes)  # of weights nobody looks at: zeros take no room
            print(f"{file.name} {seed} {number}", file=sys.stderr, flush=True)
            start = time.process_time()
            refusals = load(path)
            found = {
                "file": file.name,
                "number": number,
                "seconds": time.process_time() - start,
                "grown": me.memory_info().rss - before,
                "refusals": refusals,
            }
            print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [Path(p) for p in sys.argv[4:]])
