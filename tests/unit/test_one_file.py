"""Settings and models inside an executable, and what of its build can be told without building it."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import cli
from backends.ggml import lib
from hetero import inside, models
from hetero.commands import package
from hetero.config import SettingError, load
from hetero.plan import catalogue, checks
from hetero.settings import Settings
from hetero.text.tokenizer import Tokenizer
from quant.gguf import GGUFError, open_gguf
from quant.one_file import ALIGNMENT, Contents, Footer, ModelSpan, contents_of, read_contents
from tests.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = b"\x7fELF" + b"program and application" * 999
KEY = b"0123456789abcdef"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="executables of Linux alone have contents")


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def base(tmp_path) -> Path:
    path = tmp_path / "hetero"
    path.write_bytes(PROGRAM + Footer(4, len(PROGRAM) - 4, 1 << 20, len(PROGRAM), 0, KEY).packed())
    return path


@pytest.fixture
def office(tmp_path, base, gguf_path) -> Path:
    out = tmp_path / "office"
    package.write(base, out, {"port": 9000}, models.resolve(str(gguf_path)))
    return out


def test_a_model_inside_reads_like_its_file(office, gguf_path):
    with open_gguf(office) as packed, open_gguf(gguf_path) as plain:
        assert packed.is_inside and not plain.is_inside
        assert packed.metadata == plain.metadata and packed.tensors == plain.tensors
        for name, info in plain.tensors.items():
            assert np.array_equal(packed.tensor_data(name), plain.tensor_data(name))
            part = np.empty(info.nbytes - 1, np.uint8)
            packed.read_into(name, 1, part)
            assert np.array_equal(part, plain.tensor_data(name)[1:])


def test_a_model_inside_has_its_vocabulary(office, gguf_path):
    packed, plain = Tokenizer(office), Tokenizer(gguf_path)
    assert packed.n_vocab == plain.n_vocab and packed.eog_ids == plain.eog_ids
    text = "some text, ünd\n more"
    assert packed.encode(text, parse_special=True, add_special=True) == plain.encode(
        text, parse_special=True, add_special=True
    )


def test_a_model_inside_is_named_like_its_file(office, base, gguf_path):
    assert models.resolve(str(office)) == models.ResolvedModel(office, gguf_path.stem)
    with pytest.raises(models.ModelError, match="hetero: not a GGUF file"):
        models.resolve(str(base))


def test_the_program_is_kept_and_the_model_can_be_mapped(office, gguf_path):
    contents = contents_of(office)
    assert contents is not None and contents.model is not None
    assert contents.settings == {"port": 9000} and contents.footer.app_key == KEY
    assert contents.model.offset % ALIGNMENT == 0 and contents.model.size == gguf_path.stat().st_size
    assert office.read_bytes()[: len(PROGRAM)] == PROGRAM
    assert os.access(office, os.X_OK)


def test_packing_again_replaces_what_was_inside(tmp_path, office, base, gguf_path):
    again = tmp_path / "again"
    package.write(office, again, {}, None)
    assert again.read_bytes() == base.read_bytes()
    package.write(again, again, {"port": 9000}, models.resolve(str(office)))  # the model of an executable
    assert again.read_bytes() == office.read_bytes()


def test_nothing_is_left_of_a_failure(tmp_path, base, gguf_path, monkeypatch):
    monkeypatch.setattr(package, "PIECE", 1000)

    def break_off(done: float) -> None:
        if done > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        package.write(base, tmp_path / "out", {}, models.resolve(str(gguf_path)), break_off)
    assert [path.name for path in tmp_path.iterdir()] == ["hetero"]


@settings(deadline=None)
@given(st.data())
def test_a_damaged_end_is_no_contents(data):
    model = b"GGUF" * 64
    index = json.dumps({"settings": {}, "model": ModelSpan("m", 64, len(model))._asdict()}).encode()
    whole = bytes(64) + model + index + Footer(0, 64, 99, 64 + len(model), len(index), KEY).packed()
    assert read_contents(io.BytesIO(whole)) is not None
    tail = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(64 + len(model), len(whole) - 1))
        tail[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for damaged in (bytes(tail), whole[:cut], whole[cut:]):
        contents = read_contents(io.BytesIO(damaged))
        if contents is not None and contents.model is not None:
            assert 0 <= contents.model.offset <= contents.model.offset + contents.model.size <= len(damaged)


def test_a_damaged_model_inside_is_one_line(tmp_path, base):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(b"GGUF")
    with pytest.raises(GGUFError, match=r"cut\.gguf"):
        package.write(base, tmp_path / "out", {}, models.resolve(str(cut)))


def test_settings_inside_stand_in_place_of_defaults(tmp_path, base, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contents = Contents(contents_of(base).footer, {"port": 9000, "ctx": 512, "host": "0.0.0.0"})
    monkeypatch.setattr(inside, "contents", lambda: contents)
    (tmp_path / "hetero.toml").write_text("ctx = 1024\n")
    loaded = load({}, {"HETERO_HOST": "::1"})
    got = loaded.settings
    assert (got.port, got.ctx, got.host) == (9000, 1024, "::1")
    assert loaded.sources["port"] == "inside the executable" and loaded.sources["ctx"] == "hetero.toml"


def test_the_model_inside_is_the_default(office, gguf_path, monkeypatch):
    monkeypatch.setattr(inside, "contents", lambda: contents_of(office))
    monkeypatch.setattr(inside, "own_file", lambda: office)
    assert models.resolve(None) == models.ResolvedModel(office, gguf_path.stem)


def test_without_arguments_it_serves_what_is_inside(base, office, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hetero"])
    for contents, wanted in ((None, None), (contents_of(base), None), (contents_of(office), ["serve"])):
        monkeypatch.setattr(inside, "contents", lambda found=contents: found)
        assert cli.default_arguments() == wanted
    monkeypatch.setattr(sys, "argv", ["hetero", "devices"])
    assert cli.default_arguments() is None


def test_doctor_and_the_list_of_models_know_what_is_inside(base, office, gguf_path, monkeypatch, tmp_path):
    monkeypatch.setenv("HETERO_MODELS", str(tmp_path / "none"))
    monkeypatch.setattr(inside, "own_file", lambda: office)
    monkeypatch.setattr(inside, "contents", lambda: contents_of(office))
    assert checks._model() == str(office)
    assert [(e.name, e.path, e.note) for e in catalogue.list_models(Settings())] == [
        (gguf_path.stem, str(office), "")
    ]
    monkeypatch.setattr(inside, "contents", lambda: contents_of(base))
    assert "name one" in checks._model()


def test_an_executable_without_a_model_says_so(monkeypatch):
    monkeypatch.setattr(inside, "is_executable", lambda: True)
    monkeypatch.setattr(inside, "contents", lambda: None)
    monkeypatch.setattr(models, "DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(models.ModelError, match="no model inside"):
        models.resolve(None)


def test_secrets_do_not_go_into_a_file_for_others(tmp_path):
    config = tmp_path / "hetero.toml"
    config.write_text('api_key = ["one"]\n')
    with pytest.raises(SettingError, match=r"api_key in .*HETERO_API_KEY"):
        package.packaged_settings(config, has_model=False)


def test_the_model_inside_goes_before_the_files_setting(tmp_path):
    config = tmp_path / "hetero.toml"
    config.write_text('model = "other.gguf"\nport = 9000\n')
    assert package.packaged_settings(config, has_model=True) == {"port": 9000}
    assert package.packaged_settings(config, has_model=False) == {"model": "other.gguf", "port": 9000}


def test_package_command(tmp_path, base, gguf_path):
    config, out = tmp_path / "hetero.toml", tmp_path / "office"
    config.write_text("port = 9000\n")
    arguments = ["package", "--base", str(base), "--config", str(config), "--model", str(gguf_path)]
    run = CliRunner().invoke(cli.main, [*arguments, "--out", str(out)])
    assert run.exit_code == 0 and "serves its model" in run.output
    assert contents_of(out).model.name == gguf_path.stem
    again = CliRunner().invoke(cli.main, [*arguments, "--out", str(out)])
    assert again.exit_code == 1 and "--force" in again.output
    config.write_text("port = 0\n")
    for bad in (["--force", "--out", str(out)], ["--base", str(gguf_path), "--out", str(tmp_path / "x")]):
        run = CliRunner().invoke(cli.main, [*arguments, *bad])
        assert run.exit_code == 1 and len(run.output.strip().splitlines()) == 1


def test_cpu_code_for_a_lower_level(tmp_path, monkeypatch):
    for name in ("ggml-base", "ggml", "ggml-rpc", "ggml-cuda", "ggml-cpu-zen4", "ggml-cpu-haswell"):
        (tmp_path / f"lib{name}.so").touch()
    assert lib.cpu_variants(tmp_path) == ["haswell", "zen4"]
    assert [p.name for p in lib._backends(tmp_path)] == ["libggml-cuda.so", "libggml-rpc.so"]
    found = {}
    for level in ("", "avx512_vnni", "avx_vnni", "avx2"):
        monkeypatch.setenv("HETERO_CPU_LEVEL", level)
        found[level] = [path.name for path in lib._variants_of_level(tmp_path)]
    older = ["libggml-cpu-haswell.so"]
    assert found == {"": [], "avx512_vnni": [], "avx_vnni": older, "avx2": older}


def test_backends_beside_the_executable_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_EXECUTABLE", str(tmp_path / "hetero"))
    assert lib.beside_executable() is None
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert lib.beside_executable() == tmp_path / "hetero-backends"
    assert lib._backends(lib.beside_executable()) == []
    (tmp_path / "hetero-backends").mkdir()
    for name in ("ggml-vulkan", "ggml-cpu-zen4", "ggml-base"):
        (tmp_path / "hetero-backends" / f"lib{name}.so").touch()
    assert [path.name for path in lib._backends(lib.beside_executable())] == ["libggml-vulkan.so"]


# A module that numba compiles, in a program that says it is frozen, wherever it lies.
MODULE = """
from numba import njit
@njit("int64(int64)", cache=True)
def double(x):
    return 2 * x
