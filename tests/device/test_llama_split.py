"""libllama with some of its layers on another device: where the plan has them."""

from __future__ import annotations

from pathlib import Path

from llama_models import FAMILIES
from tiny_models import libllama_logits

from hetero import launch
from hetero.engine import Engine
from hetero.prepare import prepare
from hetero.request import OutputDelta, Request
from hetero.sampling.params import SamplingParams
from hetero.settings import Settings


def test_layers_on_two_devices(address: str, tmp_path: Path) -> None:
    path = FAMILIES["stablelm"](tmp_path / "m.gguf")
    settings = Settings(
        model=str(path), threads=1, max_num_seqs=2, device=(f"rpc={address}", "CPU"), split=(1, 1)
    )
    prepared = prepare(settings)
    assert [(s.device, s.layers) for s in prepared.plan.stages] == [
        ("CPU", (0, 1)),
        (f"rpc={address}/RPC0", (1, 2)),
    ]
    loaded, (placed,) = launch.load(prepared, settings, lambda *_: None)
    engine: Engine = loaded._engine
    try:
        assert placed.device == f"CPU, rpc={address}/RPC0 (libllama)" and placed.what == "layers 0 to 1"
        assert placed.weights > 0 and placed.kv > 0
        deltas: list[OutputDelta] = []
        prompt = [5, 60, 70, 8]
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        engine.add(Request("one", prompt, params), deltas.append)
        while engine.step():
            pass
        answer = [token for delta in deltas for token in delta.token_ids]
        logits = libllama_logits(path, prompt + answer, flash=True)
        assert logits.argmax(axis=1)[len(prompt) - 1 : -1].tolist() == answer and len(answer) == 12
    finally:
        engine.close()
