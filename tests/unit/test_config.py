"""Settings: where they come from, what is refused, and that each is documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends import kv_format
from hetero import config
from hetero.config import SettingError, load
from hetero.config_docs import render_docs
from hetero.kv_types import KV_TYPES, KVTypes, parse_kv_types, parse_several
from hetero.settings import SPECS, FolderLimit, Settings
from hetero.sizes import parse_size

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_defaults():
    loaded = load({}, {})
    assert loaded.settings == Settings()
    assert set(loaded.sources.values()) == {"default"}


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path):
    (tmp_path / "hetero.toml").write_text('port = 1001\nthreads = 3\nctx = 512\nkv_memory = "1.5GiB"\n')
    loaded = load({"port": "1003"}, {"HETERO_PORT": "1002", "HETERO_THREADS": "4", "HETERO_CTX": ""})
    got = loaded.settings
    assert (got.port, got.threads, got.ctx, got.kv_memory) == (1003, 4, 512, 3 << 29)
    assert [loaded.sources[n] for n in ("port", "threads", "ctx", "host")] == [
        "command line",
        "HETERO_THREADS",
        "hetero.toml",
        "default",
    ]


def test_lists():
    (Path("hetero.toml")).write_text('allowed_host = ["a.example", "b"]\napi_key = "one"\n')
    got = load({"device": ("CPU:threads=2",)}, {"HETERO_ALLOWED_ORIGIN": "http://x, http://y"}).settings
    assert got.allowed_host == ("a.example", "b")
    assert got.api_key == ("one",)
    assert got.allowed_origin == ("http://x", "http://y")
    assert got.device == ("CPU:threads=2",)


def test_layers_per_device_are_numbers_in_any_source():
    assert load({"split": "20,12"}, {}).settings.split == (20, 12)
    assert load({}, {"HETERO_SPLIT": "20, 12"}).settings.split == (20, 12)
    Path("hetero.toml").write_text("split = [3, 4, 5]\n")
    loaded = load({}, {})
    assert loaded.settings.split == (3, 4, 5)
    assert ("split", "3, 4, 5", "hetero.toml") in config.describe(loaded)


@pytest.mark.parametrize(
    ("text", "keys", "values"),
    [
        ("fp8", "fp8", "fp8"),
        ("Q8_0", "q8_0", "q8_0"),
        ("k=q8_0,v=fp8", "q8_0", "fp8"),
        ("v=f16, k=fp8", "fp8", "f16"),
        ("v=fp8", "f16", "fp8"),
    ],
)
def test_formats_of_the_kv_cache(text: str, keys: str, values: str):
    wanted = KVTypes(keys, values)
    for source in ({"kv_type": text}, {}), ({}, {"HETERO_KV_TYPE": text}):
        loaded = load(*source)
        assert loaded.settings.kv_type == wanted
        assert [value for name, value, _ in config.describe(loaded) if name == "kv_type"] == [str(wanted)]
    assert parse_kv_types(str(wanted)) == wanted
    assert parse_several(f"f16,{text}, fp8,{wanted}") == [KVTypes(), wanted, KVTypes("fp8", "fp8"), wanted]


@pytest.mark.parametrize(
    ("text", "folder", "nbytes"),
    [
        ("/var/cache/hetero:20GiB", "/var/cache/hetero", 20 << 30),
        ("cache:1.5 gb", "cache", 3 << 29),
        (r"C:\cache:64M", r"C:\cache", 64 << 20),
        ("~/x:y:1M", str(Path("~/x:y").expanduser()), 1 << 20),
    ],
)
def test_a_folder_and_its_limit(text: str, folder: str, nbytes: int):
    wanted = FolderLimit(folder, nbytes)
    for source in ({"disk_cache": text}, {}), ({}, {"HETERO_DISK_CACHE": text}):
        loaded = load(*source)
        assert loaded.settings.disk_cache == wanted
        assert ("disk_cache", str(wanted)) in [(name, value) for name, value, _ in config.describe(loaded)]
    assert load({"disk_cache": str(wanted)}, {}).settings.disk_cache == wanted
    assert load({"disk_cache": "Off"}, {"HETERO_DISK_CACHE": text}).settings.disk_cache is None


def test_the_formats_are_those_that_are_implemented():
    assert KV_TYPES == kv_format.KV_TYPES


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512M", 512 << 20),
        ("2GiB", 2 << 30),
        ("1.5 gb", 3 << 29),
        ("1024", 1024),
        ("3KB", 3072),
        ("1T", 1 << 40),
    ],
)
def test_sizes(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "2 apples", "1e9", "0x10", "1GG", "nan"])
def test_not_sizes(text: str):
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("flags", "env", "toml", "words"),
    [
        ({"port": "http"}, {}, "", ["--port", "'http'", "whole number"]),
        ({"port": "70000"}, {}, "", ["--port", "65535", "70000"]),
        ({}, {"HETERO_CTX": "-1"}, "", ["HETERO_CTX", "-1"]),
        ({}, {"HETERO_KV_MEMORY": "lots"}, "", ["HETERO_KV_MEMORY", "'lots'", "2GiB"]),
        ({}, {"HETERO_LOG_LEVEL": "loud"}, "", ["HETERO_LOG_LEVEL", "loud", "warning"]),
        ({}, {}, "port = true", ["port", "hetero.toml", "whole number"]),
        ({"split": "20,x"}, {}, "", ["--split", "'x'", "whole number"]),
        ({}, {"HETERO_SPLIT": "0,4"}, "", ["HETERO_SPLIT", "at least 1"]),
        ({}, {}, "split = 3", ["split", "hetero.toml", "20,12"]),
        ({"kv_type": "f8"}, {}, "", ["--kv-type", "'f8'", "fp8, q8_0"]),
        ({}, {"HETERO_KV_TYPE": "q8_0,fp8"}, "", ["HETERO_KV_TYPE", "q8_0,fp8", "k=q8_0,v=fp8"]),
        ({}, {}, 'kv_type = "k=fp8,k=f16"', ["kv_type", "hetero.toml", "k=q8_0,v=fp8"]),
        ({}, {}, "kv_type = 8", ["kv_type", "hetero.toml", "string"]),
        ({"disk_cache": "/cache"}, {}, "", ["--disk-cache", "'/cache'", "DIR:SIZE"]),
        ({"disk_cache": ":1G"}, {}, "", ["--disk-cache", "':1G'", "DIR:SIZE"]),
        ({}, {"HETERO_DISK_CACHE": r"C:\cache"}, "", ["HETERO_DISK_CACHE", "not a size"]),
        ({"disk_cache": "/cache:1K"}, {}, "", ["--disk-cache", "at least 1.0 MiB, not 1.0 KiB"]),
        (
            {"allowed_origin": ("http://a", "localhost:3000")},
            {},
            "",
            ["--allowed-origin", "'localhost:3000'"],
        ),
        ({}, {"HETERO_OTLP": "collector"}, "", ["HETERO_OTLP", "'collector'", "http://"]),
        ({}, {}, "disk_cache = 5", ["disk_cache", "hetero.toml", "string"]),
        ({"objective": "speed"}, {}, "", ["--objective", "speed", "throughput"]),
        ({}, {}, "api_key = [1]", ["api_key", "hetero.toml", "strings"]),
        ({}, {}, 'host = ""', ["host", "hetero.toml", "non-empty"]),
        ({}, {}, "max-num-seq = 3", ["hetero.toml", "'max-num-seq'", "'max_num_seqs'"]),
        ({}, {}, "port = = 1", ["hetero.toml", "line 1"]),
        ({}, {}, "[server]\nport = 1", ["hetero.toml", "'server'", "--print-config"]),
        (
            {"kv_tokens": "100"},
            {"HETERO_KV_MEMORY": "1G"},
            "",
            ["--kv-tokens (command line) and --kv-memory (HETERO_KV_MEMORY)"],
        ),
    ],
)
def test_errors_name_the_setting_and_its_source(flags, env, toml, words):
    Path("hetero.toml").write_text(toml)
    with pytest.raises(SettingError) as caught:
        load(flags, env)
    line = str(caught.value)
    assert "\n" not in line
    assert [w for w in words if w not in line] == []


def test_a_file_from_windows_editor():
    Path("hetero.toml").write_bytes(b"\xef\xbb\xbfport = 9000\r\n")
    assert load({}, {}).settings.port == 9000
    Path("hetero.toml").write_bytes(b"port = 9000 # gro\xdf")
    with pytest.raises(SettingError, match=r"hetero\.toml: it is not text in UTF-8"):
        load({}, {})


def test_any_origin_and_that_of_pages_without_one_can_be_allowed():
    origins = ("*", "null", "vscode-webview://abc", "http://localhost:3000/")
    assert load({"allowed_origin": origins}, {}).settings.allowed_origin == origins


def test_a_named_file_must_exist(tmp_path):
    with pytest.raises(SettingError, match=r"other\.toml"):
        load({}, {}, tmp_path / "other.toml")


def test_secrets_are_never_shown():
    rows = config.describe(load({"api_key": ("very-secret", "too")}, {}))
    shown = {name: value for name, value, _ in rows}
    assert shown["api_key"] == "2 set"
    assert "very-secret" not in str(rows)
    assert set(shown) == set(SPECS)


def test_every_setting_is_documented():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    for name, spec in SPECS.items():
        assert spec.metadata["help"].endswith("."), name
        assert f"`HETERO_{name.upper()}`" in page, name
    assert page == render_docs(), "run `make docs`"


def test_settings_are_used():
    """A setting that no other module mentions is a dead one."""
    sources = [p for folder in ("hetero", "backends") for p in (ROOT / folder).rglob("*.py")]
    text = "\n".join(p.read_text(encoding="utf-8") for p in sources if p.name != "config.py")
    assert [name for name in SPECS if f"settings.{name}" not in text] == []


@pytest.mark.parametrize("name", ["cache_scope", "spec_scope"])
def test_without_api_keys_nobody_can_be_kept_apart(name):
    flag = "--" + name.replace("_", "-")
    with pytest.raises(SettingError, match=f"^{flag} key: there are no API keys; --api-key sets one$"):
        load({name: "key"}, {})
    assert getattr(load({name: "key", "api_key": ("a",)}, {}).settings, name) == "key"
    assert getattr(load({name: "key", "api_key_file": "keys"}, {}).settings, name) == "key"
