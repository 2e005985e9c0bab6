"""The command line as a user meets it: help, exit codes, one clear line for what goes wrong."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from ports import free_port

import cli
from hetero import screen
from hetero.commands import serve
from hetero.plan import make
from hetero.plan.devices import usable_cores
from hetero.prepare import prepare
from hetero.settings import SPECS, Settings, flag_name

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(cli.main.commands)


def hetero(*arguments: str) -> tuple[int, str, str, float]:
    """(exit code, stdout, stderr, CPU seconds) of the command as a process.

    CPU time, since the machine may be busy; it is 0 on Windows.
    """
    before = os.times()
    command = [sys.executable, "-m", "cli", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return done.returncode, done.stdout, done.stderr, used


def assert_one_line(result: tuple[int, str, str, float], *words: str) -> None:
    code, out, err, seconds = result
    assert code == 1
    assert out == ""
    assert err.startswith("hetero: ") and err.count("\n") == 1, err
    assert [w for w in words if w not in err] == []
    assert seconds < 1.0


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_of_family(path: Path, family: str) -> Path:
    """A file with one metadata pair and one f32 tensor of 32 values."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    head += string("general.architecture") + struct.pack("<I", 8) + string(family)
    head += string("token_embd.weight") + struct.pack("<IQIQ", 1, 32, 0, 0)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(128))
    return path


def test_help_is_quick():
    code, out, _, first = hetero("--help")
    assert code == 0 and "serve" in out
    assert min(first, hetero("--help")[3]) < 0.3


def test_version():
    code, out, _, _ = hetero("--version")
    assert code == 0 and len(out.splitlines()) == 2
    assert re.match(r"hetero \d+\.\d+\.\d+\S* \(commit ([0-9a-f]{12}|unknown)\)\nggml 0\.25\.\d+ \(", out)
    assert "backends CPU" in out and "CPU code for" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str):
    result = CliRunner().invoke(cli.main, [name, "--help"])
    assert result.exit_code == 0
    assert f"hetero {name}" in result.output.split("Example:")[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str):
    command = cli.main.commands[name]
    assert [o.name for o in command.params if isinstance(o, click.Option) and not o.help] == []


def test_serve_takes_every_setting():
    names = {flag for option in cli.main.commands["serve"].params for flag in option.opts}
    assert {flag_name(name) for name in SPECS if name != "model"} <= names


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--port", "x"),
        ("serve", "--nothing"),
        ("run",),
        ("nothing",),
        ("plan", "--kv-memory", "much"),
    ],
)
def test_bad_usage_is_exit_code_2(arguments: tuple[str, ...]):
    code, out, err, _ = hetero(*arguments)
    assert (code, out) == (2, "") and err


def test_print_config_names_sources_and_hides_secrets():
    code, out, _, _ = hetero("serve", "--print-config", "--port", "1234", "--api-key", "hush")
    assert code == 0 and "hush" not in out
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert lines["port"].split()[1:] == ["1234", "command", "line"]
    assert lines["host"].split()[1:] == ["127.0.0.1", "default"]
    assert set(SPECS) <= set(lines)


def test_a_wrong_model_path():
    assert_one_line(hetero("serve", "no/such/model.gguf", "--port", str(free_port())), "no/such/model.gguf")


def test_a_file_that_is_no_gguf(tmp_path: Path):
    (tmp_path / "notes.gguf").write_text("hello")
    result = hetero("serve", str(tmp_path / "notes.gguf"), "--port", str(free_port()))
    assert_one_line(result, "notes.gguf", "not a GGUF file")


def test_a_damaged_gguf(tmp_path: Path, smollm2_path: Path):
    (tmp_path / "cut.gguf").write_bytes(smollm2_path.read_bytes()[:100_000])
    assert_one_line(hetero("serve", str(tmp_path / "cut.gguf"), "--port", str(free_port())), "cut.gguf")


def test_an_unsupported_family(tmp_path: Path):
    model = gguf_of_family(tmp_path / "m.gguf", "bert")
    result = hetero("serve", str(model), "--port", str(free_port()))
    assert_one_line(result, "'bert'", "generates no text", "take a model that does")


def test_a_taken_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_one_line(hetero("serve", "--port", port), f"port {port}", "taken", "--port")


