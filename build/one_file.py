"""Makes one file of a folder: the launcher, the packed folder, and the footer that the launcher reads."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import ggml

from quant.one_file import Footer

HERE = Path(__file__).parent
LEVEL = 19  # a tenth smaller than 6, and as fast to unpack
PIECE = 1 << 20


def write(folder: Path, out: Path, private_paths: Sequence[str]) -> None:
    """`folder` as one program. In its files the `private_paths` are overwritten."""
    import zstandard

    program = launcher().read_bytes()
    beside = out.with_name(f"{out.name}.part")
    digest, unpacked = hashlib.sha256(), 0
    with beside.open("wb") as file:
        file.write(program)
        compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, threads=-1)
        with compressor.stream_writer(file, closefd=False) as stream:
            for piece in entries(folder, private_paths):
                digest.update(piece)
                unpacked += len(piece)
                stream.write(piece)
        end = file.tell()
        key = digest.hexdigest()[:16].encode()
        file.write(Footer(len(program), end - len(program), unpacked, end, 0, key).packed())
    beside.chmod(0o755)
    beside.replace(out)


def entries(folder: Path, private_paths: Sequence[str]) -> Iterator[bytes]:
    """The stream that build/launcher.c describes."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            target = str(path.readlink()).encode()
            yield f"L {len(target)} {name}\n".encode() + target
        elif path.is_file():
            data = path.read_bytes()
            for private in private_paths:
                data = data.replace(private.encode(), _stranger(private).encode())
            yield f"{'X' if os.access(path, os.X_OK) else 'F'} {len(data)} {name}\n".encode()
            yield data
    yield b"END\n"


def _stranger(path: str) -> str:
    """A path of that length that exists nowhere. It ends alike: a linker lets strings share their ends."""
    folder, name = path.rsplit("/", 1)
    return f"{'/hetero/'.ljust(len(folder), '-')[: len(folder)]}/{name}"


def launcher() -> Path:
    """build/launcher.c, compiled without any library that another system might lack."""
    source, zstd = HERE / "launcher.c", zstd_sources()
    key = hashlib.sha256(source.read_bytes() + str(zstd).encode()).hexdigest()[:12]
    out = ggml.cache_folder() / f"launcher-{key}"
    if not out.exists():
        compiler = os.environ.get("CC", "cc")
        options = ["-O2", "-static", "-s", "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections"]
        sources = ["-DZSTD_DISABLE_ASM", f"-I{zstd}", str(source), str(zstd / "zstd.c")]
        beside = out.with_name(f"{out.name}.{os.getpid()}")
        subprocess.run([compiler, *options, *sources, "-o", str(beside)], check=True)
        beside.replace(out)
    return out


def zstd_sources() -> Path:
    """The folder with zstd.c, zstd.h and LICENSE: those that the installed `zstandard` was made of."""
    version = metadata.version("zstandard")
    target = ggml.cache_folder() / f"zstd-{version}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=zstandard"]
        subprocess.run([*pip, "--dest", work, f"zstandard=={version}"], check=True)
        archive = next(Path(work).glob("zstandard-*.tar.gz"))
        with tarfile.open(archive) as packed:
            packed.extractall(work, filter="data")
        shutil.move(Path(work, archive.name.removesuffix(".tar.gz"), "zstd"), target)
    return target
