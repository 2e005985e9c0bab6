"""The engine for asyncio: it runs in a thread of its own, requests go in, streams of deltas come out."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from hetero.about import About
from hetero.engine import DEVICE_UNAVAILABLE, WAIT_SECONDS, Engine
from hetero.request import CLIENT, TRACE_PARENT, FinishReason, OutputDelta, Request, RequestError
from hetero.sampling.params import SamplingParams
from hetero.screen import Placement
from hetero.stats import EngineStats
from hetero.text.grammar import Grammar, GrammarCompiler
from hetero.text.service import TextService
from hetero.text.template import ChatTemplate
from hetero.text.tokenizer import Tokenizer
from hetero.trace.tracer import Tracer

log = logging.getLogger(__name__)

STUCK_SECONDS = 300.0  # a step on a slow device may take long; nothing honest takes this long
FAILED_STEPS = 3  # in a row, before the device counts as lost
RETRY_SECONDS = 10.0  # after which requests may try it again
WRITE_SECONDS = 5.0  # for what should be on the disk when the engine stops
JOIN_SECONDS = 10.0
DRAIN_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served. `n_ctx` bounds prompt and answer together; `created` is in unix seconds.

    `max_num_seqs` requests are computed at a time. `placements` and `notes`: what sits where, and why.
    `about`: what else a measurement has to say.
    """

    name: str
    architecture: str
    n_ctx: int
    n_vocab: int
    kv_tokens: int
    max_num_seqs: int
    n_params: int
    size_bytes: int
    quantization: str
    created: int
    has_chat_template: bool
    n_embd: int = 0
    pooling: str | None = None  # how embeddings are made, see embedding.py; None: there are none
    placements: tuple[Placement, ...] = ()
    notes: tuple[str, ...] = ()
    about: About | None = None


class RequestStream:
    """The deltas of one request, for one consumer in the event loop that submitted it.

    Iterating ends after the delta with a finish_reason. Leaving the iteration early, or dropping
    the stream, aborts the request.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]):
        self.request_id = request_id
        self._abort = abort
        self._deltas: asyncio.Queue[OutputDelta] = asyncio.Queue()
        self._complete = False  # the last delta is in the queue
        self._consumed = False

    def abort(self) -> None:
        """End the request. The stream ends with what has come and FinishReason.ABORT. Idempotent."""
        if not self._complete:
            self.put(OutputDelta(finish_reason=FinishReason.ABORT))
            self._abort(self.request_id)

    def put(self, delta: OutputDelta) -> None:
        """For the engine, in the loop's thread. What comes after the last delta is dropped."""
        if not self._complete:
            self._complete = delta.finish_reason is not None
            self._deltas.put_nowait(delta)

    async def __anext__(self) -> OutputDelta:
        if self._consumed:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        self._consumed = delta.finish_reason is not None
        return delta

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self._iterate()  # a generator, because it notices that its loop was left

    async def _iterate(self) -> AsyncIterator[OutputDelta]:
        try:
            while not self._consumed:
                yield await self.__anext__()
        finally:
            self.abort()

    def __del__(self) -> None:
        if not self._complete:
            self._complete = True
            self._abort(self.request_id)


_Delivery = tuple[weakref.ref[RequestStream], OutputDelta]


@dataclass(slots=True)
class _Add:
    request: Request
    sink: Callable[[OutputDelta], None]
    grammar: Grammar | None


@dataclass(slots=True)
class _Abort:
    request_id: str


class _Look:
    """A stage was lost or is back, or the disk has done something."""


class _Stop:
    """What still runs is aborted, then the thread ends."""


