"""What the formats of the KV cache cost, written down as docs/quality.md.

    make quality-kv
    python tests/bench/kv_quality.py --ctx 512 --tokens 2048       without what --exact adds

Each model reads the same text with its KV cache in f16 and in every other format, side by side. What was
measured is kept (in HETERO_CACHE_DIR) until the sources of the kernels change, so that a run that was
stopped goes on where it was. `--exact` also measures what the numbers are to be held against: copies of the
models whose weights are float32, ggml's operators in place of our kernels, and other scalings (kv_scalings).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import gguf as gguf_package
import numpy as np
import platformdirs
from gguf.quants import dequantize

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gguf_tools import Raw, rewrite
from kv_scalings import scalings
from places import gemma3, smollm2

from backends.cpu.layers import CpuLayers
from backends.ggml.layers import DeviceLayers
from backends.ggml.models.config import read_config
from backends.ggml.stage import GgmlStage
from backends.kv_format import row_bytes
from hetero.commands.quality import compare_all
from hetero.commands.quality_kv import Formats, compare_formats, prepare_formats
from hetero.kv_types import KVTypes, parse_several
from hetero.screen import loading
from hetero.settings import Settings
from hetero.text.tokenizer import Tokenizer
from hetero.windows import cut, prepare_model, read_tokens
from quant.gguf import open_gguf
from quant.quality import Summary

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "quality.md"
KV_TYPES = "fp8,q8_0,k=q8_0,v=fp8"
CONTEXTS = (512, 2048, 4096)
EXACT_CTX = 512
MOST_KL, LEAST_TOP1 = 0.01, 0.98  # what is asked of fp8
EXACT = "weights in float32"
OTHER_PROGRAM = "f16, ggml's operators"


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
    parser.add_argument("--exact", action="store_true", help="also what to hold the numbers against")
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
                short = Formats(
                    str(path), tuple(kv_types), args.text, max(EXACT_CTX, args.tokens // 3), EXACT_CTX
                )
                rows += other_program(path, short) + exactly(path, Path(folder), short)
    tried = scalings_of(models[0]) if args.exact else []
    sizes = {path.stem: bytes_per_token(path, kv_types) for path in models}
    args.out.write_text(page(rows, sizes, tried), encoding="utf-8")
    print(f"{args.out} is written")


def measured(path: Path, name: str, wanted: Formats) -> list[Row]:
    """A row for each format."""

    def measure() -> list[Row]:
        models = prepare_formats(Settings(), wanted)
        with loading() as progress:
            found = compare_formats(Settings(), models, wanted.kv_types, windows_of(path, wanted), progress)
        return [row_of(name, wanted.ctx, one.label, one.summary) for one in found]

    kinds = ",".join(map(str, wanted.kv_types))
    known = remembered(f"{name}, {wanted.ctx} tokens: {kinds}", path, wanted, lambda: plain(measure()))
    return [Row(**row) for row in known]


def exactly(path: Path, folder: Path, wanted: Formats) -> list[Row]:
    """The same for a copy of the model whose weights need no rounding of activations."""
    copy = folder / f"{path.stem}.f32.gguf"
    name = f"{path.stem}, {EXACT}"

    def measure() -> list[Any]:
        weights = {
            t.name: Raw(
                "F32", tuple(map(int, t.shape)), dequantize(t.data, t.tensor_type).astype("<f4").tobytes()
            )
            for t in gguf_package.GGUFReader(path).tensors
        }
        rewrite(path, copy, {}, weights)
        rows = measured(copy, name, dataclasses.replace(wanted, model=str(copy)))
        copy.unlink()
        return plain(rows)

    kinds = ",".join(map(str, wanted.kv_types))
    return [Row(**row) for row in remembered(f"{name}: {kinds}", path, wanted, measure)]


def other_program(path: Path, wanted: Formats) -> list[Row]:
    """f16 on ggml's operators against f16 on our kernels: two programs that are both right."""

    def measure() -> list[Any]:
        kinds: Iterator[Any] = iter((CpuLayers, DeviceLayers))
        models = [prepare_model(Settings(), str(path), wanted.ctx) for _ in range(2)]
        with mock.patch.object(GgmlStage, "_kind", lambda self: next(kinds)), loading() as progress:
            windows = windows_of(path, wanted)
            (found,) = compare_all(Settings(), models, ["ours", "ggml's"], windows, progress)
        return plain([row_of(path.stem, wanted.ctx, OTHER_PROGRAM, found)])

    known = remembered(f"{path.stem}: {OTHER_PROGRAM}", path, wanted, measure)
    return [Row(**row) for row in known]


