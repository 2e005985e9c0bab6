"""/metrics: the engine's own numbers, read when Prometheus asks, and the count of HTTP answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

if TYPE_CHECKING:
    from hetero.async_engine import AsyncEngine

# (metric, attribute of EngineStats, help)
GAUGES = (
    ("hetero_requests_running", "running", "Requests that are being computed."),
    ("hetero_requests_waiting", "waiting", "Requests that wait for their turn or for KV blocks."),
)
COUNTERS = (
    ("hetero_prompt_tokens", "prompt_tokens", "Prompt tokens of admitted requests."),
    ("hetero_cached_tokens", "cached_tokens", "Prompt tokens found in the prefix cache, not computed."),
    ("hetero_generated_tokens", "generated_tokens", "Generated tokens."),
    ("hetero_preemptions", "preemptions", "Requests that gave their KV blocks back to be recomputed later."),
    ("hetero_requests_cancelled", "cancelled", "Requests whose client went away."),
    ("hetero_steps", "steps", "Steps computed."),
    ("hetero_step_seconds", "step_seconds", "Time spent in steps."),
    ("hetero_host_seconds", "host_seconds", "Part of the step time spent outside of the compute graph."),
)
STAGE_COUNTERS = (  # attributes of StageTotals
    ("hetero_stage_busy_seconds", "busy_seconds", "Time that a stage had a step, transfers included."),
    ("hetero_stage_queue_seconds", "queue_seconds", "Time that steps waited for a stage."),
    ("hetero_stage_transfer_seconds", "transfer_seconds", "Part of the busy time outside of the graph."),
    ("hetero_stage_bytes_in", "bytes_in", "Bytes of token ids or hidden rows given to a stage."),
    ("hetero_stage_bytes_out", "bytes_out", "Bytes of hidden rows or logits that came from a stage."),
    ("hetero_stage_restarts", "restarts", "How often a stage was started again after it was lost."),
)
ATTENDED = (  # StageTotals.counters, the value of the label "way"
    ("attended_in_place", "in place"),
    ("attended_gathered", "gathered"),
)
DISK_GAUGES = (  # attributes of DiskStats
    ("hetero_disk_cache_entries", "entries", "Blocks of context on the disk, of all models in the folder."),
    ("hetero_disk_cache_bytes", "bytes", "What they take on the disk."),
    ("hetero_disk_cache_waiting", "waiting", "Blocks that are still to be written to the disk."),
)
DISK_COUNTERS = (
    ("hetero_disk_cache_stored", "stored", "Blocks written to the disk."),
    ("hetero_disk_cache_loaded", "loaded", "Blocks read from the disk."),
    ("hetero_disk_cache_evicted", "evicted", "Blocks removed from the disk for others."),
    ("hetero_disk_cache_damaged", "damaged", "Files on the disk that were not what they should be."),
    ("hetero_disk_cache_failed", "failed", "Blocks that could not be written."),
    ("hetero_disk_cache_dropped", "dropped", "Blocks that were not taken, because too many waited."),
    ("hetero_disk_cache_written_bytes", "bytes_written", "Bytes written to the disk."),
    ("hetero_disk_cache_read_bytes", "bytes_read", "Bytes read from the disk."),
)
HISTOGRAMS = (
    ("hetero_time_to_first_token_seconds", "ttft", "From a request's arrival to its first token."),
    ("hetero_inter_token_seconds", "inter_token", "Between two tokens of a request."),
    ("hetero_queue_seconds", "queue", "From a request's arrival to its first step."),
    ("hetero_request_seconds", "e2e", "From a request's arrival to its end."),
)


class EngineCollector:
    """Turns `AsyncEngine.stats()` into metric families, one call per scrape."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, attribute, text in GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, attribute))
        for name, attribute, text in COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, attribute))
        for name, attribute, text in STAGE_COUNTERS:
            family = CounterMetricFamily(name, text, labels=["stage"])
            for index, totals in enumerate(stats.stages):
                family.add_metric([str(index)], getattr(totals, attribute))
            yield family
        yield from self._stage_shares(stats)
        if stats.disk is not None:
            for name, attribute, text in DISK_GAUGES:
                yield GaugeMetricFamily(name, text, value=getattr(stats.disk, attribute))
            for name, attribute, text in DISK_COUNTERS:
                yield CounterMetricFamily(name, text, value=getattr(stats.disk, attribute))
        text = "KV blocks of a group's pool; of recurrent layers, the last group, states."
        blocks = GaugeMetricFamily("hetero_kv_blocks", text, labels=["group"])
        free = GaugeMetricFamily(
            "hetero_kv_blocks_free", "KV blocks that could be taken now.", labels=["group"]
        )
        for group, (total_blocks, free_blocks) in enumerate(stats.kv_blocks):
            blocks.add_metric([str(group)], total_blocks)
            free.add_metric([str(group)], free_blocks)
        yield blocks
        yield free
        yield from _tiers(stats)
        finished = CounterMetricFamily("hetero_requests_finished", "Ended requests.", labels=["reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
        fraction = stats.host_seconds / stats.step_seconds if stats.step_seconds else 0.0
        yield GaugeMetricFamily(
            "hetero_host_fraction",
            "Part of all step time spent outside of the compute graph.",
            value=fraction,
        )
        if stats.speculation is not None:
            yield from _speculation(stats.speculation)
        for name, attribute, text in HISTOGRAMS:
            yield _histogram(name, text, getattr(stats, attribute))

    def _stage_shares(self, stats: Any) -> Iterator[Metric]:
        busy = GaugeMetricFamily(
            "hetero_stage_busy_fraction", "Part of all step time that a stage had a step.", labels=["stage"]
        )
        attended = CounterMetricFamily(
            "hetero_stage_attended",
            "Parts of steps by how their KV was read, on devices without a kernel for block tables.",
            labels=["stage", "way"],
        )
        again = CounterMetricFamily(
            "hetero_stage_recomputed_tokens",
            "Tokens that count as cached, but that libllama had given up and computed again.",
            labels=["stage"],
        )
        for index, totals in enumerate(stats.stages):
            seconds = stats.step_seconds
            busy.add_metric([str(index)], min(1.0, totals.busy_seconds / seconds) if seconds else 0.0)
            for counter, way in ATTENDED:
                if counter in totals.counters:
                    attended.add_metric([str(index), way], totals.counters[counter])
            if "recomputed_tokens" in totals.counters:
                again.add_metric([str(index)], totals.counters["recomputed_tokens"])
        yield busy
        yield attended
        yield again


def _tiers(stats: Any) -> Iterator[Metric]:
    """Where contexts were found, and what moved for it."""
    found = CounterMetricFamily(
        "hetero_kv_prompt_tokens",
        "Prompt tokens of ended requests by where their KV came from.",
        labels=["source"],
    )
    for source, tokens in stats.tokens_from.items():
        found.add_metric([source], tokens)
    moves = stats.moves
    moved = CounterMetricFamily(
        "hetero_kv_moved_bytes", "Bytes of KV blocks copied between devices and host memory.", labels=["to"]
    )
    moved.add_metric(["host"], moves.spilled_bytes)
    moved.add_metric(["device"], moves.loaded_bytes)
    evicted = CounterMetricFamily(
        "hetero_kv_evictions", "KV blocks of cached contexts that had to leave a tier.", labels=["tier"]
    )
    evicted.add_metric(["device"], moves.left_device)
    evicted.add_metric(["host"], moves.left_host)
    slots = GaugeMetricFamily("hetero_kv_host_slots", "KV blocks that host memory holds.", labels=["group"])
    free = GaugeMetricFamily("hetero_kv_host_slots_free", "Of these, not in use.", labels=["group"])
    for group, (total, unused) in enumerate(stats.host_slots):
        slots.add_metric([str(group)], total)
        free.add_metric([str(group)], unused)
    yield from (found, moved, evicted, slots, free)


def _speculation(stats: Any) -> Iterator[Metric]:
    drafted = CounterMetricFamily(
        "hetero_draft_tokens", "Guessed tokens that were computed.", labels=["proposer"]
    )
    accepted = CounterMetricFamily(
        "hetero_draft_tokens_accepted",
        "Guessed tokens that were right, by their place in the guess.",
        labels=["proposer", "position"],
    )
    for proposer, count in stats.drafted.items():
        drafted.add_metric([proposer], count)
        for position, right in enumerate(stats.accepted[proposer]):
            accepted.add_metric([proposer, str(position)], right)
    yield drafted
    yield accepted
    seconds = CounterMetricFamily("hetero_draft_model_seconds", "Time that the draft model took.")
    seconds.add_metric([], stats.draft_seconds)
    yield seconds
    yield _histogram("hetero_draft_length", "Guessed tokens computed with a next token.", stats.chosen)
    yield _histogram(
        "hetero_request_step_tokens", "Tokens that a request got from one step.", stats.request_tokens
    )


def _histogram(name: str, text: str, values: Any) -> Metric:
    """`values`: ascending bounds, counts (one more than bounds: the rest), and the sum of all values."""
    buckets, below = [], 0
    for bound, count in zip([*map(str, values.bounds), "+Inf"], values.counts, strict=True):
        below += count
        buckets.append((bound, below))
    family = HistogramMetricFamily(name, text)
    family.add_metric([], buckets, sum_value=values.sum)
    return family


class Metrics:
    """A registry of the application's own, so that two servers in one process do not meet."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine))
        self._answers = Counter(
            "hetero_http_answers", "HTTP answers.", ["route", "status"], registry=self._registry
        )

    def count(self, route: str, status: int) -> None:
        self._answers.labels(route, str(status)).inc()

    async def handle(self, request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )
