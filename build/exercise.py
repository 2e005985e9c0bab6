"""Has a program use, with tiny random models, every kernel that numba compiles: for warm.py and verify.sh.

    python build/exercise.py FOLDER [--inside FOLDER] -- dist/hetero

Writes the models to FOLDER, which the program sees as --inside. Only what is compiled matters here, no
answer does: kernels are compiled for formats, not for sizes, so the smallest models will do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
START_SECONDS, ANSWER_SECONDS = 900, 300  # long enough to compile what it needs
KINDS = ("f16", "fp8", "q8_0")
TWICE = "one two three four five six seven eight " * 2  # what it repeats is guessed
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": TWICE, "max_tokens": 24, "temperature": 0}),
    ("/v1/completions", {"prompt": TWICE, "max_tokens": 24, "temperature": 0}),  # as it was answered before
    (
        "/v1/completions",
        {
            **{"prompt": "Name three rivers.", "max_tokens": 8, "n": 2, "seed": 1, "logprobs": 3},
            **{"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logit_bias": {"5": 1}},
            **{"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1},
        },
    ),
    (
        "/v1/completions",
        {
            **{"prompt": "Answer in JSON.", "max_tokens": 8},
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
)
EMBEDDINGS = ("/v1/embeddings", {"input": ["a river", "a bridge"]})


@dataclass(frozen=True, slots=True)
class Serving:
    """A server with these arguments, and what it is asked."""

    arguments: tuple[str, ...]
    requests: tuple[tuple[str, dict[str, Any]], ...] = REQUESTS


def make_models(folder: Path) -> tuple[str, ...]:
    """Writes them; the names of those that are there for the format of their weights."""
    from tiny_experts import Sizes, tiny_experts
    from tiny_hybrid import tiny_hybrid
    from tiny_models import tiny_model

    from backends.cpu.matmul.layout import FORMATS

    folder.mkdir(parents=True, exist_ok=True)
    tiny_model(folder / "dense.gguf", head_dim=32)
    tiny_model(folder / "gemma3.gguf", "gemma3", head_dim=32)
    tiny_experts(folder / "experts.gguf", "qwen3moe")
    tiny_experts(folder / "gpt-oss.gguf", "gpt-oss", sizes=Sizes(head_dim=32))
    tiny_hybrid(folder / "hybrid.gguf")
    tiny_hybrid(folder / "hybrid-experts.gguf", "qwen35moe")
    names = [fmt.name for fmt in FORMATS.values()]
    for name in names:  # rows of whole blocks, and heads that each format of the KV cache takes
        sizes = {"n_embd": 256, "n_ff": 256, "head_dim": 64, "n_layers": 1}
        tiny_model(folder / f"{name}.gguf", weight_type=name, embedding_type=name, **sizes)
    return tuple(names)


def servings(folder: str) -> list[Serving]:
    """`folder` as the program sees it."""
    two = ("--device", "CPU:threads=1", "--device", "CPU:threads=1")
    dense, experts = f"{folder}/dense.gguf", f"{folder}/experts.gguf"
    small = ("--kv-tokens", "256", "--ctx", "128")
    return [
        Serving((dense, "--spec", "store", *small, "--ram-cache", "16MiB"), (*REQUESTS, EMBEDDINGS)),
        Serving((dense, "--spec", f"draft:{folder}/Q8_0.gguf", "--ctx", "128")),
        Serving((dense, *two, "--isolate", "all", "--ctx", "128")),
        Serving((experts, *two, "--kv-type", "fp8", "--ctx", "128")),
        Serving((f"{folder}/gpt-oss.gguf", "--kv-type", "q8_0", "--ctx", "128")),
        Serving((f"{folder}/gemma3.gguf", "--kv-type", "k=q8_0,v=fp8", "--ctx", "128")),
        Serving((f"{folder}/hybrid.gguf", "--spec", "ngram", "--ctx", "128")),
        Serving((f"{folder}/hybrid-experts.gguf", *two, "--ctx", "128")),
    ]


class Failed(Exception):
    """The program did not do as it was told: what, and its last lines."""


def exercise(
    program: Sequence[str], folder: Path, inside: str, environment: dict[str, str] | None = None
) -> None:
    """Raises Failed. `environment`: the program's, where it is not this process's."""
    _run([*program, "doctor", "--kernels"], environment)  # fails where there is no default model
    for index, name in enumerate(make_models(folder)):
        options = ["--raw", "--max-tokens", "2", "--ctx", "128", "--kv-type", KINDS[index % len(KINDS)]]
        done = _run([*program, "run", TWICE, "-m", f"{inside}/{name}.gguf", *options], environment)
        if done.returncode:
            raise Failed(f"{name}: {done.stderr[-2000:]}")
    for serving in servings(inside):
        with _server(program, serving, environment) as url:
            for path, body in serving.requests:
                _post(url + path, body)


def _run(command: Sequence[str], environment: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": START_SECONDS}
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False, **options)


@contextlib.contextmanager
def _server(program: Sequence[str], serving: Serving, environment: dict[str, str] | None) -> Iterator[str]:
    """Its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*program, "serve", *serving.arguments, "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait(process, f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}"
        except (OSError, Failed) as exc:
            raise Failed(f"{' '.join(serving.arguments)}: {exc}\n{_end_of(log)}") from None
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _wait(process: subprocess.Popen[bytes], address: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise Failed("did not start")
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.05)
    raise Failed("was not ready in time")


def _post(address: str, body: dict[str, Any]) -> None:
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
        response.read()


def _end_of(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-2000:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--inside", help="Where the program sees FOLDER, if elsewhere.")
    parser.add_argument("program", nargs="+", help="The program, with what has to come before its arguments.")
    given = parser.parse_args()
    try:
        exercise(given.program, given.folder, given.inside or str(given.folder.resolve()))
    except Failed as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()
