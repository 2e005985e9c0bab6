"""A model that calls a tool whenever it is offered one and has not heard from it yet."""

from __future__ import annotations

import json
from typing import Any

from server.background import HERMES
from server.fake_engine import FakeEngine, FakeStream

from hetero.text.service import ChatPrompt

CONTEXT = 400_000  # tokens, which are bytes here: agents begin with 50 kB


class ScriptedEngine(FakeEngine):
    """Calls `tool` with `arguments`, then says `script`; says that at once where `tool` is not offered."""

    def __init__(self, script: str, tool: str = "", arguments: dict[str, Any] | None = None) -> None:
        super().__init__(script)
        self.template_source = HERMES
        self.info.n_ctx = self.info.kv_tokens = CONTEXT
        self.call = f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments or {}})}\n</tool_call>"
        self.tool = tool
        self._calls_for: set[tuple[int, ...]] = set()  # prompts that a call answers

    async def chat(self, messages: list[dict[str, Any]], **asked: Any) -> ChatPrompt:
        prompt = await super().chat(messages, **asked)
        offered = {tool["function"]["name"] for tool in asked.get("tools", ())}
        if self.tool in offered and not any(message["role"] == "tool" for message in messages):
            self._calls_for.add(tuple(prompt.token_ids))
        return prompt

    def submit(self, prompt: list[int], params: Any, **more: Any) -> FakeStream:
        if tuple(prompt) in self._calls_for:
            self.scripts.insert(0, self.call)
        return super().submit(prompt, params, **more)

    @property
    def results(self) -> list[str]:
        """What the tools gave back, of every conversation, in order."""
        seen = [m["content"] for messages, *_ in self.rendered for m in messages if m["role"] == "tool"]
        return [content if isinstance(content, str) else json.dumps(content) for content in seen]