class AsyncEngine:
    """Owns the engine's thread; `text` turns words into token ids. All methods are for the event loop;
    none blocks it.

    Requests and aborts reach the thread through `_inbox`, on which it sleeps while there is no
    work. What a round of the engine produces goes to each event loop in one call.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        grammar_compiler: GrammarCompiler,
        info: ModelInfo,
        cache_by_client: bool = False,
    ):
        """`cache_by_client`: each client finds only what its own requests have computed."""
        self.info = info
        self._engine = engine
        engine.before_wait = self._flush
        engine.watch(lambda: self._inbox.put(_Look()))
        self.text = TextService(tokenizer, template, grammar_compiler)
        self._cache_by_client = cache_by_client
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Look | _Stop] = queue.SimpleQueue()
        self._outbox: dict[asyncio.AbstractEventLoop, list[_Delivery]] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # nothing is added to the inbox once `_refusal` is set
        self._refusal: RequestError | None = RequestError("the engine is not started", code="unavailable")
        self._failure: str | None = None
        self._closed = False

    # -- requests --------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Steps that can be in flight."""
        return self._engine.runner.depth

    def trace_with(self, tracer: Tracer) -> None:
        """Tell `tracer` of every request and step. Before `start`; the engine closes it."""
        self._engine.tracer = tracer

    def note_sent(self, request_id: str, whole: bool = True) -> None:
        """The first of an answer was written to its client, or all of it."""
        if self._engine.tracer is not None:
            self._engine.tracer.sent(request_id, whole)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        grammar: Grammar | None = None,
        shown: Mapping[int, bytes] | None = None,
        embeds: bool = False,
        priority: int = 0,
    ) -> RequestStream:
        """Start a request. `request_id` must not be in use; `grammar` must be this request's own; `shown`
        are control tokens that the text is to hold, with what they add to it. `embeds`: nothing is generated,
        and the one delta has the text's embedding. Requests of lower `priority` come first.

        RequestError when it can never run: code "context_length_exceeded" with both counts when
        the prompt does not fit, "unavailable" when nothing is generated any more, "device_unavailable"
        while a lost device is not back.
        """
        prompt = list(prompt_token_ids)
        self._engine.scheduler.check_fits(len(prompt))
        if not 0 <= min(prompt) <= max(prompt) < self.info.n_vocab:
            raise RequestError(f"token ids must be from 0 to {self.info.n_vocab - 1}")
        if embeds and self.info.pooling is None:
            raise RequestError(f"the model {self.info.name} gives no embeddings here", "model")
        client = CLIENT.get()
        scope = client if self._cache_by_client else ""
        request = Request(
            request_id,
            prompt,
            params,
            self._engine.clock(),
            client=client,
            cache_scope=scope,
            trace_parent=TRACE_PARENT.get(),
            shown=shown or {},
            pooling=self.info.pooling if embeds else None,
            priority=priority,
        )
        loop = asyncio.get_running_loop()
        stream = RequestStream(request_id, self._post_abort)
        ref = weakref.ref(stream)  # a strong one would keep a dropped stream's request running

        def sink(delta: OutputDelta) -> None:
            self._outbox.setdefault(loop, []).append((ref, delta))

        with self._lock:
            refusal = self._refusal or self._device_refusal()
            if refusal is None:
                self._inbox.put(_Add(request, sink, grammar))
        if refusal is not None:
            stream.put(OutputDelta(finish_reason=FinishReason.ABORT))
            raise RequestError(refusal.message, code=refusal.code)
        return stream

    def _post_abort(self, request_id: str) -> None:
        self._inbox.put(_Abort(request_id))  # also from __del__, in any thread: put is reentrant

    def _device_refusal(self) -> RequestError | None:
        lost = self.device_lost
        return None if lost is None else RequestError(lost, code=DEVICE_UNAVAILABLE)

    # -- state -----------------------------------------------------------------------------------

    @property
    def device_lost(self) -> str | None:
        """Why nothing can be generated until a device is back, in one line; None while all are there."""
        return self._engine.runner.unavailable

    def health(self) -> tuple[bool, str]:
        """Whether generation can progress, and if not, why, in one line."""
        if self._failure is not None:
            return False, self._failure
        if self._refusal is not None:
            return False, self._refusal.message
        if self._thread is None or not self._thread.is_alive():
            return False, "the engine's thread has ended"
        lost = self.device_lost
        if lost is not None:
            return False, lost
        quiet = self._engine.clock() - self._engine.last_progress
        if self._engine.failed_steps >= FAILED_STEPS and quiet < RETRY_SECONDS:
            return False, f"the device failed in the last {self._engine.failed_steps} steps"
        if self._engine.has_work and quiet > STUCK_SECONDS:
            return False, f"no step has ended for {quiet:.0f} seconds"
        return True, ""

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters and histograms."""
        return self._engine.stats()

    def start(self) -> None:
        """Start the engine's thread. Once only."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        with self._lock:
            self._refusal = None
        self._inbox.put(_Look())  # a stage may have been lost since it was opened
        self._thread.start()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, give those that run `drain_seconds` to end, abort the rest, stop the
        thread and free the devices. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            self._refusal = RequestError("the server is stopping", code="draining")
        thread = self._thread
        if thread is not None:
            deadline = time.monotonic() + drain_seconds
            while thread.is_alive() and self._has_work() and time.monotonic() < deadline:
                await asyncio.sleep(DRAIN_POLL_SECONDS)
            self._inbox.put(_Stop())
            await asyncio.to_thread(thread.join, JOIN_SECONDS)
            await asyncio.sleep(0)  # the last deltas reach their streams
        self.text.close()
        if thread is not None and thread.is_alive():
            log.error("the engine does not stop: its devices are left to the operating system")
        else:
            await asyncio.to_thread(self._engine.close)

    def _has_work(self) -> bool:
        return self._engine.has_work or not self._inbox.empty()

    # -- the engine's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_inbox():
                if not self._engine.step() or not self._engine.can_go_on:
                    self._flush()
            self._engine.abort_all()
            while self._engine.has_work:
                self._engine.step()
            self._flush()
            self._engine.write_behind(WRITE_SECONDS)
        except BaseException as error:
            log.exception("the engine died")
            self._die(f"the engine died: {type(error).__name__}: {error}")

    def _take_inbox(self) -> bool:
        """Do what was asked; sleep until something is when nothing can be done. False: stop."""
        block = not self._engine.can_go_on
        timeout = WAIT_SECONDS if self._engine.has_work else None  # the disk may take too long
        while True:
            try:
                item = self._inbox.get(block, timeout)
            except queue.Empty:
                return True
            block = False
            if isinstance(item, _Stop):
                return False
            if isinstance(item, _Look):
                continue
            if isinstance(item, _Abort):
                self._engine.abort(item.request_id)
                continue
            try:
                self._engine.add(item.request, item.sink, item.grammar)
            except ValueError as error:
                item.sink(OutputDelta(finish_reason=FinishReason.ERROR, error=str(error)))

    def _flush(self) -> None:
        """Hand the deltas to their event loops; while there is work, just before the engine waits.

        A loop that wakes up earlier would keep the interpreter from the engine while that prepares
        its next step, and so the devices idle.
        """
        outbox, self._outbox = self._outbox, {}
        for loop, deltas in outbox.items():
            try:
                loop.call_soon_threadsafe(_hand_over, deltas)
            except RuntimeError:  # that loop is closed, and its streams with it
                continue

    def _die(self, message: str) -> None:
        with self._lock:
            self._failure = message
            self._refusal = RequestError(message, code="unavailable")
        self._engine.fail_all(message)
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, _Add):
                item.sink(OutputDelta(finish_reason=FinishReason.ERROR, error=message))
        self._flush()


def _hand_over(deltas: Sequence[_Delivery]) -> None:
    for ref, delta in deltas:
        stream = ref()
        if stream is not None:
            stream.put(delta)
