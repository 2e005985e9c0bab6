"""Writes docs/grafana/hetero.json, the dashboard for Grafana: `python tests/make_dashboard.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[1] / "docs" / "grafana" / "hetero.json"
RATE = "[$__rate_interval]"


def quantiles(metric: str) -> list[tuple[str, str]]:
    return [
        (f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{RATE})))", f"p{round(100 * q)}")
        for q in (0.5, 0.9, 0.95, 0.99)
    ]


# title, unit, [(query, legend)]
PANELS: tuple[tuple[str, str, list[tuple[str, str]]], ...] = (
    ("Time to first token", "s", quantiles("hetero_time_to_first_token_seconds")),
    ("Time between tokens", "s", quantiles("hetero_inter_token_seconds")),
    ("Time in the queue", "s", quantiles("hetero_queue_seconds")),
    ("Requests", "short", [("hetero_requests_running", "running"), ("hetero_requests_waiting", "waiting")]),
    (
        "Tokens",
        "short",
        [
            (f"rate(hetero_generated_tokens_total{RATE})", "generated a second"),
            (f"rate(hetero_prompt_tokens_total{RATE})", "of prompts a second"),
        ],
    ),
    (
        "Where prompts' tokens came from",
        "percentunit",
        [
            (
                f"sum by (source) (rate(hetero_kv_prompt_tokens_total{RATE})) / ignoring(source) group_left "
                f"sum(rate(hetero_kv_prompt_tokens_total{RATE}))",
                "{{source}}",
            )
        ],
    ),
    (
        "KV cache in use",
        "percentunit",
        [
            ("1 - hetero_kv_blocks_free / hetero_kv_blocks", "device, group {{group}}"),
            ("1 - hetero_kv_host_slots_free / (hetero_kv_host_slots > 0)", "host memory, group {{group}}"),
        ],
    ),
    ("Stages at work", "percentunit", [(f"rate(hetero_stage_busy_seconds_total{RATE})", "stage {{stage}}")]),
    (
        "Outside of the devices",
        "percentunit",
        [(f"rate(hetero_host_seconds_total{RATE}) / rate(hetero_step_seconds_total{RATE})", "of step time")],
    ),
    (
        "Guesses that were right",
        "percentunit",
        [
            (
                f"sum(rate(hetero_draft_tokens_accepted_total{RATE})) "
                f"/ sum(rate(hetero_draft_tokens_total{RATE}))",
                "of guessed tokens",
            )
        ],
    ),
    (
        "Trouble",
        "short",
        [
            (f"rate(hetero_preemptions_total{RATE})", "preemptions a second"),
            (
                f"sum by (status) (rate(hetero_http_answers_total{{status=~'4..|5..'}}{RATE}))",
                "HTTP {{status}} a second",
            ),
            ("sum(hetero_stage_restarts_total)", "stages started again"),
        ],
    ),
    (
        "Disk cache",
        "short",
        [
            ("hetero_disk_cache_entries", "blocks"),
            ("hetero_disk_cache_waiting", "blocks to be written"),
            (f"rate(hetero_disk_cache_dropped_total{RATE})", "dropped a second"),
        ],
    ),
)


def dashboard() -> dict[str, Any]:
    panels = []
    for i, (title, unit, queries) in enumerate(PANELS):
        panels.append(
            {
                "id": i + 1,
                "type": "timeseries",
                "title": title,
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "gridPos": {"x": 8 * (i % 3), "y": 8 * (i // 3), "w": 8, "h": 8},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": chr(65 + k), "expr": query, "legendFormat": legend}
                    for k, (query, legend) in enumerate(queries)
                ],
            }
        )
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "title": "hetero",
        "uid": "hetero",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