def test_a_trace_that_cannot_be_written(tmp_path: Path):
    result = hetero("serve", "--trace", str(tmp_path), "--port", str(free_port()))
    assert_one_line(result, "--trace", str(tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_output_that_cannot_be_written(tmp_path: Path):
    command = [sys.executable, "-m", "cli", "serve", "--print-config"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("hetero: the output cannot be written: ") and done.stderr.count("\n") == 1


def test_an_output_that_lacks_a_letter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As files and pipes have it on Windows."""
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    monkeypatch.setenv("HETERO_MODEL_NAME", "模型")
    code, out, err, _ = hetero("serve", "--print-config")
    assert (code, err) == (0, "") and "?? " in out


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_an_output_that_was_closed():
    command = ["sh", "-c", f"exec {sys.executable} -m cli plan >&-"]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_an_unknown_host():
    assert_one_line(hetero("serve", "--host", "no.such.host.invalid", "--port", str(free_port())), "--host")


def test_not_enough_memory():
    result = hetero("serve", "--kv-tokens", "1000000000", "--port", str(free_port()))
    assert_one_line(result, "not enough memory", "bytes more", "--kv-tokens")


def test_an_unknown_device():
    assert_one_line(hetero("serve", "--device", "CUDA9", "--port", str(free_port())), "CUDA9", "CPU")


def test_an_empty_key_file_does_not_open_the_server(tmp_path: Path):
    (tmp_path / "keys").write_text("\n \n")
    result = hetero("serve", "--api-key-file", str(tmp_path / "keys"), "--port", str(free_port()))
    assert_one_line(result, "--api-key-file", "no key")


def test_keys_come_from_both_places(tmp_path: Path):
    (tmp_path / "keys").write_text("two\n\n three \n")
    settings = Settings(api_key=("one",), api_key_file=str(tmp_path / "keys"))
    assert serve.api_keys(settings) == ("one", "two", "three")


def test_the_port_is_held_from_before_loading():
    port = int(str(free_port()))
    held = serve.bind("127.0.0.1", port)
    try:
        assert [s.getsockname() for s in held] == [("127.0.0.1", port)]
    finally:
        for sock in held:
            sock.close()


def test_devices_as_json():
    code, out, _, _ = hetero("devices", "--json")
    names = {d["name"]: d for d in json.loads(out)}
    assert code == 0
    assert names["CPU"]["kind"] == "cpu"
    assert 0 < names["CPU"]["free_bytes"] <= names["CPU"]["total_bytes"]


def test_plan_as_json_adds_up(smollm2_path: Path):
    code, out, _, _ = hetero("plan", str(smollm2_path), "--json", "--kv-tokens", "4096")
    plan = json.loads(out)
    assert code == 0 and plan["fits"]
    (stage,) = plan["stages"]
    assert stage["kv_bytes"] == (4096 + 16) * 30 * 3 * (64 + 64) * 2  # layers, KV heads, K and V, f16
    assert plan["total_bytes"] == stage["weight_bytes"] + stage["kv_bytes"] + stage["compute_bytes"]
    assert plan["kv_tokens"] == plan["max_model_len"] == 4096


def test_plan_knows_sliding_windows(gemma3_path: Path):
    code, out, _, _ = hetero(
        "plan", str(gemma3_path), "--json", "--kv-tokens", "100000", "--max-num-seqs", "4"
    )
    full, windowed = json.loads(out)["groups"]
    assert code == 0
    assert (full["window"], windowed["window"]) == (None, 512)
    assert full["num_blocks"] == 6251
    assert windowed["num_blocks"] < full["num_blocks"] // 5


def test_a_plan_that_does_not_fit_is_exit_code_1():
    code, out, err, _ = hetero("plan", "--kv-tokens", "1000000000")
    assert code == 1 and "KV tokens  1,000,000,000\n" in out and "not enough memory" in err


TWO = ("--device", "CPU:threads=1", "--device", "CPU:threads=1", "--no-calibrate")


@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_plan_of_several_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HETERO_CACHE_DIR", str(tmp_path))  # where nothing was measured yet
    code, out, _, _ = hetero("plan", *TWO, "--json", "--kv-tokens", "4096", "--split", "20,10")
    plan = json.loads(out)
    assert code == 0
    assert [stage["layers"] for stage in plan["stages"]] == [[0, 20], [20, 30]]
    assert plan["forecast"]["measured"] is False and plan["forecast"]["tokens_per_second"] > 0
    assert {other["name"].split(",")[0] for other in plan["forecast"]["alternatives"]} == {"even"}


@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_nothing_is_measured_for_a_split_that_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HETERO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(make, "measured_times", lambda *args, **named: pytest.fail("measured"))
    plan = prepare(Settings(device=("CPU:threads=1", "CPU:threads=1"), split=(20, 10))).plan
    assert [stage.layers for stage in plan.stages] == [(0, 20), (20, 30)]
    assert [note for note in plan.notes if "guessed" in note] == [], "it decided nothing"


def test_a_worker_that_could_keep_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "secret").write_text("0123456789abcdef")
    (tmp_path / "secret").chmod(0o600)
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        arguments = ("--cache-dir", str(folder), "--secret-file", str(tmp_path / "secret"))
        result = hetero("worker", "--listen", f"127.0.0.1:{free_port()}", *arguments)
        assert_one_line(result, f"--cache-dir {folder}: ")


@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_a_split_of_the_wrong_size():
    assert_one_line(hetero("plan", *TWO, "--split", "20,11"), "--split 20,11", "31 layers", "30")


@pytest.mark.parametrize("arguments", [("some.gguf",), ("--threads", "2")])
def test_what_is_for_calibration_needs_calibrate(arguments: tuple[str, ...]):
    code, out, err, _ = hetero("devices", *arguments)
    assert (code, out) == (2, "") and "--calibrate" in err


def test_doctor():
    code, out, _, _ = hetero("doctor", "--json")
    checks = {c["name"]: c for c in json.loads(out)}
    assert code == 0
    assert {"python", "ggml", "devices", "cpu", "kernels", "matmul", "default model"} <= set(checks)
    assert checks["matmul"]["facts"]["Q2_K"] == "ggml"
    assert "SmolLM2" in checks["default model"]["detail"]


def test_doctor_where_compiled_kernels_cannot_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETERO_CACHE_DIR", str(tmp_path / "file"))
    code, out, _, _ = hetero("doctor")
    assert code == 0 and "kernels        compiled at every start" in out


START = screen.StartScreen(
    model="tiny",
    family="llama",
    n_params=134_515_008,
    size_bytes=92 << 20,
    quantization="Q4_1",
    max_model_len=8192,
    kv_tokens=65536,
    ram_tokens=131072,
    max_num_seqs=32,
    placements=(
        screen.Placement("CUDA0", "layers 0 to 28", 92 << 20, 3 << 30, 30 << 20),
        screen.Placement("CPU", "layer 29", 92 << 20, 3 << 30, 30 << 20, threads=2),
    ),
    url="http://127.0.0.1:8080",
    start_seconds=1.5,
    needs_key=False,
    open_to_network=True,
    url_elsewhere="http://office:8080",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["plain", "terminal"])
def test_start_screen_says_all(stream: io.StringIO, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    screen.show_start(START, stream)
    text = stream.getvalue()
    wanted = [
        "tiny",
        "llama",
        "135M",
        "Q4_1",
        "92.0 MiB",
        "3.0 GiB",
        "65,536 tokens",
        "131,072 in the RAM cache",
        "8 full-length",
        "8,192",
    ]
    wanted += [
        "CPU (2 threads)",
        "http://127.0.0.1:8080/v1",
        "http://office:8080/v1",
        "curl http://127.0.0.1:8080/v1/chat",
        "--api-key",
    ]
    assert [w for w in wanted if w not in text] == []
    assert "CUDA0 (" not in text, "a card has no threads"
    assert ("\x1b" in text) == stream.isatty()


def test_progress_without_a_terminal_is_a_line_for_each_phase():
    stream = io.StringIO()
    with screen.loading(stream) as progress:
        for done in range(10):
            progress("loading weights", done / 10)
        progress("compiling", 1.0)
    assert [line.split("] ")[1] for line in stream.getvalue().splitlines()] == [
        "loading weights",
        "compiling",
    ]
