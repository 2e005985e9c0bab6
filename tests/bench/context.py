"""What a context costs that was computed before: kept in RAM, on disk, or gone.

    python tests/bench/context.py again              a context of 4,000 tokens, pushed out and asked again
    python tests/bench/context.py turns --llama-venv .venv-bench
                                                     20 users in turn, beside llama-server --cache-ram
    python tests/bench/context.py limit --minutes 20 memory under mixed load, against what was promised

Every answer that is given twice is compared: the text must not depend on where its context came from.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
from load import completion_events
from servers import Server, free_port, llama_binary, metric, running
from workload import text

from hetero import __version__
from hetero.models import resolve
from hetero.plan.devices import usable_cores
from hetero.sizes import parse_size

ANSWER = 24  # tokens
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds to the first text, the text, and the server's own token counts (-1: not told)."""

    first_text: float
    text: str
    prompt_tokens: int
    cached_tokens: int


async def ask(base: str, prompt: str, max_tokens: int = ANSWER) -> Answer:
    """One greedy completion as a stream. Raises RuntimeError when it fails."""
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "cache_prompt": True,
    }  # fmt: skip
    first, parts, usage = None, [], {}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(base, timeout=timeout) as session:
        started = time.perf_counter()
        async for event in completion_events(session, body):
            parts += [choice.get("text", "") for choice in event["choices"]]
            if first is None and any(parts):
                first = time.perf_counter() - started
            usage = event.get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", -1)
    return Answer(first or 0.0, "".join(parts), usage.get("prompt_tokens", -1), cached)


def hetero_command(args: argparse.Namespace, port: int, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "cli", "serve", str(resolve(args.model).path), "--port", str(port)),
        *("--threads", str(args.threads), "--kv-type", args.kv_type, "--log-level", "warning", *more),
    ]


# -- the same context again -------------------------------------------------------------------------


def again(args: argparse.Namespace, folder: Path) -> None:
    """Time to first token of a context: computed, from RAM, and from disk after a restart."""
    rng = random.Random(args.seed)
    flags = ["--kv-tokens", str(args.tokens + 2048), "--ctx", str(args.tokens + 1024)]
    ram, disk = [*flags, "--ram-cache", args.ram_cache], [*flags, "--disk-cache", f"{folder / 'kv'}:4GiB"]
    prompts = [text(rng, args.tokens) for _ in range(args.repeat)]
    port = free_port()
    with running("hetero", hetero_command(args, port, *ram), port, folder / "ram.log", __version__) as server:
        computed, loaded = asyncio.run(_evict_and_ask(server, prompts, rng, args.tokens))
    show("computed", computed)
    show("from RAM", loaded, computed)
    with running("hetero", hetero_command(args, port, *disk), port, folder / "1.log", __version__) as server:
        computed = asyncio.run(_ask_all(server, prompts))
        _wait_until_written(server)
    with running("hetero", hetero_command(args, port, *disk), port, folder / "2.log", __version__) as server:
        asyncio.run(ask(server.base, text(rng, 300)))  # the first step of a process is slower
        loaded = asyncio.run(_ask_all(server, prompts))
    check_same(computed, loaded)
    show("from disk, after a restart", loaded, computed)