"""
FROZEN = """
import sys
sys.frozen = True
sys.path.insert(0, sys.argv[1])
import backends.cpu.jit as jit
import sample
assert sample.double(4) == 8
print(jit.CACHE_FOLDER, sum(sample.double.stats.cache_hits.values()))
"""


def test_kernels_compiled_while_building_serve_elsewhere(tmp_path):
    def run(place: Path) -> tuple[Path, int]:
        environment = {**os.environ, "HETERO_CACHE_DIR": str(place / "cache"), "PYTHONPATH": ""}
        code = [sys.executable, "-c", FROZEN, str(place)]
        answer = subprocess.run(code, env=environment, capture_output=True, text=True, check=True, cwd=place)
        folder, hits = answer.stdout.rsplit(maxsplit=1)
        return Path(folder), int(hits)

    first, second = tmp_path / "first", tmp_path / "second"
    for name in ("jit.py", "features.py", "__init__.py"):
        (first / "backends" / "cpu").mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "backends" / "cpu" / name, first / "backends" / "cpu")
    (first / "backends" / "__init__.py").touch()
    (first / "backends" / "cpu" / "sources.sha256").write_text("0" * 64)
    (first / "sample.py").write_text(MODULE)
    shutil.copytree(first, second)
    folder, hits = run(first)
    assert hits == 0
    shutil.copytree(folder.parent, second / "jit")
    again, hits = run(second)
    assert hits == 1 and again.name == folder.name and again.is_relative_to(second / "cache")


@pytest.fixture
def build_scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "build"))
    import ggml
    import one_file
    import pyinstaller

    return ggml, one_file, pyinstaller


def test_variants_of_the_cpu_code_are_chosen(tmp_path, build_scripts):
    ggml, _, _ = build_scripts
    (tmp_path / ggml.GGML_CMAKE).parent.mkdir(parents=True)
    known = ["x64", "sse42", *ggml.X86_VARIANTS, "sapphirerapids"]
    lines = [f"        ggml_add_cpu_backend_variant({name} SOME FLAGS)" for name in known]
    lines[0] = "        ggml_add_cpu_backend_variant(x64)"
    text = "\n".join([*lines, '    elseif (ARCH STREQUAL "ARM")', "ggml_add_cpu_backend_variant(armv8)"])
    (tmp_path / ggml.GGML_CMAKE).write_text(text)
    (tmp_path / "CMakeLists.txt").write_text(f'{ggml.COMMON[0]} CACHE BOOL "" FORCE)\n')
    ggml.choose(tmp_path, machine="x86_64")
    left = (tmp_path / ggml.GGML_CMAKE).read_text()
    assert [name for name in known if f"({name} " in left] == list(ggml.X86_VARIANTS)
    assert "x64" not in left and "armv8" in left
    (tmp_path / ggml.GGML_CMAKE).write_text(text.replace("zen4", "zen5"))
    (tmp_path / "CMakeLists.txt").write_text(f'{ggml.COMMON[0]} CACHE BOOL "" FORCE)\n')
    with pytest.raises(SystemExit, match="zen4"):
        ggml.choose(tmp_path, machine="x86_64")


def test_paths_of_the_builder_are_overwritten(tmp_path, build_scripts):
    _, one_file, _ = build_scripts
    private = "/home/somebody/.pyenv/versions/3.11.7"
    (tmp_path / "lib.so").write_bytes(b"\0" + private.encode() + b"/lib\0")
    (tmp_path / "link").symlink_to("lib.so")
    stream = b"".join(one_file.entries(tmp_path, [private]))
    header, _, rest = stream.partition(b"\n")
    assert header == f"F {len(private) + 6} lib.so".encode()
    assert b"somebody" not in rest and b"/3.11.7/lib\0" in rest  # a version that is the end of the path stays
    assert rest[len(private) + 6 :] == b"L 6 link\nlib.soEND\n"


def test_every_package_inside_is_known_with_its_licence(tmp_path, build_scripts):
    _, _, pyinstaller = build_scripts
    names = pyinstaller.required_packages()
    assert {"numpy", "numba", "llvmlite", "llama-cpp-python", "aiohttp", "multidict"} <= names
    assert not {"pytest", "hypothesis", "mypy"} & names
    for name in names:
        assert pyinstaller.license_of(name).strip(), name
