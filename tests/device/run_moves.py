"""Prints, as JSON, what becomes of blocks that come and go; a process of its own, for another ggml build.

    run_moves.py MODEL DEVICE

Random blocks are loaded while a step computes, and spilled again to other slots. Prints {"asynchronous":
whether the device copies while it computes, "pinned": pieces of host memory that it reaches by itself,
"same": bytes that came back as they were, "bytes": all of them}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from moves_tools import batch, moves, spec_of, step  # noqa: E402  found through the path above
from worker_tools import Model  # noqa: E402

from backends.ggml.devices import open_device  # noqa: E402
from backends.ggml.moves import PinnedMemory  # noqa: E402
from backends.ggml.stage import GgmlStage  # noqa: E402


def main() -> None:
    model = Model(Path(sys.argv[1]))
    device = open_device(sys.argv[2])
    stage = GgmlStage(model.gguf, model.config, device, spec_of(model))
    host, rng = stage.host_memory, np.random.default_rng(0)
    assert host is not None and isinstance(host._allocate, PinnedMemory)
    before, after, blocks = [0, 1, 2, 9], [5, 11, 12, 3], [7, 8, 20, 3]
    groups = range(model.num_groups)
    for group in groups:
        for slot in before:
            host.view(group, slot)[:] = rng.integers(0, 256, host.slot_bytes(group), np.uint8)
    logits = step([stage], batch(model, [40], 0, [5], loads=moves(model, blocks, before)))
    assert np.array_equal(step([stage], batch(model, [40], 0, [5])), logits)
    step([stage], batch(model, spills=moves(model, blocks, after)))
    same = total = 0
    for group in groups:
        for one, other in zip(before, after, strict=True):
            same += int((host.view(group, one) == host.view(group, other)).sum())
            total += host.slot_bytes(group)
    pinned, kept = host._allocate.pieces, host.view(0, 5)
    want = kept.copy()
    stage.close()
    assert np.array_equal(kept, want)
    del kept
    print(json.dumps({"asynchronous": device.asynchronous, "pinned": pinned, "same": same, "bytes": total}))


if __name__ == "__main__":
    main()
