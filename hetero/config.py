"""Settings of `hetero serve`: from flags, then HETERO_* variables, then hetero.toml, then defaults.

`python -m hetero.config` prints the reference page docs/config.md.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.kv_types import F16, KVTypes, parse_kv_types
from hetero.spec_setting import parse_spec

CONFIG_FILE = "hetero.toml"
LOG_LEVELS = ("debug", "info", "warning", "error")
OBJECTIVES = ("balanced", "latency", "throughput", "capacity")
ISOLATION = ("auto", "all", "off")
SCOPES = ("shared", "key")
MAX_STEP_DRAFTS = 64  # guessed tokens in a step; each wants a row of logits
OFF = -1  # a size that was switched off
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class SettingError(ValueError):
    """A setting that cannot be used: one line that names it and where it came from."""


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
        "Model to serve: a .gguf file, a folder with one, or a name in the model folder. Without one, the "
        "packaged default model.",
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
        None, "Folder of texts, such as source code, that --spec store learns at the start.", kind="path"
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
    )
    max_body: int = setting(32 << 20, "Largest request body, such as 32MiB.", kind="size", low=1024)
    chat_template: str | None = setting(
        None, "File with a Jinja chat template to use in place of the model's own.", kind="path"
    )
    model_name: str | None = setting(
        None, "Name of the model in the API. Default: the file's name.", kind="str"
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


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and, for each name, where its value came from."""

    settings: Settings
    sources: Mapping[str, str]


def flag_name(name: str) -> str:
    """The command-line spelling of a setting; the model is an argument."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def parse_size(text: str | int) -> int:
    """Bytes of `2GiB`, `512M`, `1.5 GB` or `1024`. Units are powers of 1024. ValueError otherwise."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a size such as 512M or 2GiB")
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])


def load(
    flags: Mapping[str, Any], env: Mapping[str, str] | None = None, config_file: Path | None = None
) -> Loaded:
    """Settings from all sources. `flags` holds only what was given on the command line.

    `config_file` None looks for hetero.toml in the current folder, then in the user's configuration
    folder. Raises SettingError.
    """
    env = os.environ if env is None else env
    path = config_file or find_config_file()
    table = read_config_file(path) if path else {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, spec in SPECS.items():
        variable = "HETERO_" + name.upper()
        if name in flags:
            raw, source, origin = flags[name], flag_name(name), "command line"
        elif env.get(variable, "") != "":
            raw, source, origin = env[variable], variable, variable
            if spec.metadata["kind"] == "list":
                raw = [part.strip() for part in raw.split(",") if part.strip()]
        elif name in table:
            raw, source, origin = table[name], f"{name} in {path}", str(path)
        else:
            values[name], sources[name] = spec.default, "default"
            continue
        try:
            values[name] = _convert(spec, raw)
        except ValueError as exc:
            raise SettingError(f"{source}: {exc}") from None
        sources[name] = origin
    if values["kv_tokens"] and values["kv_memory"]:
        raise SettingError("--kv-tokens and --kv-memory size the same cache: set one of them")
    for name in ("cache_scope", "spec_scope"):
        if values[name] == "key" and not (values["api_key"] or values["api_key_file"]):
            raise SettingError(f"{flag_name(name)} key: there are no API keys; --api-key sets one")
    if values["spec_device"] and not parse_spec(values["spec"]).draft:
        raise SettingError("--spec-device: there is no draft model for it; --spec draft:MODEL names one")
    return Loaded(Settings(**values), sources)


def find_config_file() -> Path | None:
    """hetero.toml in the current folder, else in the user's configuration folder, else None."""
    import platformdirs

    user_folder = Path(platformdirs.user_config_dir("hetero", appauthor=False))
    candidates = [Path(CONFIG_FILE), user_folder / CONFIG_FILE]
    return next((path for path in candidates if path.is_file()), None)


def read_config_file(path: Path) -> dict[str, Any]:
    """The file's table; SettingError names an unknown key and the nearest known one."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as exc:
        raise SettingError(f"{path}: {exc.strerror or exc}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SettingError(f"{path}: {exc}") from None
    for key in table:
        if key not in SPECS:
            near = difflib.get_close_matches(key.replace("-", "_").lower(), SPECS, n=1, cutoff=0.0)
            raise SettingError(f"{path}: unknown setting {key!r}; did you mean {near[0]!r}?")
    return table


def _convert(spec: dataclasses.Field[Any], raw: Any) -> Any:
    meta = spec.metadata
    kind = meta["kind"]
    if kind == "list":
        items = [raw] if isinstance(raw, str) else raw
        if not isinstance(items, (list, tuple)) or not all(isinstance(i, str) and i for i in items):
            raise ValueError("must be a list of non-empty strings")
        return tuple(items)
    if kind == "counts":
        items = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(items, (list, tuple)) or not items:
            raise ValueError("must be whole numbers with commas between, such as 20,12")
        return tuple(_number(i.strip() if isinstance(i, str) else i, "int", 1, meta["high"]) for i in items)
    if meta.get("off") and isinstance(raw, str) and raw.lower() == "off":
        return OFF if kind == "size" else None
    if kind in ("int", "size"):
        return _number(raw, kind, meta["low"], meta["high"])
    if not isinstance(raw, str) or not raw or "\0" in raw:
        raise ValueError("must be a non-empty string")
    if kind == "kv_types":
        return parse_kv_types(raw)
    if kind == "folder_limit":
        return _folder_limit(raw, meta["low"])
    if kind == "spec":
        parse_spec(raw)
    if kind == "choice" and raw not in meta["choices"]:
        raise ValueError(f"{raw!r} is not one of {', '.join(meta['choices'])}")
    return str(Path(raw).expanduser()) if kind == "path" else raw


def _folder_limit(raw: str, low: int) -> FolderLimit:
    folder, _, size = raw.rpartition(":")  # the last: a folder of Windows may have one, too
    if not folder:
        raise ValueError(f"{raw!r} is not DIR:SIZE, such as /var/cache/hetero:20GiB")
    return FolderLimit(str(Path(folder).expanduser()), _number(size, "size", low, 1 << 62))


def _number(raw: Any, kind: str, low: int, high: int) -> int:
    if isinstance(raw, bool) or not isinstance(raw, (int, str)):
        raise ValueError("must be a size such as 2GiB" if kind == "size" else "must be a whole number")
    try:
        value = parse_size(raw) if kind == "size" else int(raw)
    except ValueError as exc:
        raise ValueError(f"{raw!r} {exc if kind == 'size' else 'is not a whole number'}") from None
    if not low <= value <= high:
        bound = f"at least {low}" if high >= 1 << 62 else f"between {low} and {high}"
        raise ValueError(f"must be {bound}, not {value}")
    return value


def describe(loaded: Loaded) -> list[tuple[str, str, str]]:
    """(name, value, source) of each setting, as `--print-config` shows them; secrets are masked."""
    rows = []
    for name, spec in SPECS.items():
        value = getattr(loaded.settings, name)
        secret = spec.metadata.get("secret") and value
        text = f"{len(value)} set" if secret else show_value(spec, value)
        rows.append((name, text, loaded.sources[name]))
    return rows


def format_size(nbytes: float) -> str:
    """Bytes for people: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def show_value(spec: dataclasses.Field[Any], value: Any) -> str:
    """A setting's value for people."""
    if value is None or value == ():
        return "-"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if spec.metadata.get("off") and value == OFF:
        return "off"
    return format_size(value) if spec.metadata["kind"] == "size" and value else str(value)


if __name__ == "__main__":
    from hetero.config_docs import render_docs

    print(render_docs(), end="")
