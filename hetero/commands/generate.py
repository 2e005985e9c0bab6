"""`hetero run` and `hetero chat`: one conversation in the terminal, through the same engine as the server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetero.commands.inspect import fail
from hetero.launch import launch
from hetero.prepare import LaunchError
from hetero.request import FinishReason, RequestError
from hetero.sampling.params import ParamError, SamplingParams
from hetero.screen import loading
from hetero.settings import Settings

if TYPE_CHECKING:
    from hetero.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True)
class Choices:
    """How to generate; None leaves it to the model."""

    max_tokens: int | None
    temperature: float
    seed: int | None


class GenerationError(Exception):
    """The engine gave up on the answer: one line."""


def run(settings: Settings, prompt: str, choices: Choices, *, raw: bool) -> int:
    """Print the answer to `prompt`, or with `raw` its continuation, on standard output."""

    async def once(engine: AsyncEngine) -> None:
        if raw:
            tokens = await engine.text.tokenize(prompt)
        else:
            _require_template(engine, "use --raw, or give")
            tokens = await _prompt(engine, [{"role": "user", "content": prompt}])
        await _answer(engine, tokens, choices, 0)

    return _with_engine(settings, lambda runner, engine: runner.run(once(engine)))


def chat(settings: Settings, choices: Choices, system: str | None) -> int:
    """Read lines, answer each with the whole conversation as context."""
    messages = [{"role": "system", "content": system}] if system else []

    async def reply(engine: AsyncEngine) -> str:
        tokens = await _prompt(engine, messages)
        return await _answer(engine, tokens, choices, len(messages))

    def talk(runner: asyncio.Runner, engine: AsyncEngine) -> None:
        _require_template(engine, "give")
        # Lines are read between runs of the event loop: a thread that waits for input cannot be stopped.
        while line := _read_line():
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": runner.run(reply(engine))})
            except KeyboardInterrupt:  # the answer is unwanted, the conversation goes on
                messages.pop()
                print()

    return _with_engine(settings, talk)


def _with_engine(settings: Settings, body: Callable[[asyncio.Runner, AsyncEngine], None]) -> int:
    try:
        with loading() as progress:
            engine = launch(replace(settings, max_num_seqs=1), progress)
        with asyncio.Runner() as runner:
            runner.run(_start(engine))
            try:
                body(runner, engine)
            finally:
                runner.run(engine.close(0))
    except (LaunchError, RequestError, ParamError, GenerationError) as exc:
        return fail(exc)
    except KeyboardInterrupt:
        print()
        return 1
    return 0


async def _start(engine: AsyncEngine) -> None:
    engine.start()


def _require_template(engine: AsyncEngine, remedy: str) -> None:
    if not engine.info.has_chat_template:
        raise GenerationError(f"this model has no chat template: {remedy} --chat-template FILE")


async def _prompt(engine: AsyncEngine, messages: list[dict[str, str]]) -> list[int]:
    """The conversation as tokens. GenerationError when the chat template does not do it."""
    try:
        return (await engine.text.chat(messages)).token_ids
    except RequestError as exc:
        raise GenerationError(f"the chat template refuses this: {exc.message}") from None


async def _answer(engine: AsyncEngine, tokens: list[int], choices: Choices, turn: int) -> str:
    """Stream an answer to standard output and return it."""
    params = SamplingParams(
        max_tokens=choices.max_tokens, temperature=choices.temperature, top_p=0.95, seed=choices.seed
    )
    params.validate(engine.info.n_vocab)
    parts = []
    async for delta in engine.submit(tokens, params, request_id=f"terminal-{turn}"):
        if delta.finish_reason is FinishReason.ERROR:
            raise GenerationError(delta.error or "generation failed")
        parts.append(delta.text)
        print(delta.text, end="", flush=True)
    print(flush=True)
    return "".join(parts)


def _read_line() -> str:
    """The next line without its end; empty at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline().strip()
