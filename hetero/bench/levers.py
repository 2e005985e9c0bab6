"""What there is to tune, for a model on a machine."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.bench.search import Lever
from hetero.config import SettingError, load
from hetero.kv_types import parse_kv_types
from hetero.settings import OBJECTIVES, SPECS, Settings

LOSSLESS = ("max_num_batched_tokens", "max_num_seqs", "spec", "threads", "pipeline_depth", "objective")
LEVERS = (*LOSSLESS, "kv_type")


class LeverError(ValueError):
    """A lever that there is not: one line."""


def default_levers(settings: Settings, threads: int, devices: int, with_kv: bool) -> list[Lever]:
    """The levers and their values: around the settings as they are.

    `threads` compute by the setting of this name, 0: it decides nothing. `with_kv`: also formats of the KV
    cache, which change answers a little. Levers of several devices only where there are several.
    """
    chunk, seqs = settings.max_num_batched_tokens, settings.max_num_seqs
    found = [
        Lever("max_num_batched_tokens", _numbers(chunk, (128, 256, 512, 1024, 2048))),
        Lever("max_num_seqs", _numbers(seqs, (4, 8, 16, 32, 64))),
        Lever("spec", tuple(v for v in ("off", "ngram", "store") if v != settings.spec)),
    ]
    if threads:
        found.append(Lever("threads", _numbers(threads, {max(1, threads - 1), max(1, threads // 2)})))
    if with_kv:
        kinds = ("f16", "q8_0", "fp8", "k=q8_0,v=fp8")
        found.append(Lever("kv_type", tuple(k for k in kinds if parse_kv_types(k) != settings.kv_type)))
    if devices > 1:
        depths = _numbers(settings.pipeline_depth or devices, (1, devices, devices + 1))
        found.append(Lever("pipeline_depth", depths))
        found.append(Lever("objective", tuple(o for o in OBJECTIVES if o != settings.objective)))
    return [lever for lever in found if lever.values]


def parse_lever(text: str) -> Lever:
    """`max_num_seqs=8,16`, or `kv_type=f16;k=q8_0,v=fp8` where values have commas. Raises LeverError."""
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in SPECS or name in ("model", "host", "port"):
        raise LeverError(f"--lever {text}: {name!r} is not a setting that can be tuned")
    parts = tuple(v.strip() for v in values.split(";" if ";" in values or name == "kv_type" else ","))
    for value in parts:
        try:
            load({name: value}, {}, None)
        except SettingError as error:
            raise LeverError(f"--lever {text}: {error}") from None
    return Lever(name, tuple(dict.fromkeys(parts)))


def _numbers(now: int, values: Sequence[int] | set[int]) -> tuple[str, ...]:
    return tuple(str(v) for v in sorted(values) if v != now)
