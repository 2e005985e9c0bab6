"""An engine over stages in child processes that go away while requests run.

HETERO_TEST_SCALE=full kills and stops children 50 times instead of 3.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest
from isolated_tools import posix, segments, until
from scale import scaled
from served import PROMPTS, Served
from tiny_models import tiny_model

from hetero.pipeline import channel_stage, supervise
from hetero.request import FinishReason

ACCIDENTS = scaled(3, 50)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("isolated") / "tiny.gguf", n_layers=4)


@posix
@pytest.mark.parametrize("cuts", [[(0, 4)], [(0, 2), (2, 4)]], ids=["one", "two"])
def test_children_killed_and_stopped_at_random_moments(
    model: Path, cuts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_stage, "PING_SECONDS", 0.3)
    monkeypatch.setattr(supervise, "CHECK_SECONDS", 0.3)
    monkeypatch.setattr(supervise, "BACKOFF", (0.05,))
    served, rng = Served(model, cuts), random.Random(1)
    alone, lost = served.answers_alone(), 0
    for accident in range(ACCIDENTS):
        victim = rng.choice(served.alive())
        number = signal.SIGSTOP if accident % 3 == 2 else signal.SIGKILL
        timer = threading.Timer(rng.uniform(0.0, 0.3), os.kill, (victim.pid, number))
        timer.start()
        lost += served.work_until_lost(rng, alone)
        timer.join()
        served.work_again(alone)
    assert lost >= ACCIDENTS and sum(served.runner.restarts) >= ACCIDENTS
    served.runner.close()
    assert not [c for c in served.children if psutil.pid_exists(c.pid or 0)]
    assert not segments()


def test_a_child_lost_while_nothing_runs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "BACKOFF", (0.05,))
    served = Served(model, [(0, 4)])
    request_id = served.add(PROMPTS[1])
    served.finish()
    changed = threading.Event()
    served.runner.watch(changed.set)
    os.kill(served.children[0].pid or 0, signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
    assert changed.wait(30) and "its process ended" in (served.runner.unavailable or "")
    served.finish()  # lets go of the cache
    until(lambda: served.runner.unavailable is None)
    again = served.add(PROMPTS[1])
    served.finish()
    assert served.tokens[again] == served.tokens[request_id]
    assert served.ends[again].num_cached_tokens == 0
    served.runner.close()


def test_a_stage_that_cannot_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model is gone: the reason is shown for as long as that lasts."""
    monkeypatch.setattr(supervise, "BACKOFF", (0.05,))
    path = tiny_model(tmp_path / "there.gguf", n_layers=4)
    served = Served(path, [(0, 4)])
    path.rename(tmp_path / "away.gguf")
    served.children[0].channel.abort()
    until(lambda: "cannot be opened" in (served.runner.unavailable or ""))
    assert "there.gguf" in (served.runner.unavailable or "")
    served.finish()
    (tmp_path / "away.gguf").rename(path)
    until(lambda: served.runner.unavailable is None)
    request_id = served.add(PROMPTS[0])
    served.finish()
    assert served.ends[request_id].finish_reason is FinishReason.LENGTH
    served.runner.close()


def test_no_child_is_left() -> None:
    assert not [p for p in multiprocessing.active_children() if p.is_alive()]