async def _evict_and_ask(
    server: Server, prompts: list[str], rng: random.Random, tokens: int
) -> tuple[list[Answer], list[Answer]]:
    await ask(server.base, text(rng, 300))
    computed = await _ask_all(server, prompts)  # each pushes the one before out of the pool
    for _ in range(2):
        await ask(server.base, text(rng, tokens * 3 // 4))
    loaded = await _ask_all(server, prompts)
    check_same(computed, loaded)
    return computed, loaded


async def _ask_all(server: Server, prompts: list[str]) -> list[Answer]:
    return [await ask(server.base, prompt) for prompt in prompts]


def _wait_until_written(server: Server) -> None:
    """Until the number of bytes written to disk has stood still for a second."""
    before = -1.0
    while (now := metric(server.base, "hetero_disk_cache_written_bytes_total")) != before or not now:
        before = now
        time.sleep(1.0)


def check_same(first: list[Answer], second: list[Answer]) -> None:
    for a, b in zip(first, second, strict=True):
        if a.text != b.text:
            raise SystemExit(f"the answer changed:\n{a.text!r}\n{b.text!r}")


def show(name: str, answers: list[Answer], against: list[Answer] | None = None) -> None:
    first = statistics.median(a.first_text for a in answers)
    ratio = ""
    if against is not None:
        ratio = f"  {first / statistics.median(a.first_text for a in against):.3f}x"
    cached = statistics.median(a.cached_tokens for a in answers)
    print(f"{name:28} time to first token {1000 * first:8.1f} ms, {cached:.0f} tokens cached{ratio}")


# -- users in turn ------------------------------------------------------------------------------------


def turns(args: argparse.Namespace, folder: Path) -> None:
    """Users with a context each ask in turn; the pool holds a few of them, RAM holds the others."""
    binary, version = llama_binary(args.llama_venv)
    model, megabytes = resolve(args.model).path, parse_size(args.ram_cache) // MIB
    port, other = free_port(), free_port()
    ours = hetero_command(
        args, port, "--kv-tokens", str(args.pool), "--ctx", "4096", "--ram-cache", args.ram_cache
    )
    rival = [
        *(str(binary), "--model", str(model), "--host", "127.0.0.1", "--port", str(other)),
        *("--threads", str(args.threads), "--threads-batch", str(args.threads), "--no-repack", "--no-webui"),
        *("--parallel", "4", "--kv-unified", "--ctx-size", str(args.pool), "--cache-ram", str(megabytes)),
        *("--metrics",),
    ]
    servers = (("hetero", ours, port, __version__), ("llama-server", rival, other, version))
    medians = {}
    for name, command, at, its_version in servers:
        with running(name, command, at, folder / f"{name}.log", its_version) as server:
            rng = random.Random(args.seed)  # the same text for both
            answers = asyncio.run(_take_turns(server, args, rng))
        medians[name] = statistics.median(a.first_text for a in answers)
        for number in range(args.rounds):
            part = answers[number * args.users : (number + 1) * args.users]
            show(f"{name}, round {number + 1}", part)
        show(f"{name}, all", answers)
    print(f"ratio of the medians: {medians['hetero'] / medians['llama-server']:.2f}x (lower is better)")


async def _take_turns(server: Server, args: argparse.Namespace, rng: random.Random) -> list[Answer]:
    await ask(server.base, text(rng, 300))
    contexts = [text(rng, args.tokens) for _ in range(args.users)]
    answers = []
    for _ in range(args.rounds):
        for user in range(args.users):
            contexts[user] += " " + text(rng, 30)
            answers.append(await ask(server.base, contexts[user]))
            contexts[user] += answers[-1].text
    return answers


# -- the limit ----------------------------------------------------------------------------------------


def limit(args: argparse.Namespace, folder: Path) -> None:
    """Resident memory while more contexts come than RAM may hold, against what was promised at the start."""
    port = free_port()
    more = ["--kv-tokens", str(args.pool), "--ctx", "4096", "--ram-cache", args.ram_cache]
    if args.disk_cache:
        more += ["--disk-cache", f"{folder / 'kv'}:{args.disk_cache}"]
    with running("hetero", hetero_command(args, port, *more), port, folder / "log", __version__) as server:
        process = _serving(port)
        asyncio.run(ask(server.base, text(random.Random(args.seed), 300)))
        start = process.memory_info().rss
        promised = (
            start + parse_size(args.ram_cache) + _planned_pool(args, [*more, "--kv-type", args.kv_type])
        )
        highest, asked = asyncio.run(_mixed_load(server, args, process))
        print(
            f"{asked} requests in {args.minutes} minutes: resident at the start {start / MIB:.0f} MiB, "
            f"at most {highest / MIB:.0f} MiB, promised {promised / MIB:.0f} MiB: "
            f"{(highest - promised) / MIB:+.0f} MiB"
        )


def _serving(port: int) -> psutil.Process:
    for connection in psutil.net_connections("tcp"):
        if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN and connection.pid:
            return psutil.Process(connection.pid)
    raise SystemExit(f"nobody listens on port {port}")


def _planned_pool(args: argparse.Namespace, more: list[str]) -> int:
    """Bytes of the KV pool, of which blocks become resident one by one."""
    command = [sys.executable, "-m", "cli", "plan", str(resolve(args.model).path), "--json", *more]
    plan = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return sum(stage["kv_bytes"] for stage in plan["stages"])


async def _mixed_load(server: Server, args: argparse.Namespace, process: psutil.Process) -> tuple[int, int]:
    """(most resident bytes, requests) while clients come back to their contexts or bring new ones."""
    deadline, highest, asked = time.monotonic() + 60 * args.minutes, 0, 0
    contexts: list[str] = []

    async def client(number: int) -> None:
        nonlocal asked
        rng = random.Random(f"{args.seed}/{number}")
        while time.monotonic() < deadline:
            if contexts and rng.random() < 0.6:
                prompt = rng.choice(contexts) + " " + text(rng, 20)
            else:
                prompt = text(rng, rng.randint(100, 3000))
            if rng.random() < 0.1:
                try:  # gone before the answer is there
                    await asyncio.wait_for(ask(server.base, prompt), 0.3)
                except (TimeoutError, aiohttp.ClientError):
                    continue
            else:
                await ask(server.base, prompt)
            asked += 1
            contexts.append(prompt)
            del contexts[:-60]

    async def watch() -> None:
        nonlocal highest
        while time.monotonic() < deadline:
            highest = max(highest, process.memory_info().rss)
            await asyncio.sleep(0.5)

    await asyncio.gather(watch(), *(client(number) for number in range(6)))
    return highest, asked


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("again", "turns", "limit"))
    parser.add_argument("--llama-venv", type=Path, default=Path(".venv-bench"))
    parser.add_argument("--model", help="path or name; default: the packaged model")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--ram-cache", default="1GiB")
    parser.add_argument("--disk-cache", default="", help="its size, for limit")
    parser.add_argument("--pool", type=int, default=10_000, help="tokens of the device's pool")
    parser.add_argument("--tokens", type=int, default=0, help="of a context; default 4000, turns 2000")
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    args = parser.parse_args()
    args.tokens = args.tokens or (2000 if args.what == "turns" else 4000)
    with tempfile.TemporaryDirectory(prefix="hetero-bench-") as folder:
        {"again": again, "turns": turns, "limit": limit}[args.what](args, Path(folder))
    print(f"seed {args.seed}")


if __name__ == "__main__":
    main()
