"""The loop: schedule, compute, sample, update, turn into text, deliver. One thread owns it all."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetero import batch
from hetero.batch import Step
from hetero.embedding import Pool
from hetero.generation import Generation, Outcome, Sink, one_line, pool_step, sample_step
from hetero.protocols import GrammarLike, ResultLike, RunnerLike, SamplerLike, TokenizerLike
from hetero.request import FinishReason, OutputDelta, Request
from hetero.sampling.sampler import SamplerState
from hetero.scheduler import Scheduler
from hetero.speculation import Speculation
from hetero.stats import EngineStats, StageTotals
from hetero.text.detokenizer import Detokenizer
from hetero.trace.tracer import StepDone, Tracer

log = logging.getLogger(__name__)

DEVICE_UNAVAILABLE = "device_unavailable"  # code of errors that end when a lost device is back
WAIT_SECONDS = 0.5  # how long a round waits for a device before it lets its caller look around


@dataclass(slots=True)
class _Flight:
    """A step whose result is not in; `error` when it could not even be submitted."""

    step: Step
    started: float
    error: Exception | None = None


class Engine:
    """Runs requests to their ends. Everything is called from one thread, sinks included.

    A request whose own sampling or grammar fails ends alone, with an error. A step that a device
    failed ends all of its requests with an error; later requests are served again. When a stage is
    lost, all requests end with an error, and so do new ones until it is back.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        scheduler: Scheduler,
        runner: RunnerLike,
        sampler: SamplerLike,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        speculation: Speculation | None = None,
    ):
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.block_size = block_size
        self.clock = clock
        self.speculation = scheduler.drafter = speculation
        self.tracer: Tracer | None = None  # told of every request and step, where there is one
        self.before_wait: Callable[[], None] = lambda: None  # called when the devices have their work
        self.last_progress = clock()  # when a step last ended, or work came after a pause
        self.failed_steps = 0  # in a row, up to now
        self._generations: dict[str, Generation] = {}
        self._flights: deque[_Flight] = deque()
        self._stats = EngineStats(stages=[StageTotals() for _ in runner.restarts])
        self._busy_since: float | None = None  # end of the step before, while there is work

    @property
    def has_work(self) -> bool:
        """Whether requests are here, or a step that only moves blocks is in flight."""
        return bool(self._generations) or bool(self._flights)

    @property
    def can_go_on(self) -> bool:
        """Whether `step` has something to do now. Not when all requests wait for the disk: see `watch`."""
        lost = bool(self._generations) and self.runner.unavailable is not None
        return bool(self._flights) or lost or self.scheduler.can_go_on

    def add(self, request: Request, sink: Sink, grammar: GrammarLike | None = None) -> None:
        """Queue a request; `sink` gets its deltas, the last with a finish_reason. RequestError
        when it can never fit. `grammar` is this request's own, at its start."""
        n_vocab = self.sampler.n_vocab
        state = SamplerState(request.params, request.prompt_token_ids, n_vocab)
        detokenizer = Detokenizer(self.tokenizer, request.params.stop, request.shown)
        mask = None if grammar is None else np.zeros((n_vocab + 31) // 32, np.int32)
        self.scheduler.add(request)
        if not self._generations:
            self.last_progress = self.clock()
        generation = Generation(request, sink, state, detokenizer, grammar, mask)
        if request.pooling is not None:
            generation.pool = Pool(request.pooling)
        self._generations[request.request_id] = generation
        if self.speculation is not None:
            self.speculation.add(request)
        if self.tracer is not None:
            self.tracer.queued(request)

    def abort(self, request_id: str) -> None:
        """End a request as soon as it is in no step in flight. Unknown ids are ignored."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._deliver_end(request, OutputDelta())

    def abort_all(self) -> None:
        """`abort` every request."""
        for request_id in list(self._generations):
            self.abort(request_id)

    def fail_all(self, message: str) -> None:
        """Tell every request that the engine is gone. Nothing else may be called afterwards."""
        for generation in self._generations.values():
            _send(generation, OutputDelta(finish_reason=FinishReason.ERROR, error=message))
        self._generations.clear()

    def step(self) -> bool:
        """Fill the pipeline, then take in the oldest result, if one comes within WAIT_SECONDS.

        Returns whether there is more to do.
        """
        if self._busy_since is None:
            self._busy_since = self.clock()
        while (
            self.runner.unavailable is None and len(self._flights) < self.runner.depth and self._start_step()
        ):
            pass
        if self._flights:
            self._take_in(self._flights[0])
        lost = self.runner.unavailable
        if lost is not None and not self._flights:
            self._let_go(lost)
        if not self.can_go_on:  # nor does time spent waiting for the disk count as a step's
            self._busy_since = None
        return self.has_work

    def write_behind(self, seconds: float) -> None:
        """For so long at most, bring to the disk what should be there. No request may be here any more."""
        disk, deadline = self.scheduler.kv.below, self.clock() + seconds
        while disk is not None and disk.has_more and self.clock() < deadline:
            if self.runner.unavailable is not None:
                return
            if not self.can_go_on:
                disk.wait(WAIT_SECONDS)
            self.step()

    def watch(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, from any thread, when there may be something to do that was not before."""
        self.runner.watch(callback)
        if (disk := self.scheduler.kv.below) is not None:
            disk.watch(callback)

    def close(self) -> None:
        """Keep what was learned, and free the devices. Nothing runs."""
        if self.tracer is not None:
            self.tracer.close()
        if self.speculation is not None:
            self.speculation.close()  # soon done, while a disk can be slow
        if (disk := self.scheduler.kv.below) is not None:
            disk.close()  # it still reads what the stages have in host memory
        self.runner.close()

    def stats(self) -> EngineStats:
        """A snapshot; may be called from any thread."""
        counters, own, host = self.scheduler.counters, self._stats, self.scheduler.kv.host
        return EngineStats(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            kv_blocks=[(p.num_usable, p.num_available) for p in self.scheduler.kv.pools],
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            cached_tokens=counters.cached_tokens,
            tokens_from=counters.tokens_from(),
            moves=replace(host.counters),
            host_slots=[(pool.num_slots, pool.num_free) for pool in host.slots],
            preemptions=counters.preemptions,
            cancelled=counters.finished[FinishReason.ABORT],
            finished={reason.value: count for reason, count in counters.finished.items()},
            steps=counters.steps,
            step_seconds=own.step_seconds,
            host_seconds=own.host_seconds,
            stages=[
                replace(totals, restarts=restarts, counters=counters)
                for totals, restarts, counters in zip(
                    own.stages, self.runner.restarts, self.runner.counters, strict=True
                )
            ],
            disk=None if (disk := self.scheduler.kv.below) is None else disk.stats(),
            ttft=own.ttft.copy(),
            inter_token=own.inter_token.copy(),
            queue=own.queue.copy(),
            e2e=own.e2e.copy(),
            speculation=None if self.speculation is None else self.speculation.stats.copy(),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError unless engine and scheduler know the same requests and steps."""
        known = [g.request for g in self._generations.values()]
        self.scheduler.check_invariants(known)
        assert all(r.finish_reason is None for r in known)
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(known)
        assert self.scheduler.num_in_flight == len(self._flights)
        if self.speculation is not None:
            self.speculation.check_invariants(known)

    # -- one step --------------------------------------------------------------------------------

    def _start_step(self) -> bool:
        step = self.scheduler.schedule()
        if step is None:
            return False
        flight = _Flight(step, self.clock())
        self._flights.append(flight)
        try:
            groups, greedy = self.scheduler.kv.num_kv_groups, self._is_greedy(step)
            self.runner.submit(batch.build(step, groups, self.block_size, greedy))
        except Exception as error:  # kept until its turn: results are taken in in order
            flight.error = error
        for request in step.requests:
            generation = self._generations[request.request_id]
            if generation.first_step_time is None:
                generation.first_step_time = self.clock()
                self._stats.queue.observe(generation.first_step_time - request.arrival_time)
        return True

    def _is_greedy(self, step: Step) -> bool:
        """Whether each next token is simply the likeliest one."""
        if step.embeds:
            return False
        due = (r for r, sampled in zip(step.requests, step.sampled, strict=True) if sampled)
        generations = (self._generations[r.request_id] for r in due)
        return all(g.state.plain and g.grammar is None for g in generations)

    def _take_in(self, flight: _Flight) -> None:
        if flight.error is not None:
            self._flights.popleft()
            self._fail_step(flight.step, flight.error)
            return
        self.before_wait()
        if (result := self.runner.wait(WAIT_SECONDS)) is not None:
            self._flights.popleft()
            assert result.step_id == flight.step.step_id, "results out of order"
            self._finish_step(flight.step, result, flight.started)

    def _finish_step(self, step: Step, result: ResultLike, started: float) -> None:
        computed = self.clock()
        if self.scheduler.is_doomed(step):
            self._fail_step(step, RuntimeError("an earlier step was lost"))
        elif result.error is not None or result.logits is None:
            self._fail_step(step, result.error or RuntimeError("no logits came back"))
        else:
            try:
                outcome = self._outcome(step, result.logits, result.argmax)
            except Exception as error:  # not one request's fault: the whole step is lost
                self._fail_step(step, error)
            else:
                self.failed_steps = 0
                ended = self.scheduler.update(step, outcome.sampled(), outcome.finished, outcome.num_accepted)
                if self.speculation is not None:
                    self.speculation.observe(step, outcome.tokens, outcome.num_accepted)
                self._deliver_step(step, outcome, ended)
                if self.tracer is not None:
                    self._trace(step, started, computed, outcome, result)
        graph_seconds = sum(stage.graph_seconds for stage in result.stages)
        busy_seconds = max((stage.busy_seconds for stage in result.stages), default=graph_seconds)
        for totals, times in zip(self._stats.stages, result.stages, strict=False):
            totals.queue_seconds += times.queue_seconds
            totals.busy_seconds += times.busy_seconds
            totals.transfer_seconds += max(0.0, times.busy_seconds - times.graph_seconds)
            totals.bytes_in += times.bytes_in
            totals.bytes_out += times.bytes_out
        self._observe_costs(step, result)
        self._account(step, min(graph_seconds, busy_seconds))

    def _trace(
        self, step: Step, started: float, computed: float, outcome: Outcome, result: ResultLike
    ) -> None:
        assert self.tracer is not None
        emitted = [len(tokens) for tokens in outcome.tokens]
        stages = [(stage.started, stage.busy_seconds) for stage in result.stages]
        ended = self.clock()
        self.tracer.step(StepDone(step, started, computed, ended, emitted, outcome.num_accepted, stages))

    def _outcome(self, step: Step, rows: np.ndarray, argmax: np.ndarray | None) -> Outcome:
        if step.embeds:
            return pool_step(step, self._generations, rows)
        return sample_step(step, self._generations, self.sampler, self.tokenizer, rows, argmax)

    def _observe_costs(self, step: Step, result: ResultLike) -> None:
        """What moves and tokens cost: the slowest stage's time, for what all stages have moved."""
        moved = sum(stage.moved_bytes for stage in result.stages)
        move_seconds = max((stage.move_seconds for stage in result.stages), default=0.0)
        graph_seconds = max((stage.graph_seconds for stage in result.stages), default=0.0)
        self.scheduler.kv.host.costs.observe(moved, move_seconds, step.num_tokens, graph_seconds)

    def _account(self, step: Step, computed_seconds: float) -> None:
        now = self.clock()
        assert self._busy_since is not None
        seconds = now - self._busy_since
        self._busy_since = self.last_progress = now
        self._stats.step_seconds += seconds
        if self.speculation is not None and not step.embeds:
            self.speculation.observe_seconds(step, seconds)
        self._stats.host_seconds += max(0.0, seconds - computed_seconds)

    def _fail_step(self, step: Step, error: Exception) -> None:
        lost = self.runner.unavailable
        log.error(
            "step %d of %d requests failed",
            step.step_id,
            len(step.requests),
            exc_info=None if lost else error,
        )
        self.failed_steps += 1
        self.last_progress = self.clock()
        nothing: list[int | None] = [None] * len(step.requests)
        for request in self.scheduler.update(step, nothing, failed=True):
            self._end_failed(request, lost or f"the device failed: {one_line(error)}", lost is not None)

    def _let_go(self, lost: str) -> None:
        """Nothing is in flight and a stage is lost: end all requests, and let it come back."""
        for request in self.scheduler.fail_all():
            self._end_failed(request, lost, True)
        self.failed_steps = 0
        self.runner.acknowledge()

    def _end_failed(self, request: Request, text: str, lost: bool) -> None:
        generation = self._generations[request.request_id]
        generation.error, generation.error_code = text, DEVICE_UNAVAILABLE if lost else None
        self._deliver_end(request, OutputDelta())

    # -- delivery --------------------------------------------------------------------------------

    def _deliver_step(self, step: Step, outcome: Outcome, ended: Sequence[Request]) -> None:
        now = self.clock()
        for i, token_ids in enumerate(outcome.tokens):
            if not token_ids:
                continue
            generation = self._generations[step.requests[i].request_id]
            generation.num_drafted += len(step.drafts[i])
            generation.num_accepted += outcome.num_accepted[i]
            delta = OutputDelta(outcome.texts[i], token_ids, outcome.logprobs[i])
            self._observe_tokens(generation, now, len(token_ids))
            if generation.request.finish_reason is None:
                _send(generation, delta)
            else:
                self._deliver_end(generation.request, delta)
        for request in ended:
            if request.request_id in self._generations:
                self._deliver_end(request, OutputDelta())

    def _observe_tokens(self, generation: Generation, now: float, count: int) -> None:
        """`count` tokens came at the same time: they share the time since the last one."""
        if generation.last_token_time is None:
            self._stats.ttft.observe(now - generation.request.arrival_time)
            generation.first_token_time = now
        else:
            for _ in range(count):
                self._stats.inter_token.observe((now - generation.last_token_time) / count)
        generation.last_token_time = now

    def _deliver_end(self, request: Request, delta: OutputDelta) -> None:
        generation = self._generations.pop(request.request_id)
        delta.finish_reason = request.finish_reason
        if request.finish_reason is FinishReason.ERROR:
            delta.error = generation.error or "the request failed"
            delta.error_code, delta.error_field = generation.error_code, generation.error_field
        else:
            delta.text += generation.detokenizer.finish()
            delta.stop_string = generation.detokenizer.stop_string
            delta.embedding = generation.embedding
        delta.num_prompt_tokens = len(request.prompt_token_ids)
        delta.num_output_tokens = len(request.output_token_ids)
        delta.num_cached_tokens = request.num_cached_tokens
        delta.timings = generation.timings()
        if self.speculation is not None:
            self.speculation.remove(request)
        self._stats.e2e.observe(self.clock() - request.arrival_time)
        if self.tracer is not None:
            self.tracer.finished(request)
        _send(generation, delta)


def _send(generation: Generation, delta: OutputDelta) -> None:
    try:
        generation.sink(delta)
    except Exception:  # one client's trouble is nobody else's
        log.exception("delivery to request %s failed", generation.request.request_id)
