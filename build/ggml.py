"""Compiles llama-cpp-python for machines other than this one; prints the wheel's path.

An ordinary install compiles ggml for the CPU it runs on. Here its CPU code becomes one loadable library for
each level of x86 (or ARM) CPU, and ggml takes the best that runs. The wheel is kept in the user's cache
folder under a name made of the version, the flags and the compiler.

    python build/ggml.py
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

import platformdirs

FLAGS = (
    "-DLLAVA_BUILD=OFF",  # vision: nothing of ours uses it
    "-DGGML_RPC=ON",
    "-DGGML_NATIVE=OFF",
    "-DGGML_BACKEND_DL=ON",
    "-DGGML_CPU_ALL_VARIANTS=ON",
    # loadable backends go to the first of these, outside of the package by default
    "-DCMAKE_INSTALL_BINDIR=llama_cpp/lib",
    "-DCMAKE_INSTALL_LIBDIR=llama_cpp/lib",
    "-DCMAKE_INSTALL_INCLUDEDIR=llama_cpp/include",
)
# AVX2; AVX2 + VNNI; AVX-512; with VNNI and VBMI; with bfloat16. Not sapphirerapids: its AMX dies with SIGILL
# on some virtual machines that advertise it, and such a CPU runs zen4's. Those below AVX2 are refused at
# start. For those between, ggml takes the next one down; most time is spent in our own kernels anyway.
X86_VARIANTS = ("haswell", "alderlake", "skylakex", "icelake", "zen4")
GGML_CMAKE = Path("vendor/llama.cpp/ggml/src/CMakeLists.txt")
# what llama-server and its tools share: forced on by the package, used by nothing here
COMMON = "set(LLAMA_BUILD_COMMON ON", "set(LLAMA_BUILD_COMMON OFF"


def main() -> None:
    print(wheel())


def flags() -> list[str]:
    """FLAGS, and those of the backends for graphics cards whose compilers are here."""
    found = list(FLAGS)
    if shutil.which("nvcc"):
        found.append("-DGGML_CUDA=ON")
    if shutil.which("glslc"):
        found.append("-DGGML_VULKAN=ON")
    return found


def wheel() -> Path:
    """The wheel of the installed llama-cpp-python's version; compiled on the first call, minutes."""
    version = metadata.version("llama-cpp-python")
    folder = cache_folder() / f"llama-cpp-python-{version}-{_key(version)}"
    done = sorted(folder.glob("*.whl"))
    if done:
        return done[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ggml-", dir=folder) as work:
        source = _source(version, Path(work))
        choose(source, platform.machine())
        built = _compile(source, Path(work))
        shutil.copy(source / "vendor/llama.cpp/LICENSE", folder / "llama.cpp-LICENSE")
        return Path(shutil.move(built, folder / built.name))


def cache_folder() -> Path:
    """Where compiled wheels are kept."""
    return Path(os.environ.get("HETERO_CACHE_DIR") or platformdirs.user_cache_dir("hetero")) / "build"


def _key(version: str) -> str:
    compiler = os.environ.get("CXX", "c++")
    known = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    machine = platform.machine(), sys.platform, platform.libc_ver()
    parts = version, flags(), X86_VARIANTS, COMMON, known, machine
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _source(version: str, folder: Path) -> Path:
    name = f"llama-cpp-python=={version}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=llama-cpp-python"]
    subprocess.run([*pip, "--dest", str(folder), name], check=True)
    archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def choose(source: Path, machine: str) -> None:
    """Leave out of the build, for this kind of machine, what the executable would not hold."""
    top, ggml = source / "CMakeLists.txt", source / GGML_CMAKE
    _replace(top, *COMMON)
    if machine.lower() not in ("x86_64", "amd64"):
        return
    lines = ggml.read_text(encoding="utf-8").splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if "ggml_add_cpu_backend_variant(x64)" in line)
    end = next(i for i in range(start, len(lines)) if '"ARM"' in lines[i])
    found = {}
    for index in range(start, end):
        if "ggml_add_cpu_backend_variant(" in lines[index]:
            name = lines[index].split("(")[1].split()[0].rstrip(")")
            found[name] = index
            if name not in X86_VARIANTS:
                lines[index] = "\n"
    if missing := set(X86_VARIANTS) - set(found):
        sys.exit(f"{ggml.name}: no CPU variants {', '.join(sorted(missing))} in this version of ggml")
    ggml.write_text("".join(lines), encoding="utf-8")


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        sys.exit(f"{path.name}: expected {old!r} once in this version of llama-cpp-python")
    path.write_text(text.replace(old, new), encoding="utf-8")


def _compile(source: Path, folder: Path) -> Path:
    options = flags()
    if os.name != "nt":  # asserts name their source files: without the folder of this machine
        for language in ("C", "CXX"):
            options.append(f"-DCMAKE_{language}_FLAGS=-ffile-prefix-map={source}=.")
    environment = {**os.environ, "CMAKE_ARGS": " ".join(options)}
    environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):
        environment["CMAKE_BUILD_PARALLEL_LEVEL"] = str(len(os.sched_getaffinity(0)))
    out = folder / "wheel"
    # no cache: pip's does not look at the flags
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", str(out)]
    subprocess.run([*pip, "--quiet", str(source)], check=True, env=environment)
    return next(out.glob("*.whl"))


if __name__ == "__main__":
    main()
