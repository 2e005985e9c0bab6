"""An engine with a script in place of a model: the interface of hetero.async_engine.AsyncEngine.

Its tokens are the bytes of UTF-8 (ids 0..255), then control tokens. It "generates" `script`, over and over,
until max_tokens, the end of the script (unless ignore_eos) or a stop string.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
from types import SimpleNamespace
from typing import Any

from hetero.about import About
from hetero.kv.host_tier import TierCounters
from hetero.request import FinishReason, OutputDelta, RequestError, TokenLogprob
from hetero.screen import Placement
from hetero.stats import DiskStats
from hetero.text.parts import capabilities, parser_for
from hetero.text.service import ChatPrompt

BOS, IM_START, IM_END = 256, 257, 258
N_VOCAB = 260
CONTROL = {256: "<s>", 257: "<|im_start|>", 258: "<|im_end|>", 259: "<pad>"}


class FakeGrammar:
    def __init__(self, text: str) -> None:
        self.text = text

    def fork(self) -> FakeGrammar:
        return FakeGrammar(self.text)


class FakeStream:
    request_id = ""
    embedding: list[float] | None = None

    def __init__(
        self, engine: FakeEngine, prompt: list[int], params: Any, grammar: FakeGrammar | None
    ) -> None:
        self.engine, self.prompt, self.params = engine, prompt, params
        script = engine.scripts.pop(0) if engine.scripts else engine.script
        self.script = (grammar.text if grammar else script).encode()
        self.aborted = False
        self._wake = asyncio.Event()
        self._deltas = self._generate()

    def abort(self) -> None:
        if self in self.engine.running:
            self.engine.running.discard(self)
            self.engine.cancelled += 1
        self.aborted = True
        self._wake.set()

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> OutputDelta:
        return await anext(self._deltas)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)

    async def _generate(self) -> Any:
        await self._pause(self.engine.prefill_seconds)
        if self.embedding is not None:
            self.engine.running.discard(self)
            reason = FinishReason.ABORT if self.aborted else FinishReason.STOP
            yield OutputDelta(finish_reason=reason, embedding=self.embedding)
            return
        limit = min(self.params.max_tokens or 10**9, self.engine.info.n_ctx - len(self.prompt))
        decoder, text, sent, count = codecs.getincrementaldecoder("utf-8")(), "", 0, 0
        reason, found = None, None
        while reason is None:
            if self.aborted:
                reason = FinishReason.ABORT
                break
            if count == self.engine.fail_after:
                self.engine.running.discard(self)
                yield self.engine.failure
                return
            at = count % (len(self.script) + 1) if not self.params.ignore_eos else count % len(self.script)
            token_id = IM_END if at == len(self.script) else self.script[at]
            count += 1
            text += decoder.decode(self.engine.token_bytes(token_id))
            if token_id == IM_END:
                reason = FinishReason.STOP
            elif count >= limit:
                reason = FinishReason.LENGTH
            for stop in self.params.stop:
                if stop in text:
                    text, reason, found = text[: text.index(stop)], FinishReason.STOP, stop
            held = max(
                (k for s in self.params.stop for k in range(len(s)) if text.endswith(s[:k])), default=0
            )
            end = len(text) if reason else len(text) - held
            end = max(end, sent)
            logprobs = [] if self.params.logprobs is None else [self._logprob(token_id)]
            yield OutputDelta(text=text[sent:end], token_ids=[token_id], logprobs=logprobs)
            sent = end
            if reason is None:
                await self._pause(self.engine.token_seconds)
        self.engine.running.discard(self)
        yield OutputDelta(
            finish_reason=reason,
            stop_string=found,
            num_prompt_tokens=len(self.prompt),
            num_output_tokens=count,
            num_cached_tokens=self.engine.cached_tokens,
        )

    def _logprob(self, token_id: int) -> TokenLogprob:
        top = [(token_id, -0.25), (33, -2.0), (0xF0, float("-inf"))][: self.params.logprobs]
        return TokenLogprob(token_id, -0.25, top)


class FakeEngine:
    def __init__(self, script: str = "Hello, wörld 😸!") -> None:
        self.script = script
        self.scripts: list[str] = []  # for the next requests, before `script`
        self.template_source = "{{ messages }}"  # says which family's tool calls the script may hold
        self.asked: dict[str, Any] = {}  # with the last chat
        self.fills_in = False
        self.prefill_seconds = 0.0
        self.token_seconds = 0.0
        self.fail_after = -1
        self.failure = OutputDelta(finish_reason=FinishReason.ERROR, error="the device failed")
        self.cached_tokens = 0
        self.cancelled = 0
        self.healthy: tuple[bool, str] = (True, "")
        self.device_lost: str | None = None
        self.running: set[FakeStream] = set()
        self.sent: list[str] = []
        self.submitted: list[tuple[list[int], Any, str]] = []
        self.priorities: list[int] = []
        self.rendered: list[tuple[list[dict[str, Any]], bool, dict[str, Any]]] = []
        self.add_bos = False
        self.warm = False
        self.info = SimpleNamespace(
            name="fake-model", architecture="llama", n_ctx=512, n_vocab=N_VOCAB, kv_tokens=4096,
            max_num_seqs=4, n_params=135, size_bytes=1000, quantization="Q4_1",
            created=1700000000, has_chat_template=True, n_embd=3, pooling="mean", notes=("a note",),
            placements=(Placement("CPU", "layers 0 to 3", 1000, 2000, 3000),),
            about=About("00ff", {"hetero": "1"}, ({"name": "CPU"},), {"ctx": 0}),
        )  # fmt: skip

    @property
    def text(self) -> FakeEngine:
        return self

    async def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Any = (),
        tool_choice: Any = "none",
        parallel_tool_calls: bool = True,
        output: dict[str, Any] | None = None,
        thinking: bool | str | None = None,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> ChatPrompt:
        if not self.info.has_chat_template:
            raise RequestError("this model has no chat template", "messages")
        self.rendered.append((messages, continue_final_message, dict(template_kwargs or {})))
        grammar: Any = await self.compile_grammar(output)
        ids: list[int] = []
        for message in messages:
            content = message["content"]
            if isinstance(content, list):
                content = "\n".join(part["text"] for part in content)
            if content == "raise":
                raise RequestError("roles must alternate", "messages")
            ids += [IM_START, *f"{message['role']}\n{content}".encode(), IM_END]
        ids = ids[:-1] if continue_final_message else [*ids, IM_START, *b"assistant\n"]
        self.asked = {"tools": tools, "tool_choice": tool_choice, "output": output, "thinking": thinking}
        chosen = [] if tool_choice == "none" else tools
        parser = functools.partial(parser_for, self.template_source, chosen, "", parallel_tool_calls)
        text = "".join(map(self.token_text, ids))
        return ChatPrompt(ids, text, grammar, parser, {})

    @property
    def capabilities(self) -> tuple[str, ...]:
        able = capabilities(self.template_source if self.info.has_chat_template else None)
        return (*able, "insert") if self.fills_in else able

    async def fill_in(self, before: str, after: str, files: Any = (), begun: str = "") -> list[int]:
        if not self.fills_in:
            raise RequestError("suffix: no such tokens", "suffix")
        others = "".join(f"[{file.name}:{file.text}]" for file in files)
        return [*f"{others}<{before}|{after}>{begun}".encode()]

    async def render(self, messages: Any, prefill: bool, kwargs: Any) -> str:
        prompt = await self.chat(messages, continue_final_message=prefill, template_kwargs=kwargs)
        return prompt.text

    @property
    def special_texts(self) -> tuple[str, str]:
        return CONTROL[BOS], CONTROL[IM_END]

    async def warm_up(self) -> None:
        self.warm = True

    async def tokenize(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        return [BOS] * (self.add_bos and add_special) + list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def token_text(self, token_id: int) -> str:
        return CONTROL.get(token_id) or bytes([token_id]).decode("utf-8", "replace")

    def decode(self, ids: list[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    async def compile_grammar(self, response_format: dict[str, Any] | None) -> FakeGrammar | None:
        if response_format is None or response_format["type"] == "text":
            return None
        schema = response_format.get("json_schema", {}).get("schema", {})
        if "not" in schema:
            field = response_format["field"]
            raise RequestError(f"{field}: cannot compile 'not'", field)
        return FakeGrammar('"a😸b中"')

    def submit(
        self,
        prompt: list[int],
        params: Any,
        *,
        request_id: str,
        grammar: Any = None,
        shown: Any = None,
        embeds: bool = False,
        priority: int = 0,
    ) -> FakeStream:
        if len(prompt) >= self.info.n_ctx:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, the context holds {self.info.n_ctx}",
                "prompt",
                "context_length_exceeded",
            )
        self.submitted.append((prompt, params, request_id))
        self.priorities.append(priority)
        stream = FakeStream(self, prompt, params, grammar)
        stream.request_id = request_id
        if embeds:
            stream.embedding = [0.6, len(prompt) / 1000, 0.1]
        self.running.add(stream)
        return stream

    def note_sent(self, request_id: str, whole: bool = True) -> None:
        if whole:
            self.sent.append(request_id)

    def health(self) -> tuple[bool, str]:
        return self.healthy

    def stats(self) -> Any:
        histogram = SimpleNamespace(bounds=[0.1, 1.0], counts=[1, 2, 3], sum=7.5)
        stage = SimpleNamespace(
            queue_seconds=0.25,
            busy_seconds=2.0,
            transfer_seconds=0.5,
            bytes_in=4,
            bytes_out=8,
            restarts=3,
            counters={"attended_in_place": 6, "attended_gathered": 2, "recomputed_tokens": 3},
        )
        return SimpleNamespace(
            stages=[stage],
            disk=DiskStats(entries=4, damaged=2), speculation=None,
            running=len(self.running), waiting=0, kv_blocks=[(32, 30), (8, 8)], prompt_tokens=5,
            generated_tokens=7, cached_tokens=3, preemptions=1, cancelled=self.cancelled,
            tokens_from={"device": 2, "host": 1, "computed": 2}, host_slots=[(64, 60), (8, 0)],
            moves=TierCounters(3, 300, 1, 100, left_device=4, left_host=2),
            finished={"stop": 2, "length": 1}, steps=10, step_seconds=2.0, host_seconds=0.5,
            ttft=histogram, inter_token=histogram, queue=histogram, e2e=histogram,
        )  # fmt: skip
