"""What the formats of the KV cache cost, written down as docs/quality.md.

    make quality-kv
    make quality-kv ARGS="--ctx 512 --tokens 2048 --exact"

Each model reads the same text with its KV cache in f16 and in every other format, side by side. What was
measured is kept (in HETERO_CACHE_DIR) until the sources of the kernels change, so that a run that was
stopped goes on where it was. `--exact` also measures copies of the models whose weights are float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf as gguf_package
import platformdirs
from gguf.quants import dequantize

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gguf_tools import Raw, rewrite
from places import gemma3, smollm2

from backends.ggml.models.config import read_config
from backends.kv_format import row_bytes
from hetero.commands.quality_kv import Formats, compare_formats, prepare_formats
from hetero.config import Settings
from hetero.kv_types import KVTypes, parse_several
from hetero.screen import loading
from hetero.text.tokenizer import Tokenizer
from hetero.windows import cut, read_tokens
from quant.gguf import open_gguf

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "quality.md"
KV_TYPES = "fp8,q8_0,k=q8_0,v=fp8"
CONTEXTS = (512, 2048, 4096)
EXACT_CTX = 512
MOST_KL, LEAST_TOP1 = 0.01, 0.98  # what is asked of fp8
EXACT = "weights in float32"


@dataclasses.dataclass(frozen=True)
class Row:
    """A format at a context length, over `tokens` positions. KL divergences in nats, `top1` from 0 to 1."""

    model: str
    ctx: int
    kv_type: str
    tokens: int
    kl: float
    kl_error: float
    kl_p99: float
    top1: float
    ppl_ratio: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="*", help="GGUF files; the two packaged ones otherwise")
    parser.add_argument("--ctx", type=int, nargs="*", default=CONTEXTS, help="tokens in a window")
    parser.add_argument("--tokens", type=int, default=6144, help="how much of the text is read")
    parser.add_argument("--kv-type", default=KV_TYPES, help=f"formats to compare with f16: {KV_TYPES}")
    parser.add_argument("--text", type=Path, help="text to read; the packaged one otherwise")
    parser.add_argument("--exact", action="store_true", help=f"also with {EXACT}, in windows of {EXACT_CTX}")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    args = parser.parse_args()
    kv_types = parse_several(args.kv_type)
    models = args.model or [smollm2(), gemma3()]
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for path in models:
            for ctx in args.ctx:
                rows += measured(
                    path, path.stem, Formats(str(path), tuple(kv_types), args.text, args.tokens, ctx)
                )
            if args.exact:
                rows += exactly(path, Path(folder), tuple(kv_types), args.text, args.tokens // 4)
    sizes = {path.stem: bytes_per_token(path, kv_types) for path in models}
    args.out.write_text(page(rows, sizes), encoding="utf-8")
    print(f"{args.out} is written")


def measured(path: Path, name: str, wanted: Formats) -> list[Row]:
    """A row for each format: known ones, or all of them anew."""
    store = kept_at(path, wanted)
    if store.exists():
        return [Row(**row) for row in json.loads(store.read_text(encoding="utf-8"))]
    print(f"{name}: windows of {wanted.ctx} tokens")
    settings = Settings()
    models = prepare_formats(settings, wanted)
    tokenizer = Tokenizer(path)
    windows = cut(read_tokens(tokenizer, wanted.text, wanted.tokens), wanted.ctx, tokenizer)
    with loading() as progress:
        found = compare_formats(settings, models, wanted.kv_types, windows, progress)
    rows = [
        Row(
            name,
            wanted.ctx,
            one.label,
            one.summary.tokens,
            one.summary.kl_mean.value,
            one.summary.kl_mean.error,
            one.summary.kl_p99,
            one.summary.top1,
            one.summary.ppl_ratio.value,
        )
        for one in found
    ]
    store.parent.mkdir(parents=True, exist_ok=True)
    store.write_text(json.dumps([dataclasses.asdict(row) for row in rows]), encoding="utf-8")
    return rows


def exactly(
    path: Path, folder: Path, kv_types: tuple[KVTypes, ...], text: Path | None, tokens: int
) -> list[Row]:
    """The same for a copy of the model whose weights need no rounding of activations."""
    copy = folder / f"{path.stem}.f32.gguf"
    wanted = Formats(str(copy), kv_types, text, tokens, EXACT_CTX)
    name = f"{path.stem}, {EXACT}"
    if not kept_at(copy, wanted).exists():
        weights = {
            t.name: Raw(
                "F32", tuple(map(int, t.shape)), dequantize(t.data, t.tensor_type).astype("<f4").tobytes()
            )
            for t in gguf_package.GGUFReader(path).tensors
        }
        rewrite(path, copy, {}, weights)
    rows = measured(copy, name, wanted)
    copy.unlink(missing_ok=True)
    return rows


def kept_at(path: Path, wanted: Formats) -> Path:
    """A file named by all that the numbers depend on: model, text, formats and kernels."""
    text = wanted.text or ROOT / "hetero" / "data" / "quality.txt"
    digest = hashlib.sha256()
    for part in (path.name, *map(str, wanted.kv_types), wanted.tokens, wanted.ctx):
        digest.update(f"{part}\n".encode())
    sources = sorted(p for folder in ("backends", "quant") for p in (ROOT / folder).rglob("*.py"))
    for file in (text, *sources):
        digest.update(file.read_bytes())
    base = os.environ.get("HETERO_CACHE_DIR") or platformdirs.user_cache_dir("hetero")
    return Path(base).expanduser() / "kv-quality" / f"{digest.hexdigest()[:24]}.json"


def bytes_per_token(path: Path, kv_types: Sequence[KVTypes]) -> dict[str, int]:
    """Of keys and values of all layers, in f16 and in each format."""
    c = read_config(open_gguf(path))
    return {
        str(kind): c.n_layer
        * c.n_head_kv
        * (row_bytes(kind.keys, c.head_dim_k) + row_bytes(kind.values, c.head_dim_v))
        for kind in (KVTypes(), *kv_types)
    }


def page(rows: Sequence[Row], sizes: dict[str, dict[str, int]]) -> str:
    """docs/quality.md."""
    plain = [row for row in rows if EXACT not in row.model]
    lines = [*INTRODUCTION, *verdict([row for row in plain if row.kv_type.split()[0] == "fp8"])]
    lines += ["", "## Memory", "", "| model | format | bytes per token | tokens in the same memory |"]
    lines.append("|---|---|---|---|")
    for name, kinds in sizes.items():
        lines += [
            f"| {name} | {kind} | {size:,} | {kinds['f16'] / size:.2f}x |" for kind, size in kinds.items()
        ]
    for name in dict.fromkeys(row.model for row in rows):
        lines += ["", f"## {name}", "", *table([row for row in rows if row.model == name])]
    return "\n".join([*lines, "", *NOTES]) + "\n"


def table(rows: Sequence[Row]) -> Iterator[str]:
    header = (
        "context,format,mean KL divergence,99 % are below,same likeliest token,perplexity ratio,positions"
    )
    yield f"| {header.replace(',', ' | ')} |"
    yield "|---|---|---|---|---|---|---|"
    for r in rows:
        yield (
            f"| {r.ctx:,} | {r.kv_type} | {r.kl:.5f} ± {r.kl_error:.5f} | {r.kl_p99:.4f} | "
            f"{100 * r.top1:.2f} % | {r.ppl_ratio:.4f} | {r.tokens:,} |"
        )


def verdict(rows: Sequence[Row]) -> list[str]:
    """Whether fp8 keeps to its bounds, in one sentence."""
    if not rows:
        return []
    worst_kl, worst_top1 = max(rows, key=lambda r: r.kl), min(rows, key=lambda r: r.top1)
    kept = ["kept" if good else "missed" for good in (worst_kl.kl <= MOST_KL, worst_top1.top1 >= LEAST_TOP1)]
    return [
        "",
        f"What is asked of fp8: a mean divergence of at most {MOST_KL} nats is {kept[0]} (largest: "
        f"{worst_kl.kl:.5f}, {worst_kl.model} at {worst_kl.ctx:,});",
        f"the same likeliest token in {LEAST_TOP1:.0%} of positions is {kept[1]} (least: "
        f"{100 * worst_top1.top1:.2f} %, {worst_top1.model} at {worst_top1.ctx:,}).",
    ]


INTRODUCTION = """\
# What the formats of the KV cache cost

Generated by `make quality-kv ARGS=--exact` (`tests/bench/kv_quality.py`); do not edit.

`--kv-type` keeps keys and values in f16 (the default), fp8 or q8_0, or keys and values apart. Here each
format is compared with f16 of the same model, on the CPU's own kernels: the same text in windows of so many
tokens, of which the second half is scored, as `hetero quality MODEL --kv-type fp8,q8_0 --ctx 4096` does. KL
divergences are in nats.
""".splitlines()

NOTES = """\
## Reading the numbers

- With quantized weights, activations are rounded to 8 bits before each product. A change of the KV cache,
  however small, lets some of them fall to the other side, and that shows in every layer behind it. So no
  format comes as close to f16 there as with float32 weights, whose tables show what the format alone costs.
- Keys are what fp8 costs: scores go through an exponential, and a number of 3 mantissa bits is up to 6 %
  off whatever its scale. q8_0 is off by up to 0.4 % of the largest of 32 values. `k=q8_0,v=fp8` therefore
  loses hardly more than q8_0, and takes 1 to 2 % more memory than fp8.
- These models are small (135 and 270 million weights), so that many tokens are close calls: where the two
  likeliest tokens are as good as equal, anything decides between them.
""".splitlines()


if __name__ == "__main__":
    main()
