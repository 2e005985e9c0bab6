"""Whether `hetero bench` and aiperf see the same times: both ask the same server, which answers by a script.

    python tests/bench/agreement.py --aiperf-venv .venv-aiperf

The server's delays are drawn from the number of each request, the same for both, so that what differs is how
they measure. Fails where a percentile differs by more than 10 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from aiohttp import web

from hetero.bench.client import Target
from hetero.bench.distributions import Lengths
from hetero.bench.load import Load, run_load
from hetero.bench.own_server import free_port
from hetero.bench.results import Limits, summarize
from hetero.bench.workload import WORKLOADS, Sizes

PROMPT, ANSWER = 50, 40  # tokens
PERCENTILES = ("p50", "p90", "p95", "p99")
NAMES = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}
MOST = 0.1  # part by which a percentile may differ
# A tokenizer for aiperf, which counts prompts' tokens by itself: a token for each byte, no download.
TOKENIZER = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*letters, "<end>"])}, merges=[]))
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
PreTrainedTokenizerFast(
    tokenizer_object=made, eos_token="<end>", bos_token="<end>", pad_token="<end>"
).save_pretrained(sys.argv[1])
"""


class Scripted:
    """Answers every request with as many tokens as it wants, after delays drawn from the request's number."""

    def __init__(self) -> None:
        self._number = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def again(self, request: web.Request) -> web.Response:
        self._number = 0
        return web.Response()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body, rng = await request.json(), random.Random(self._number)
        self._number += 1
        tokens = body.get("max_tokens") or body["max_completion_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(**changed: Any) -> None:
            event = {
                "id": "x",
                "object": "chat.completion.chunk",
                "created": 1,
                "model": "scripted",
                **changed,
            }
            await response.write(f"data: {json.dumps(event)}\n\n".encode())

        await asyncio.sleep(rng.lognormvariate(-1.4, 0.5))
        for number in range(tokens):
            if number:
                await asyncio.sleep(rng.uniform(0.01, 0.05))
            delta = {"role": "assistant", "content": "a"}  # one token of TOKENIZER
            await send(choices=[{"index": 0, "delta": delta, "finish_reason": None}])
        await send(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
        usage = {"prompt_tokens": PROMPT, "completion_tokens": tokens, "total_tokens": PROMPT + tokens}
        await send(choices=[], usage=usage)
        await response.write(b"data: [DONE]\n\n")
        return response


def serve(port: int) -> None:
    scripted, app = Scripted(), web.Application()
    app.router.add_get("/v1/models", scripted.models)
    app.router.add_get("/again", scripted.again)
    app.router.add_post("/v1/chat/completions", scripted.chat)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def by_hetero(url: str, clients: int, requests: int) -> dict[str, dict[str, float]]:
    """Milliseconds, by metric and percentile."""
    sizes = Sizes(Lengths("fixed", PROMPT), Lengths("fixed", ANSWER))
    sessions = WORKLOADS["chat"].sessions(1, requests, sizes)
    found = summarize(
        run_load(Target("scripted", url, "scripted"), sessions, Load(concurrency=clients), 1), Limits()
    )
    if found.failed:
        raise SystemExit(f"{found.failed} of {requests} requests failed: {found.errors}")
    return {name: {p: 1e3 * getattr(found, name)[p] for p in PERCENTILES} for name in NAMES}


def by_aiperf(url: str, clients: int, requests: int, venv: Path, folder: Path) -> dict[str, dict[str, float]]:
    """The same."""
    programs = venv / ("Scripts" if os.name == "nt" else "bin")
    tokenizer = folder / "tokenizer"
    subprocess.run([programs / "python", "-c", TOKENIZER, tokenizer], check=True, capture_output=True)
    command = [
        *(programs / "aiperf", "profile", "--model", "scripted", "--url", url, "--endpoint-type", "chat"),
        *("--streaming", "--tokenizer", tokenizer, "--concurrency", clients, "--request-count", requests),
        *("--isl", PROMPT, "--osl", ANSWER, "--artifact-dir", folder / "artifacts", "--ui", "none"),
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=folder)
    reports = sorted((folder / "artifacts").rglob("profile_export_aiperf.json"))
    if done.returncode or not reports:
        raise SystemExit(f"aiperf failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    report = json.loads(reports[0].read_text(encoding="utf-8"))
    return {name: {p: report[theirs][p] for p in PERCENTILES} for name, theirs in NAMES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--aiperf-venv", type=Path, default=Path(".venv-aiperf"))
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        return serve(args.serve)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(port)])
    try:
        wait(url)
        ours = by_hetero(url, args.clients, args.requests)
        wait(url)
        with tempfile.TemporaryDirectory() as folder:
            theirs = by_aiperf(url, args.clients, args.requests, args.aiperf_venv.resolve(), Path(folder))
    finally:
        process.terminate()
        process.wait()
    sys.exit(show(ours, theirs))


def wait(url: str) -> None:
    """Until it is there, and begins its script again."""
    for _ in range(200):
        try:
            urllib.request.urlopen(f"{url}/again", timeout=2).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit("the scripted server does not come up")


def show(ours: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]]) -> int:
    """The table, and 1 where they do not agree."""
    apart = 0.0
    print("| ms | | hetero bench | aiperf | |\n|---|---|---:|---:|---:|")
    for name in NAMES:
        for percentile in PERCENTILES:
            one, other = ours[name][percentile], theirs[name][percentile]
            apart = max(apart, abs(one / other - 1))
            print(f"| {name} | {percentile} | {one:.1f} | {other:.1f} | {one / other:.3f}x |")
    print(f"\nAt most {apart:.1%} apart.")
    return int(apart > MOST)


if __name__ == "__main__":
    main()
