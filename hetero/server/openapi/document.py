"""The document: every route with its body, its answers and its errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hetero import __version__
from hetero.server.openapi import answers, requests
from hetero.server.openapi.shapes import ANY, STRING, Schema, described, ref
from hetero.server.recording import MAX_SECONDS
from hetero.server.request_id import HEADER as REQUEST_ID
from hetero.server.sse import NDJSON

Operation = dict[str, Any]

JSON, SSE = "application/json", "text/event-stream"
ID = {"name": "id", "in": "path", "required": True, "schema": STRING}
SECONDS = {
    "name": "seconds",
    "in": "query",
    "required": True,
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
}
PIECES = described(ANY, "Pieces of the answer, as they come.")
ANYONE_WITH_A_KEY: list[dict[str, list[str]]] = [{}, {"bearer": []}, {"apiKey": []}]
ERRORS = ("Error", "AnthropicError", "OllamaError")
REASONS = {
    400: "Refused; the message names the field.",
    401: "Without a valid API key, where keys are set.",
    403: "The Host or the Origin is not allowed.",
    404: "Nothing of this name is here.",
    408: "The body stopped arriving.",
    413: "The body is too large.",
    415: "A Content-Encoding that is not supported.",
    429: "The key has as many requests running as it may.",
    500: "The generation failed.",
    503: "Nothing can be generated now; Retry-After says when it may be worth another try.",
}
EVERYWHERE = (401, 403)
WITH_BODY = (400, 408, 413, 415)
GENERATES = (429, 500, 503)
DESCRIPTION = """\
Any model name is accepted where something is generated, and answered by the one model that is served. Of a
request's fields a null is as good as absent, and fields that are not named here are ignored, except where
they are listed as not supported: those are refused. HEAD is answered wherever GET is."""


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document of this server."""
    failures = {
        f"{error}{status}": _answer(status, {JSON: ref(error)}) for error in ERRORS for status in REASONS
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "hetero", "version": __version__, "description": DESCRIPTION},
        "security": ANYONE_WITH_A_KEY,
        "paths": {**_openai(), **_anthropic(), **_ollama(), **_llama_server(), **_own()},
        "components": {
            "schemas": {**requests.SCHEMAS, **answers.SCHEMAS},
            "responses": failures,
            "headers": {REQUEST_ID: {"description": "The request's own, or a new one.", "schema": STRING}},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _openai() -> dict[str, Any]:
    stored = {"parameters": [ID]}
    return {
        "/v1/chat/completions": _generate("A chat", "ChatRequest", "Chat"),
        "/v1/completions": _generate("A completion of text", "CompletionRequest", "Completion"),
        "/v1/responses": _generate("A response, which is stored", "ResponsesRequest", "Response"),
        "/v1/responses/{id}": {
            **stored,
            "get": _operation("A stored response", ref("Response"), (400, 404)),
            "delete": _operation("Forgets a response", ref("DeletedResponse"), (404,)),
        },
        "/v1/responses/{id}/input_items": {
            **stored,
            "get": _operation("What a response answered", ref("InputItems"), (404,)),
        },
        "/v1/embeddings": _embed("Embeddings of texts", "EmbeddingsRequest", "Embeddings"),
        "/v1/models": _get("The model", "Models"),
        "/v1/models/{id}": {
            "parameters": [ID],
            "get": _operation("The model, by its name", ref("Model"), (404,)),
        },
    }


def _anthropic() -> dict[str, Any]:
    error = "AnthropicError"
    return {
        "/v1/messages": _generate("Anthropic's messages", "MessagesRequest", "AnthropicMessage", error=error),
        "/v1/messages/count_tokens": _compute("How long a prompt is", "CountRequest", "Count", error=error),
    }


def _ollama() -> dict[str, Any]:
    error = "OllamaError"

    def generate(summary: str, asked: str, told: str) -> Operation:
        return _generate(summary, asked, told, error=error, streamed=NDJSON)

    return {
        "/api/chat": generate("Ollama's chat", "OllamaChatRequest", "OllamaChat"),
        "/api/generate": generate("Ollama's generate", "OllamaGenerateRequest", "OllamaGenerate"),
        "/api/embed": _embed("Embeddings of texts", "OllamaEmbedRequest", "OllamaEmbed", error),
        "/api/embeddings": _embed("Of one text", "OllamaEmbeddingsRequest", "OllamaEmbeddings", error),
        "/api/show": _compute("What is known of the model", "ShowRequest", "Show", (404,), error),
        "/api/version": _get("The version of Ollama whose API this is", "Version", error),
        "/api/tags": _get("The model", "Tags", error),
        "/api/ps": _get("The model, which is loaded", "Ps", error),
    }


def _llama_server() -> dict[str, Any]:
    completion = _generate("llama-server's completion", "LlamaCompletionRequest", "LlamaCompletion")
    embed = _embed("llama-server's embeddings", "LlamaEmbeddingsRequest", "LlamaEmbeddings")
    return {
        "/embedding": embed,
        "/embeddings": embed,
        "/completion": completion,
        "/completions": completion,
        "/infill": _generate("The text between two others", "InfillRequest", "LlamaCompletion"),
        "/tokenize": _compute("Token ids of a text", "TokenizeRequest", "Tokens"),
        "/detokenize": _compute("The text of token ids", "DetokenizeRequest", "Text"),
        "/apply-template": _compute("The prompt of messages", "ApplyTemplateRequest", "Prompt"),
        "/props": _get("What is served, and how", "Props"),
        "/slots": _get("As many as requests are computed at a time", "Slots"),
    }


def _own() -> dict[str, Any]:
    health = _operation("Whether anything can be generated", ref("Health"), ())
    health["responses"]["503"] = _answer(503, {JSON: ref("Ill")})
    return {
        "/": {"get": _operation("A page that shows /status", STRING, (), content="text/html")},
        "/health": {"get": {**health, "security": []}},
        "/v1/health": {"get": health},
        "/metrics": {"get": _operation("For Prometheus", STRING, (), content="text/plain")},
        "/status": _get("What runs where, and how busy it is", "Status"),
        "/recording": {
            "parameters": [SECONDS],
            "get": _operation("Traffic as it comes, without text", STRING, (400,), content=NDJSON),
        },
        "/openapi.json": {"get": _operation("This document", {"type": "object"}, ())},
    }


def _get(summary: str, told: str, error: str = "Error") -> dict[str, Any]:
    return {"get": _operation(summary, ref(told), (), error)}


def _generate(
    summary: str, asked: str, told: str, *, error: str = "Error", streamed: str = SSE
) -> dict[str, Any]:
    operation = _operation(summary, ref(told), (*WITH_BODY, *GENERATES), error, asked)
    operation["responses"]["200"]["content"][streamed] = {"schema": PIECES}
    return {"post": operation}


def _embed(summary: str, asked: str, told: str, error: str = "Error") -> dict[str, Any]:
    return {"post": _operation(summary, ref(told), (*WITH_BODY, *GENERATES), error, asked)}


def _compute(
    summary: str, asked: str, told: str, more: Iterable[int] = (), error: str = "Error"
) -> dict[str, Any]:
    return {"post": _operation(summary, ref(told), (*WITH_BODY, *more), error, asked)}


def _operation(
    summary: str,
    told: Schema,
    errors: Iterable[int],
    error: str = "Error",
    asked: str | None = None,
    content: str = JSON,
) -> Operation:
    """`told`: the schema of a good answer; `errors`: statuses of others, which are of the schema `error`."""
    responses: dict[str, Any] = {"200": _answer(200, {content: told})}
    for status in sorted({*EVERYWHERE, *errors}):
        responses[str(status)] = {"$ref": f"#/components/responses/{error}{status}"}
    operation: Operation = {"summary": summary, "responses": responses}
    if asked is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": ref(asked)}}}
    return operation


def _answer(status: int, contents: Mapping[str, Schema]) -> dict[str, Any]:
    return {
        "description": REASONS.get(status, "The answer."),
        "headers": {REQUEST_ID: {"$ref": f"#/components/headers/{REQUEST_ID}"}},
        "content": {kind: {"schema": schema} for kind, schema in contents.items()},
    }
