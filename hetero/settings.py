"""Every setting of `hetero serve`: its name, default, bounds and the text that explains it.

hetero/config.py reads them from flags, variables and files; `make docs` prints them as docs/config.md.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hetero.kv_types import F16, KVTypes
from hetero.sizes import format_size
from hetero.spec_setting import parse_spec

LOG_LEVELS = ("debug", "info", "warning", "error")
OBJECTIVES = ("balanced", "latency", "throughput", "capacity")
ENGINES = ("auto", "llama")
ISOLATION = ("auto", "all", "off")
SCOPES = ("shared", "key")
PRIORITIES = ("any", "yield")
MAX_STEP_DRAFTS = 64  # guessed tokens in a step; each wants a row of logits
OFF = -1  # a size that was switched off


@dataclass(frozen=True, slots=True)
class FolderLimit:
    """A folder and how much may be in it, written DIR:SIZE."""

    folder: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.folder}:{format_size(self.nbytes)}"


def setting(default: Any, help: str, *, kind: str, low: int = 0, high: int = 1 << 62, **extra: Any) -> Any:
    """A field of Settings. `kind`: str, int, size (bytes), list (of str), counts (of int), path, choice,
    kv_types, folder_limit or spec.
    """
    meta = {"help": help, "kind": kind, "low": low, "high": high, **extra}
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting of the server. Sizes are bytes, counts are plain integers, 0 means "decide for me"."""

    model: str | None = setting(
        None,
        "Model to serve: a .gguf file, a folder with one, a name in the model folder, or "
        "hf:owner/repo[:QUANT] on Hugging Face, which is downloaded. Without one, the packaged model.",
        kind="str",
    )
    host: str = setting("127.0.0.1", "Address to listen on. 0.0.0.0 lets other machines in.", kind="str")
    port: int = setting(8080, "Port to listen on.", kind="int", low=1, high=65535)
    device: tuple[str, ...] = setting(
        (),
        "Device to compute on, as `hetero devices` prints it; `CPU:threads=4` sets its threads. Several "
        "share the layers in this order. Without one: all GPUs, else the CPU.",
        kind="list",
    )
    split: tuple[int, ...] = setting(
        (), "Layers on each device, such as 20,12, in place of the measured split.", kind="counts"
    )
    objective: str = setting(
        "balanced",
        "What the split is best for: one user's wait (latency), many users' tokens per second (throughput), "
        "the largest KV cache (capacity), or max_num_seqs users (balanced).",
        kind="choice",
        choices=OBJECTIVES,
    )
    pipeline_depth: int = setting(
        0, "Steps in flight through the devices. 0: one per device.", kind="int", high=64
    )
    isolate: str = setting(
        "auto",
        "Which devices compute in a process of their own, so that the server outlives a driver that aborts: "
        "those whose drivers do (auto), all, or none (off).",
        kind="choice",
        choices=ISOLATION,
    )
    engine: str = setting(
        "auto",
        "What computes the model: hetero's own graphs where they know its family, else libllama (auto), or "
        "libllama in any case (llama). With libllama several requests at a time are slower, and there is "
        "no RAM or disk cache.",
        kind="choice",
        choices=ENGINES,
    )
    cpu_moe: int = setting(
        0,
        "Layers whose experts stay in main memory, where the CPU computes them, while attention is on the "
        "--device: models of many experts then need little of a graphics card's memory. 0: as few as make "
        "the model fit, none where it fits without.",
        kind="int",
        high=4096,
    )
    threads: int = setting(0, "CPU threads that compute. 0: one per available core.", kind="int", high=4096)
    ctx: int = setting(
        0, "Longest context of one request, in tokens. 0: what the model was trained for.", kind="int"
    )
    kv_memory: int = setting(
        0, "Memory for the KV cache, such as 2GiB. 0: up to a quarter of the free memory.", kind="size"
    )
    kv_tokens: int = setting(
        0, "Tokens that the KV cache holds, in place of kv_memory. 0: what kv_memory holds.", kind="int"
    )
    kv_type: KVTypes = setting(  # noqa: RUF009  like the others
        F16,
        "Format of the KV cache: f16, fp8 or q8_0, or keys and values apart, such as k=q8_0,v=fp8. fp8 and "
        "q8_0 hold nearly twice as many tokens in the same memory; docs/quality.md says what they cost.",
        kind="kv_types",
    )
    ram_cache: int = setting(
        0,
        "Host memory for blocks that had to leave the KV cache, such as 8GiB; they come back instead of "
        "being computed again. 0: a quarter of the free memory where a device has its own memory and "
        "none is a worker's, else none. off: none.",
        kind="size",
        off=True,
    )
    cache_scope: str = setting(
        "shared",
        "Who finds what others have computed: all (shared), or only requests with the same API key (key). "
        "How soon an answer begins tells whether its prompt was known.",
        kind="choice",
        choices=SCOPES,
    )
    disk_cache: FolderLimit | None = setting(  # noqa: RUF009  like the others
        None,
        "Folder for contexts that are kept on a disk, and how much of it they may take, such as "
        "/var/cache/hetero:20GiB. They survive restarts. Several servers and models may share the folder. "
        "Whoever can read it can find out what was asked. off: none.",
        kind="folder_limit",
        low=1 << 20,
        off=True,
    )
    max_num_seqs: int = setting(
        32, "Requests that are computed at the same time; more than that wait.", kind="int", low=1, high=1024
    )
    max_num_batched_tokens: int = setting(
        512,
        "Tokens computed in one step. A long prompt is cut into chunks of this size, so that it does not "
        "hold up running requests for longer than one chunk.",
        kind="int",
        low=16,
        high=65536,
    )
    spec: str = setting(
        "store",
        "Guess tokens ahead and verify them in the same step, which changes no answer: from what the request "
        "itself repeats (ngram), also from what was served before (store), or not at all (off). Where these "
        "have no guess, a small model with the same vocabulary can make one (draft:MODEL, which comes after "
        "store, or ngram,draft:MODEL). How many guesses are made and computed is decided from step to step "
        "by what they cost and how often they are right.",
        kind="spec",
    )
    spec_device: str | None = setting(
        None,
        "Device of the draft model, as --device has it. Without one: the model's own graphics card, if it "
        "has room, else the CPU.",
        kind="str",
    )
    spec_tokens: int = setting(
        16, "Tokens that are guessed ahead at most.", kind="int", low=1, high=MAX_STEP_DRAFTS
    )
    spec_store: str | None = setting(
        None,
        "File in which what --spec store has learned is kept from one start to the next. It holds pieces of "
        "what was served. Without one it is forgotten.",
        kind="path",
    )
    spec_corpus: str | None = setting(
        None,
        "Folder of texts, such as source code, that --spec store learns at the start.",
        kind="path",
        metavar="DIR",
    )
    spec_memory: int = setting(
        64 << 20,
        "Memory for what --spec store learns. 14 bytes a token, taken as it fills up.",
        kind="size",
        low=1 << 20,
        high=1 << 32,
    )
    spec_scope: str = setting(
        "shared",
        "Whether --spec store guesses from what was served to anybody (shared) or only to the same API key "
        "(key): how fast an answer comes can tell what was served before.",
        kind="choice",
        choices=SCOPES,
    )
    api_key: tuple[str, ...] = setting((), "Key that clients must send.", kind="list", secret=True)
    api_key_file: str | None = setting(None, "File with one API key on each line.", kind="path")
    allowed_host: tuple[str, ...] = setting(
        (),
        "Host name, besides this machine's own, under which clients may call the server.",
        kind="list",
    )
    allowed_origin: tuple[str, ...] = setting(
        (),
        "Origin of a web page that may call the server from a browser, such as http://localhost:3000.",
        kind="list",
        address=True,
    )
    key_requests: int = setting(
        0, "Requests of one API key that are answered at the same time; more get a 429. 0: any number.",
        kind="int", high=1 << 20,
    )  # fmt: skip
    priority: str = setting(
        "any",
        "Which `priority` a request may have: any, or only one that gives way to others (yield). A number "
        "below 0 is then refused, so that nobody goes before the rest.",
        kind="choice",
        choices=PRIORITIES,
    )
    tls_cert: str | None = setting(
        None, "File with a certificate chain (PEM), to serve over https. Needs tls_key.", kind="path"
    )
    tls_key: str | None = setting(None, "File with the certificate's private key (PEM).", kind="path")
    max_body: int = setting(32 << 20, "Largest request body, such as 32MiB.", kind="size", low=1024)
    chat_template: str | None = setting(
        None, "File with a Jinja chat template to use in place of the model's own.", kind="path"
    )
    model_name: str | None = setting(
        None, "Name of the model in the API. Default: the file's name.", kind="str"
    )
    trace: str | None = setting(
        None,
        "File for a trace of every request and step, to open in ui.perfetto.dev or chrome://tracing. It "
        "holds times and counts, no text.",
        kind="path",
    )
    otlp: str | None = setting(
        None,
        "Address of an OpenTelemetry collector that gets a span for each request, such as "
        "http://localhost:4318/v1/traces. Needs the extra otlp.",
        kind="str",
        address=True,
    )
    log_level: str = setting("info", "What is logged to stderr.", kind="choice", choices=LOG_LEVELS)

    @property
    def draft_rows(self) -> int:
        """Rows of logits that guesses need in a step."""
        return 0 if self.spec == "off" else MAX_STEP_DRAFTS

    @property
    def spec_ngrams(self) -> str:
        """What --spec says without the draft model."""
        return parse_spec(self.spec).ngrams

    @property
    def spec_draft(self) -> str | None:
        """The draft model of --spec."""
        return parse_spec(self.spec).draft


SPECS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Settings)}


def flag_name(name: str) -> str:
    """The command-line spelling of a setting; the model is an argument."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")
