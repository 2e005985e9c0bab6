"""A stage whose steps take no time but say they did: what a device of a known speed would report."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from backends.base import BatchLike, DeviceInfo, DeviceSpec
from backends.ggml.models.config import ModelConfig
from backends.ggml.stage import StageSpec
from hetero.plan.devices import DeviceChoice

GIB = 1 << 30
PER_TOKEN = 1e-4  # seconds of a layer without a window, per row; three times that with one
FIXED = 1e-3  # of a layer, whatever the step
PER_ATTENDED = 1e-7  # per token that a row attends
EMBED, HEAD = 2e-5, 5e-3  # per row


@dataclass
class FakeStage:
    """Computes nothing. `slowness` multiplies the seconds that it says a step took."""

    config: ModelConfig
    spec: StageSpec
    slowness: float = 1.0
    graph_seconds: float = 0.0
    argmax: np.ndarray | None = None
    closed: bool = False
    _rows: int = 0

    def layer_seconds(self, layer: int, contexts: np.ndarray) -> float:
        """`contexts`: for each row, the tokens before it and itself."""
        window = self.config.layer_windows[layer]
        attended = contexts if window is None else np.minimum(contexts, window)
        per_row = PER_TOKEN * (1 if window is None else 3)
        return FIXED + len(contexts) * per_row + PER_ATTENDED * int(attended.sum())

    def prepare(self, batch: BatchLike, hidden: np.ndarray | None) -> None:
        n, spec = len(batch.positions), self.spec
        assert (hidden is None) == (spec.first == 0)
        assert hidden is None or hidden.shape == (n, self.config.n_embd)
        assert n <= spec.max_tokens and len(batch.logits_rows) <= spec.max_logits
        for slots, tables, blocks in zip(
            batch.slot_mapping, batch.block_tables, spec.num_blocks, strict=True
        ):
            assert len(slots) == n and tables.max() < blocks and slots.max() < 16 * blocks
        assert all(copy.dst < spec.num_blocks[copy.group] for copy in batch.copies)
        contexts = np.asarray(batch.positions) + 1
        seconds = sum(self.layer_seconds(layer, contexts) for layer in range(spec.first, spec.last))
        seconds += EMBED * n if spec.first == 0 else 0.0
        seconds += HEAD * len(batch.logits_rows) if spec.last == self.config.n_layer else 0.0
        self.graph_seconds, self._rows = seconds * self.slowness, n

    def compute(self) -> np.ndarray:
        return np.zeros((self._rows, self.config.n_embd), np.float32)

    def memory(self) -> dict[str, int]:
        return {"weights": 0, "kv": 0, "compute": 0}

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeDevices:
    """Opens fake stages; `slowness` by label. Remembers what was opened."""

    config: ModelConfig
    slowness: dict[str, float] = field(default_factory=dict)
    opened: list[tuple[str, FakeStage]] = field(default_factory=list)

    def open(self, choice: DeviceChoice, spec: StageSpec) -> FakeStage:
        stage = FakeStage(self.config, spec, self.slowness.get(choice.label, 1.0))
        self.opened.append((choice.label, stage))
        return stage


def cpu(label: str, core: int = 0, free: int = 8 * GIB) -> DeviceChoice:
    """A CPU device of one thread, pinned to a core."""
    info = DeviceInfo("CPU", "cpu", "a processor", 16 * GIB, free, "CPU", "CPU")
    return DeviceChoice(info, DeviceSpec("CPU", "CPU", 1, (core,)), label)


def gpu(label: str, free: int = 8 * GIB) -> DeviceChoice:
    """A card with a memory of its own."""
    info = DeviceInfo(label, "gpu", "a card", 16 * GIB, free, f"pci-{label}", "CUDA")
    return DeviceChoice(info, DeviceSpec(label, f"pci-{label}"), label)
