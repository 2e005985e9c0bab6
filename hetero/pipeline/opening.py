"""Opens the stages of a model where their devices are: here, in a child process, on another machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from backends.base import DeviceSpec, StageBackend
from backends.ggml.attention_layout import MAX_VIEWS
from backends.ggml.models.config import ModelConfig
from backends.ggml.stage import GgmlStage, StageSpec
from backends.llama.config import LlamaConfig
from backends.llama.spec import LlamaSpec
from hetero.batch import Batch
from hetero.kv.groups import KVGroup
from hetero.kv_types import F16, KVTypes
from hetero.pipeline.channel_stage import ChannelStage
from hetero.pipeline.runner import Runner
from hetero.pipeline.supervise import Supervised
from hetero.plan.devices import DeviceChoice
from quant.gguf import GGUFFile

LLAMA = "libllama"  # what its stage is called, whatever devices it has
CHUNK = 16  # tokens of the first chunk that a new pipeline computes
Progress = Callable[[int], None]


class StageOpener:
    """Stages of one model. `isolate` is "auto", "all" or "off": which devices get a process of their own.

    ggml ends its process on most errors of a driver and when an RPC server vanishes, so that by itself
    ("auto") everything but a CPU is kept away from the server. A worker is another machine in any case.
    """

    def __init__(
        self,
        path: Path,
        gguf: GGUFFile,
        config: ModelConfig,
        isolate: str = "auto",
        share_host: bool = False,
    ):
        """`share_host`: this process is to reach the host slots of stages in child processes too."""
        self._path, self._gguf, self._config, self._isolate = path, gguf, config, isolate
        self._share_host = share_host

    def open(
        self, choice: DeviceChoice, spec: StageSpec, progress: Progress | None = None
    ) -> GgmlStage | ChannelStage:
        """One stage, as it is. Raises what opening a device raises, such as DeviceError, or StageLost."""
        if choice.spec.worker:
            from hetero.pipeline.part import ModelPart
            from hetero.pipeline.remote import RemoteStage
            from hetero.worker.secret import find_secret

            part = ModelPart(self._gguf, self._config, spec.first, spec.last)
            secret = find_secret().value
            return RemoteStage(part, self._config, choice.spec, spec, secret, choice.label, progress)
        if self.is_apart(choice):
            from hetero.pipeline.isolated import IsolatedStage

            return IsolatedStage(
                self._path,
                self._config,
                choice.spec,
                spec,
                choice.label,
                progress,
                share_host=self._share_host,
            )
        from backends.ggml.devices import open_device

        return GgmlStage(self._gguf, self._config, open_device(choice.spec), spec, progress)

    def keep_open(
        self, choice: DeviceChoice, spec: StageSpec, progress: Progress | None = None
    ) -> StageBackend:
        """The same for serving: what can be lost comes back by itself. Progress is of the first opening."""
        if not self.is_apart(choice):
            return self.open(choice, spec, progress)
        first = [progress]

        def anew() -> ChannelStage:
            stage = self.open(choice, spec, first.pop() if first else None)
            assert isinstance(stage, ChannelStage)
            return stage

        return Supervised(anew, choice.label)

    def is_apart(self, choice: DeviceChoice) -> bool:
        """Whether the device's layers are out of this process."""
        if choice.spec.worker or self._isolate == "all":
            return True
        return self._isolate == "auto" and not choice.own_kernels


def open_llama(
    gguf: GGUFFile, config: LlamaConfig, spec: StageSpec, llama: LlamaSpec, isolate: str, progress: Progress
) -> StageBackend:
    """All layers through libllama, which ends its process on most errors: in one of its own unless `isolate`
    is "off". Comes back by itself. Raises DeviceError or StageLost."""
    if isolate == "off":
        from backends.llama.stage import open_stage

        return open_stage(gguf, spec, llama, progress)
    from hetero.pipeline.isolated import IsolatedStage

    first = [progress]

    def anew() -> ChannelStage:
        tell = first.pop() if first else None
        return IsolatedStage(
            gguf.path, config, DeviceSpec(LLAMA), spec, progress=tell, share_host=False, llama=llama
        )

    return Supervised(anew, LLAMA)


def stage_spec(
    groups: Sequence[KVGroup],
    layers: tuple[int, int],
    max_tokens: int,
    max_logits: int,
    depth: int = 1,
    max_context: int = 0,
    *,
    types: KVTypes = F16,
    host_slots: tuple[int, ...] = (),
    host_experts: int = 0,
    host_threads: int = 0,
) -> StageSpec:
    """What a stage of layers [first, last) holds under a plan's KV groups. See StageSpec."""
    return StageSpec(
        first=layers[0],
        last=layers[1],
        group_of={layer: g for g, group in enumerate(groups) for layer in group.layers},
        num_blocks=tuple(group.num_blocks for group in groups if not group.recurrent),
        max_tokens=max_tokens,
        max_logits=max_logits,
        depth=depth,
        max_context=max_context,
        key_type=types.keys,
        value_type=types.values,
        host_experts=host_experts,
        host_threads=host_threads,
        host_slots=host_slots if any(host_slots) else (),
        num_states=sum(group.num_blocks for group in groups if group.recurrent),
    )


def attended_in_place(choices: Sequence[DeviceChoice], depth: int = 1) -> int:
    """Requests that may run on these devices for each to be attended where it lies; 0 where that makes no
    difference. `depth`: steps in flight."""
    return 0 if all(choice.own_kernels for choice in choices) else MAX_VIEWS * depth


def run_once(runner: Runner, groups: Sequence[KVGroup]) -> None:
    """Compute a chunk and a single token in the scratch block: what is slow once is then done.

    Raises the error of a step that fails.
    """
    num_groups = sum(not group.recurrent for group in groups)
    for count in (CHUNK, 1):
        batch = Batch(
            step_id=0,
            input_ids=np.zeros(count, np.int32),
            positions=np.arange(count, dtype=np.int32),
            slot_mapping=[np.arange(count, dtype=np.int32)] * num_groups,
            block_tables=[np.zeros((1, 1), np.int32)] * num_groups,
            context_lens=np.array([count], np.int32),
            cu_seqlens_q=np.array([0, count], np.int32),
            logits_rows=np.array([count - 1], np.int32),
            copies=[],
        )
        runner.submit(batch)
        result = runner.wait()
        assert result is not None, "without a timeout there is a result"
        if result.error is not None:
            raise result.error


__all__ = ["StageOpener", "attended_in_place", "open_llama", "run_once", "stage_spec"]