def scalings_of(path: Path) -> list[Any]:
    """[keys or values, way, mean KL divergence, top-1] of each way to scale."""

    def measure() -> list[Any]:
        return [[w, n, s.kl_mean.value, s.top1] for w, n, s in scalings(path, EXACT_CTX)]

    return remembered(f"{path.stem}: scalings", path, None, measure)


def windows_of(path: Path, wanted: Formats) -> np.ndarray:
    tokenizer = Tokenizer(path)
    return cut(read_tokens(tokenizer, wanted.text, wanted.tokens), wanted.ctx, tokenizer)


def row_of(model: str, ctx: int, kind: str, s: Summary) -> Row:
    kl = s.kl_mean
    return Row(model, ctx, kind, s.tokens, kl.value, kl.error, s.kl_p99, s.top1, s.ppl_ratio.value)


def plain(rows: Sequence[Row]) -> list[Any]:
    return [dataclasses.asdict(row) for row in rows]


def remembered(what: str, path: Path, wanted: Formats | None, measure: Callable[[], list[Any]]) -> list[Any]:
    """What was found earlier, or else is found now."""
    store = kept_at(what, path, wanted)
    if store.exists():
        return json.loads(store.read_text(encoding="utf-8"))
    print(what, flush=True)
    found = measure()
    store.parent.mkdir(parents=True, exist_ok=True)
    store.write_text(json.dumps(found), encoding="utf-8")
    return found


def kept_at(what: str, path: Path, wanted: Formats | None) -> Path:
    """A file named by all that the numbers depend on: model, text and kernels."""
    text = (wanted and wanted.text) or ROOT / "hetero" / "data" / "quality.txt"
    digest = hashlib.sha256()
    for part in (what, path.name, *((wanted.tokens, wanted.ctx) if wanted else ())):
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


def page(rows: Sequence[Row], sizes: dict[str, dict[str, int]], tried: Sequence[Any] = ()) -> str:
    """docs/quality.md."""
    asked = [row for row in rows if EXACT not in row.model and row.kv_type.split()[0] == "fp8"]
    lines = [*INTRODUCTION, *verdict(asked)]
    lines += ["", "## Memory", "", "| model | format | bytes per token | tokens in the same memory |"]
    lines.append("|---|---|---|---|")
    for name, kinds in sizes.items():
        lines += [
            f"| {name} | {kind} | {size:,} | {kinds['f16'] / size:.2f}x |" for kind, size in kinds.items()
        ]
    for name in dict.fromkeys(row.model for row in rows):
        lines += ["", f"## {name}", "", *table([row for row in rows if row.model == name])]
    lines += ["", *NOTES]
    if tried:
        lines += [
            "",
            *SCALINGS,
            "",
            "| | way | mean KL divergence | same likeliest token |",
            "|---|---|---|---|",
        ]
        lines += [f"| {which} | {way} | {kl:.5f} | {100 * top1:.2f} % |" for which, way, kl, top1 in tried]
    return "\n".join(lines) + "\n"


SCALINGS = f"""\
## Scalings that were tried

On keys and values of the first model with float32 weights, in numpy, over the second half of {EXACT_CTX}
tokens; the other of the two is f16. `python tests/bench/kv_scalings.py` prints it.
""".splitlines()


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

Generated by `make quality-kv` (`tests/bench/kv_quality.py`); do not edit.

`--kv-type` keeps keys and values in f16 (the default), fp8 or q8_0, or keys and values apart. Here each
format is compared with f16 of the same model, on the CPU's own kernels: the same text in windows of so many
tokens, of which the second half is scored, as `hetero quality MODEL --kv-type fp8,q8_0 --ctx 4096` does. KL
divergences are in nats.
""".splitlines()

NOTES = """\
## Reading the numbers

- With quantized weights, activations are rounded to 8 bits before each product. A change of the KV cache,
  however small, lets some of them fall to the other side, and that shows in every layer behind it. Two
  programs that are both right differ in the same way, as where the same model, f16 cache and all, runs on
  ggml's operators (rows "f16, ggml's operators"). What the formats alone cost, float32 weights show.
- Keys are what fp8 costs: scores go through an exponential, and a number of 3 mantissa bits is up to 6 %
  off whatever its scale. q8_0 is off by up to 0.4 % of the largest of 32 values. `k=q8_0,v=fp8` therefore
  loses hardly more than q8_0, and takes 1 to 3 % more memory than fp8.
- These models are small (135 and 270 million weights), so that many tokens are close calls: where the two
  likeliest tokens are as good as equal, anything decides between them.
""".splitlines()


if __name__ == "__main__":
    main()
