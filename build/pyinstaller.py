"""Builds the executable: `make binary`, or

    python build/pyinstaller.py [--out dist/hetero]

On Linux PyInstaller makes a folder, and build/launcher.c a file of it that unpacks itself once, into the
user's cache: PyInstaller's own one-file program would unpack 300 MB at every start, and leave them there when
it is killed. Elsewhere it is PyInstaller's own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import ggml
import one_file
import warm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# all that compiled kernels depend on: where none of it changed, another build takes them as they are
KERNELS = ("backends", "quant", "spec", "hetero/sampling")
# inside without being required: the interpreter's loader
TOOLS = ("pyinstaller",)
# inside, since nothing can be installed into an executable; matplotlib would make it a third larger
EXTRAS = ("otlp",)
LICENSE_NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "AUTHORS")
COMPILER_LIBRARIES = ("libgcc-s1", "libgomp1", "libstdc++6")  # Debian's names of what ggml links to


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "hetero")
    out = parser.parse_args().out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hetero-build-") as folder:
        work = Path(folder)
        built = build(work)
        if built.is_dir():
            strip(built)
            warm.fill(built, work / "warm", KERNELS)
            one_file.write(built, out, private_paths(work))
        else:
            shutil.move(built, out)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def build(work: Path) -> Path:
    """PyInstaller's result: a folder on Linux, else a file."""
    wheel = ggml.wheel()
    site = work / "site"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    write_facts(work)
    collect_licenses(work / "licenses", wheel.parent)
    search = os.pathsep.join([str(site), str(ROOT)])
    environment = {**os.environ, "HETERO_BUILD_WORK": str(work), "PYTHONPATH": search, "PYTHONHASHSEED": "0"}
    environment["PYINSTALLER_ZLIB_COMPRESSION_LEVEL"] = "0"  # one_file.py packs everything, and better
    environment.setdefault("SOURCE_DATE_EPOCH", commit_time())
    command = [sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level=WARN"]
    command += [
        f"--distpath={work / 'dist'}",
        f"--workpath={work / 'work'}",
        str(ROOT / "build" / "hetero.spec"),
    ]
    subprocess.run(command, check=True, env=environment)
    return next((work / "dist").iterdir())


def strip(folder: Path) -> None:
    """Without what debuggers want in extension modules, a third of some. Not in libraries whose layout the
    makers of wheels have changed: strip breaks those."""
    if shutil.which("strip"):
        modules = [str(path) for name in ("*.cpython-*.so", "*.abi3.so") for path in folder.rglob(name)]
        subprocess.run(["strip", "--strip-debug", *modules], check=True)


def write_facts(work: Path) -> None:
    """What the program cannot find out by itself when it has neither sources nor a repository."""
    from backends.cpu.jit import sources_digest

    (work / "build.json").write_text(json.dumps({"commit": commit()}), encoding="utf-8")
    digest = sources_digest(*(ROOT / name for name in KERNELS))
    (work / "sources.sha256").write_text(digest, encoding="utf-8")


def commit() -> str:
    """The commit that is built, with a + when files differ from it."""
    name = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return (name + "+" if changed else name) or "unknown"


def commit_time() -> str:
    """Seconds, for the dates inside: the same for two builds of a commit."""
    return _git("log", "-1", "--format=%ct") or "0"


def _git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    answer = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def collect_licenses(target: Path, ggml_folder: Path) -> None:
    """The licence texts of everything inside, a file for each."""
    target.mkdir()
    shutil.copy(ROOT / "LICENSE", target / "hetero")
    shutil.copy(ggml_folder / "llama.cpp-LICENSE", target / "llama.cpp, ggml")
    shutil.copy(one_file.zstd_sources() / "LICENSE", target / "zstd")
    for name in sorted(required_packages() | set(TOOLS)):
        (target / name).write_text(license_of(name), encoding="utf-8")
    python = Path(os.__file__).with_name("LICENSE.txt")
    (target / "Python").write_text(python.read_text() if python.exists() else sys.copyright + "\nPSF-2.0\n")
    for name in COMPILER_LIBRARIES:
        text = Path("/usr/share/doc", name, "copyright")
        if text.exists():
            shutil.copy(text, target / name)


def license_of(name: str) -> str:
    """The licence texts in an installed package, or what its metadata says of its licence."""
    distribution = metadata.distribution(name)
    files = [path for path in distribution.files or () if path.name.upper().startswith(LICENSE_NAMES)]
    paths = [path for path in (Path(str(distribution.locate_file(file))) for file in files) if path.is_file()]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    if texts:
        return "\n\n".join(texts)
    about = distribution.metadata
    said = about.get("License-Expression") or about.get("License")
    kinds = [kind for kind in about.get_all("Classifier") or () if kind.startswith("License ::")]
    return f"{said or ', '.join(kinds)}\n"


def required_packages() -> set[str]:
    """Names of the installed packages that hetero and its EXTRAS require, with all that those require."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    todo = [*project["dependencies"]]
    for extra in EXTRAS:
        todo += project["optional-dependencies"][extra]
    while todo:
        requirement = Requirement(todo.pop())
        name = requirement.name.lower().replace("_", "-")
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        todo += metadata.requires(name) or ()
    return found


def private_paths(work: Path) -> list[str]:
    """Folders of this machine whose names libraries may hold, and the result must not."""
    own = {str(ROOT), str(work), sys.prefix, sys.base_prefix, str(ggml.cache_folder())}
    return sorted((path for path in own if not path.startswith(("/usr", "/opt"))), key=len, reverse=True)


if __name__ == "__main__":
    main()
