"""An engine over stages in child processes."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from engine.driver import BLOCK
from isolated_tools import MAX_TOKENS, NUM_BLOCKS, ONE_THREAD, isolate, spec_of, until

from backends.base import DeviceSpec
from backends.ggml.models.config import read_config
from backends.ggml.stage import StageSpec
from hetero.engine import Engine
from hetero.kv.groups import KVGroup
from hetero.kv.manager import KVManager
from hetero.pipeline.isolated import IsolatedStage
from hetero.pipeline.runner import Runner
from hetero.pipeline.supervise import Supervised
from hetero.request import FinishReason, OutputDelta, Request
from hetero.sampling.params import SamplingParams
from hetero.sampling.sampler import Sampler
from hetero.scheduler import Scheduler
from hetero.text.tokenizer import Tokenizer
from quant.gguf import open_gguf

MAX_SEQS, MAX_OUTPUT = 8, 24
PROMPTS = [[(7 * i + j * j) % 300 for j in range(10 + 9 * i)] for i in range(6)]


class Served:
    """An engine over supervised children. `devices` has those of stages by first layer, else it is a CPU."""

    def __init__(
        self, model: Path, cuts: list[tuple[int, int]], devices: Mapping[int, DeviceSpec] | None = None
    ):
        config = read_config(open_gguf(model))
        self.children: list[IsolatedStage] = []
        stages = []
        for first, last in cuts:
            spec = replace(spec_of(model, first, last, depth=len(cuts)), max_logits=MAX_SEQS)
            device = (devices or {}).get(first, ONE_THREAD)

            def make(spec: StageSpec = spec, device: DeviceSpec = device) -> IsolatedStage:
                self.children.append(isolate(model, spec, device))
                return self.children[-1]

            stages.append(Supervised(make, f"{device.name} from layer {first}"))
        self.runner, sampler = Runner(stages), Sampler(config.n_vocab)
        sampler.warmup()
        kv = KVManager([KVGroup(tuple(range(config.n_layer)), None, NUM_BLOCKS)], BLOCK)
        scheduler = Scheduler(kv, MAX_SEQS, MAX_TOKENS, 512, self.runner.depth)
        self.engine = Engine(Tokenizer(model), scheduler, self.runner, sampler, BLOCK)
        self.ends: dict[str, OutputDelta] = {}
        self.tokens: dict[str, list[int]] = {}
        self.count = 0

    def add(self, prompt: list[int]) -> str:
        request_id = f"r{self.count}"
        self.count += 1
        self.tokens[request_id] = []

        def sink(delta: OutputDelta) -> None:
            self.tokens[request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self.ends[request_id] = delta

        params = SamplingParams(max_tokens=MAX_OUTPUT, temperature=0.0, ignore_eos=True)
        self.engine.add(Request(request_id, list(prompt), params), sink)
        return request_id

    def finish(self) -> None:
        while self.engine.step():
            pass

    def alive(self) -> list[IsolatedStage]:
        return [c for c in self.children if c.lost is None]

    def answers_alone(self) -> list[list[int]]:
        """The answer to each of PROMPTS from an empty cache, with nobody else there."""
        out = []
        for prompt in PROMPTS:
            request_id = self.add(prompt)
            self.finish()
            out.append(self.tokens[request_id])
            self.engine.scheduler.kv.clear_cache()
        assert all(len(tokens) == MAX_OUTPUT for tokens in out)
        return out

    def work_until_lost(self, rng: random.Random, alone: list[list[int]]) -> int:
        """Answer more and more requests until a stage is lost, and all have ended. Asserts that every
        answer is right as far as it goes, and complete unless the loss is said to be the reason, and that
        nothing is left of them. Returns how many were cut off."""
        asked: dict[str, int] = {}
        deadline = time.monotonic() + 30
        while self.runner.unavailable is None:
            for which in rng.sample(range(len(PROMPTS)), 3):
                asked[self.add(PROMPTS[which])] = which
            for _ in range(rng.randint(1, 12)):
                self.engine.step()
            assert time.monotonic() < deadline, "the loss was not noticed"
        self.finish()
        self.engine.check_invariants()
        assert all(total == free for total, free in self.engine.stats().kv_blocks)
        lost = 0
        for request_id, which in asked.items():
            delta, tokens = self.ends[request_id], self.tokens[request_id]
            assert tokens == alone[which][: len(tokens)]
            if delta.finish_reason is FinishReason.ERROR:
                assert delta.error is not None and "was lost" in delta.error
                lost += 1
            else:
                assert delta.finish_reason is FinishReason.LENGTH and len(tokens) == MAX_OUTPUT
        return lost

    def work_again(self, alone: list[list[int]]) -> None:
        """Wait until the stage is back; assert that it is, with the right answers."""
        until(lambda: self.runner.unavailable is None, 30)
        request_id = self.add(PROMPTS[0])
        self.finish()
        assert self.tokens[request_id] == alone[0]
