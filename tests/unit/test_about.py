"""What a server tells of its settings: all that a measurement depends on, no key, no path, no address."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from tiny_models import tiny_model

from hetero.about import shown_settings
from hetero.config import load
from hetero.kv.fingerprint import model_digest
from hetero.settings import SPECS, Settings
from quant.gguf import open_gguf

PRIVATE = {
    "model": "/home/me/model.gguf", "disk_cache": "/home/me/kv:20GiB",
    "spec": "ngram,draft:/home/me/small.gguf",
    "api_key_file": "/home/me/keys", "tls_cert": "/home/me/cert", "tls_key": "/home/me/key",
    "spec_store": "/home/me/store", "spec_corpus": "/home/me/src", "chat_template": "/home/me/t.jinja",
    "trace": "/home/me/t.json", "api_key": ["/home/me/secret"], "otlp": "http://home/me",
    "allowed_host": ["/home/me"], "allowed_origin": ["http://home/me"], "host": "192.168.0.7",
}  # fmt: skip


def test_nothing_private_is_told() -> None:
    named = {k: tuple(v) if isinstance(v, list) else v for k, v in PRIVATE.items()}
    shown = shown_settings(load(named, {}, None).settings)
    text = json.dumps(shown)
    assert "home" not in text and "secret" not in text and "192" not in text
    assert shown["spec"] == "ngram,draft:small.gguf" and shown["model"] == "model.gguf"
    assert shown["disk_cache"] == "20.0 GiB" and shown["tls_cert"] is True and shown["max_num_seqs"] == 32
    paths = {f.name for f in fields(Settings) if SPECS[f.name].metadata["kind"] in ("path", "folder_limit")}
    assert paths <= PRIVATE.keys(), "a new setting with a path is to be in this test"


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "kv_type", "ctx", "threads", "spec_tokens"])
def test_what_a_measurement_depends_on_is_told(name: str) -> None:
    value = {"kv_type": "k=q8_0,v=fp8"}.get(name, "64")
    shown = shown_settings(load({name: value}, {}, None).settings)
    assert str(shown[name]) == value != str(shown_settings(Settings())[name])


def test_a_models_digest_is_its_contents(tmp_path: Path) -> None:
    def of(path: Path) -> bytes:
        with open_gguf(path) as gguf:
            return model_digest(gguf)

    first = of(tiny_model(tmp_path / "a.gguf"))
    assert first == of(tiny_model(tmp_path / "b.gguf")), "times and names do not matter"
    assert first != of(tiny_model(tmp_path / "c.gguf", seed=1))
