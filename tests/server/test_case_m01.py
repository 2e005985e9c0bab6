"""Reported case m01: contexts on a disk, damaged in every way, under a server that must not care."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from pathlib import Path

import pytest
from scale import FULL

from hetero.kv.disk_entry import HEADER_BYTES, VERSION
from hetero.kv_types import parse_kv_types

from .real import Oracle, RealClient, RealServer, read_until, real_server, scaled, talking_to
from .test_cases_load import COMPLETIONS, WORDS, Job

FLAGS = ("--kv-tokens", "2048", "--ctx", "1024", "--max-num-seqs", "8")


def prompts(oracle: Oracle, count: int, rng: random.Random, length: int) -> list[Job]:
    jobs = []
    for i in range(count):
        text = f"Story {i} of {rng.randrange(10**6)}: {' '.join(rng.choices(WORDS, k=2 * length))}"
        prompt = oracle.encode(text)[:length]
        jobs.append(Job(prompt, 6, oracle(prompt, 6), ignore_eos=True))
    return jobs


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/??/*") if path.is_file())


def damage(folder: Path, strangers: list[bytes]) -> set[Path]:
    """Hurt three in four files, each in one of many ways. The paths of those that are not good any more."""
    bad = set()
    ways = ["flip", "cut", "zero", "empty", "stranger", "version", "fingerprint"]
    for i, path in enumerate(entries(folder)):
        if i % 4 == 3:
            continue
        data = bytearray(path.read_bytes())
        if len(data) <= HEADER_BYTES:  # nobody has looked at it since it was damaged
            bad.add(path)
            continue
        way = ways[i // 4 * 3 % 7 if i % 4 == 0 else (i + i // 4) % 7]
        if way == "flip":
            data[i * 7919 % len(data)] ^= 1 << i % 8
        elif way == "cut":
            del data[i * 7919 % len(data) :]
        elif way == "zero":
            data = bytearray(len(data))
        elif way == "empty":
            data = bytearray()
        elif way == "stranger":  # a good entry, of other tokens or another model
            data = bytearray(strangers[i % len(strangers)])
        elif way == "version":
            data[8:12] = (VERSION + 1).to_bytes(4, "little")
        else:
            data[20] ^= 1
        path.write_bytes(data)
        bad.add(path)
    return bad


async def until_written(client: RealClient, folder: Path, jobs: list[Job], blocks: int) -> list[int]:
    """Ask, one after the other, until all blocks are on the disk: what the device needs sooner than the disk
    has it is dropped. How many tokens of each prompt were found at first."""
    deadline, found = time.monotonic() + 60, []
    for n, job in enumerate(jobs, 1):
        usage = await job.check(client, stream=False)
        found.append(usage["prompt_tokens_details"]["cached_tokens"])
        for tries in itertools.count(1):
            metrics = await client.until_idle()
            keys = {
                path.stem for path in entries(folder)
            }  # a block has two files while one replaces the other
            if len(keys) >= blocks * n and not metrics["hetero_disk_cache_waiting"]:
                break
            assert time.monotonic() < deadline, f"{len(entries(folder))} files of {n} prompts"
            await asyncio.sleep(0.05)
            if tries % 20 == 0:
                await job.check(client, stream=False)
    return found


async def with_neighbours(server: RealServer, client: RealClient, jobs: list[Job], others: list[Job]) -> None:
    """All jobs at once, while streams of other prompts run; every answer is the oracle's."""
    body = {"prompt": "Unrelated:", "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0}
    async with client.session.post(f"{server.base}{COMPLETIONS}", json=body) as running:
        await read_until(running, 2)
        checks = [job.check(client, stream=i % 2 == 0) for i, job in enumerate(jobs + others)]
        await asyncio.gather(*checks)


async def ask_all(client: RealClient, jobs: list[Job]) -> list[int]:
    """One after the other; how many tokens of each prompt were found."""
    found = []
    for job in jobs:
        usage = await job.check(client, stream=False)
        found.append(usage["prompt_tokens_details"]["cached_tokens"])
    return found


EVERY_DAY = [("smollm2", "f16", "off"), ("gemma3", "f16", "off")]
NOW_AND_THEN = [("smollm2", "k=q8_0,v=fp8", "off"), ("gemma3", "fp8", "64MiB"), ("smollm2", "f16", "32MiB")]


@pytest.mark.parametrize(("model", "kv_type", "ram"), EVERY_DAY + NOW_AND_THEN if FULL else EVERY_DAY)
async def test_m01_damaged_entries_are_misses(
    model: str, kv_type: str, ram: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(f"{model}_path")
    if kv_type == "f16":
        oracle = request.getfixturevalue("oracle" if model == "smollm2" else "gemma3_oracle")
    else:
        oracle = Oracle(path, parse_kv_types(kv_type))
        request.addfinalizer(oracle.close)
    rng = random.Random(model)
    length = scaled(100, 400) if model == "smollm2" else scaled(100, 700)
    jobs = prompts(oracle, scaled(5, 20), rng, length)
    neighbours = prompts(oracle, 4, rng, 80)
    later = prompts(oracle, scaled(3, 50), rng, 60)
    blocks = length // 16
    cache = tmp_path / "cache"
    flags = (*FLAGS, "--disk-cache", f"{cache}:1GiB", "--kv-type", kv_type, "--ram-cache", ram)

    (tmp_path / "first").mkdir()
    server = RealServer(tmp_path / "first", path, *flags)
    try:
        async with talking_to(server) as client:
            assert max(await until_written(client, cache, jobs, blocks)) < 16
    finally:
        server.kill()  # as kill -9 does
    if FULL or model == "smollm2":
        (tmp_path / "second").mkdir()
        with real_server(tmp_path / "second", path, *flags) as server:
            async with talking_to(server) as client:
                found, whole = await ask_all(client, jobs), 16 * ((length - 1) // 16)
                assert min(found) >= whole, f"not all was found again: {found}, {server.log}"
        assert "WARNING" not in server.log, server.log

    good = entries(cache)
    strangers = [good[0].read_bytes(), good[-1].read_bytes()[:HEADER_BYTES], b"GGUF" + bytes(100)]
    bad = damage(cache, strangers)
    assert len(bad) > len(good) / 2
    (tmp_path / "third").mkdir()
    with real_server(tmp_path / "third", path, *flags) as server:
        async with talking_to(server) as client:
            await with_neighbours(server, client, jobs, neighbours)
            await client.check_alive()
            assert server.log.count("is not used and removed") == 1, server.log
            await ask_all(client, later)
            await until_written(client, cache, jobs, blocks)  # anew
            damage(cache, strangers)  # now under the running server
            await with_neighbours(server, client, jobs, neighbours)
            await ask_all(client, later + jobs)
            metrics = await client.until_idle()
            assert metrics["hetero_disk_cache_damaged_total"] > 0
