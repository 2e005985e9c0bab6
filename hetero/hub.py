"""Models from a Hugging Face hub: `hf:owner/repo[:which]` means a GGUF file, or a split model's files.

They lie in the model folder, in a folder of their own for each repository:

    MODELS/owner--repo/NAME.gguf                  whole, and as its SHA-256 says
    MODELS/owner--repo/.NAME.gguf.1f2e3d.part     begun; a download goes on where it stopped

`huggingface_hub` speaks to the hub (address, token and offline mode as for its other users: HF_ENDPOINT,
HF_TOKEN, HF_HUB_OFFLINE). Its own downloads begin anew when the process has ended, and trust the network:
so files are written here.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hetero.hub_names import HubName, choose
from hetero.model_folder import ModelError, is_safe_name
from hetero.sizes import format_size
from quant.split import parse_part_name

ProgressCallback = Callable[[str, float], None]

_CHUNK = 1 << 20
_NOT_MODELS = re.compile(r"(?:^|[-_.])(?:mmproj|imatrix)(?:[-_.]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository: its path there, its name here, bytes, and SHA-256 as hexadecimal digits."""

    path: str
    name: str
    nbytes: int
    sha256: str


def download(name: HubName, folder: Path, progress: ProgressCallback) -> Path:
    """Fetch what is missing of `name`, check all of it, and return its (first) file. Raises ModelError."""
    with _explained(name):
        files = _wanted(name, _list_files(name))
        target = folder / name.folder
        target.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():
            raise ModelError(f"{name}: {target} is a link, and nothing is written through one; remove it")
        total, before = sum(file.nbytes for file in files), 0
        for file in files:
            what = f"{file.name} ({format_size(file.nbytes)})"

            def show(verb: str, nbytes: int, what: str = what, before: int = before) -> None:
                progress(f"{verb} {what}", (before + nbytes) / max(1, total))

            _fetch(name, file, target, show)
            before += file.nbytes
    return target / files[0].name


def _list_files(name: HubName) -> list[HubFile]:
    """The GGUF models of a repository."""
    from huggingface_hub.hf_api import HfApi

    info = HfApi(endpoint=_endpoint()).model_info(name.repo_id, files_metadata=True)
    paths = [s for s in info.siblings or () if s.rfilename.lower().endswith(".gguf")]
    bases = [s.rfilename.rpartition("/")[2] for s in paths]
    files = []
    for sibling, base in zip(paths, bases, strict=True):
        if _NOT_MODELS.search(base):
            continue
        local = base if bases.count(base) == 1 else sibling.rfilename.replace("/", "--")
        if not is_safe_name(local):
            raise ModelError(f"{name}: the repository has a file with the unusable name {local[:80]!r}")
        if sibling.size is None or sibling.lfs is None:
            continue  # too small to be one
        files.append(HubFile(sibling.rfilename, local, sibling.size, sibling.lfs.sha256.lower()))
    return sorted(files, key=lambda file: file.name)


def _wanted(name: HubName, files: Sequence[HubFile]) -> list[HubFile]:
    """The files of the one model that is meant."""
    models: dict[str, list[HubFile]] = {}
    for file in files:
        part = parse_part_name(file.name)
        models.setdefault(part.name if part else file.name[: -len(".gguf")], []).append(file)
    if not models:
        raise ModelError(f"{name}: the repository holds no GGUF model")
    chosen = choose(name.which, list(models))
    if len(chosen) != 1:
        sizes = {model: format_size(sum(f.nbytes for f in models[model])) for model in chosen or models}
        listed = ", ".join(f"{model} ({size})" for model, size in sizes.items())
        what = "several models" if chosen else f"no model {name.which}"
        raise ModelError(f"{name}: {what}; name one after a colon: {listed}")
    return models[chosen[0]]


def _endpoint() -> str | None:
    """The hub's address as it is now: the library reads the variable only once."""
    return os.environ.get("HF_ENDPOINT") or None


def _fetch(name: HubName, file: HubFile, folder: Path, show: Callable[[str, int], None]) -> None:
    """Make `folder` hold the file, downloading what it lacks."""
    from filelock import FileLock, Timeout

    target = folder / file.name
    part = folder / f".{file.name}.{file.sha256[:12]}.part"
    try:
        with FileLock(folder / f".{file.name}.lock", timeout=0):
            if _is_same(target, file, show):
                return
            for old in folder.glob(f".{glob.escape(file.name)}.*.part"):
                if old != part or old.is_symlink():  # of a file that the repository has replaced
                    old.unlink(missing_ok=True)
            cached = _in_cache(name, file, show)
            if cached is None:
                _download_part(name, file, part, show)
            else:
                part.unlink(missing_ok=True)
                _link_or_copy(cached, part)
            part.replace(target)
    except Timeout:
        raise ModelError(f"{name}: another process is downloading {file.name}; wait for it") from None


def _is_same(path: Path, file: HubFile, show: Callable[[str, int], None]) -> bool:
    """Whether a file is there already, to the last byte."""
    if not path.is_file() or path.stat().st_size != file.nbytes:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as source:
        for done in _hash(source, digest):
            show("checking", done)
    return digest.hexdigest() == file.sha256


def _in_cache(name: HubName, file: HubFile, show: Callable[[str, int], None]) -> Path | None:
    """The file in the hub's own cache, where other programs may have put it."""
    from huggingface_hub.file_download import try_to_load_from_cache

    found = try_to_load_from_cache(name.repo_id, file.path)
    path = Path(found).resolve() if isinstance(found, str) else None
    return path if path is not None and _is_same(path, file, show) else None


def _link_or_copy(source: Path, target: Path) -> None:
    """The same bytes under a second name, in the same place on the disk if it can be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _download_part(name: HubName, file: HubFile, part: Path, show: Callable[[str, int], None]) -> None:
    from huggingface_hub import constants
    from huggingface_hub.file_download import hf_hub_url, http_get
    from huggingface_hub.utils import build_hf_headers

    if file.nbytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise ModelError(
            f"{name}: {file.name} has {format_size(file.nbytes)}, more than the hub sends this way; get it "
            f"with 'hf download {name.repo_id} {file.path}', where it is found, or take a split one"
        )
    with part.open("a+b") as opened:
        growing = _Growing(opened, file.nbytes, show)
        free = shutil.disk_usage(part.parent).free
        if free < file.nbytes - growing.size:
            missing = format_size(file.nbytes - growing.size)
            raise ModelError(
                f"{name}: {missing} are still to come, {format_size(free)} are free in {part.parent}"
            )
        http_get(
            hf_hub_url(name.repo_id, file.path, endpoint=_endpoint()),
            growing,  # type: ignore[arg-type]
            resume_size=growing.size,
            headers={**build_hf_headers(), "Accept-Encoding": "identity"},
            expected_size=file.nbytes,
            tqdm_class=_NoBar,  # type: ignore[arg-type]
        )
    if growing.digest.hexdigest() != file.sha256:
        part.unlink()
        raise ModelError(f"{name}: {file.name} arrived damaged (its SHA-256 is another); try again")


class _Growing:
    """A partial file that is hashed as it grows. What it holds at first counts; what is too much goes."""

    def __init__(self, file, nbytes: int, show: Callable[[str, int], None]):
        self._file, self._show = file, show
        self.digest, self.size = hashlib.sha256(), 0
        if file.seek(0, os.SEEK_END) > nbytes:
            file.truncate(0)
        file.seek(0)
        for done in _hash(file, self.digest):
            self.size = done
            show("checking", done)

    def write(self, data: bytes) -> int:
        self._file.write(data)
        self.digest.update(data)
        self.size += len(data)
        self._show("downloading", self.size)
        return len(data)

    def tell(self) -> int:
        return self.size

    def seek(self, position: int) -> int:
        """Only ever to the beginning: the server does not send a file from its middle."""
        assert position == 0
        return 0

    def truncate(self) -> int:
        self._file.truncate(0)
        self.digest, self.size = hashlib.sha256(), 0
        return 0


class _NoBar:
    """In place of a bar on the terminal: the file itself reports."""

    def __init__(self, **kwargs: object):
        pass

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def update(self, count: int = 1) -> None:
        pass


def _hash(source, digest) -> Iterator[int]:
    """Feeds the rest of a file to `digest`; yields the bytes so far after each chunk."""
    done = 0
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        done += len(chunk)
        yield done


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """What the hub and the network have to say, as one line with what to do."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it would tell of every connection that it opens again
    where = _endpoint() or constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError:
        reason = f"its licence must be accepted first, at {where}/{name.repo_id}; then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = f"{where} has no such model; if it is a private one, set HF_TOKEN"
    except errors.OfflineModeIsEnabled:
        reason = "it is not in the model folder, and HF_HUB_OFFLINE forbids to fetch it"
    except errors.HfHubHTTPError as error:
        reason = f"{where} answered {error.response.status_code}; try again later"
    except OSError as error:
        reason = f"cannot be downloaded: {error.strerror or error}; what has come is kept"
    except Exception as error:
        if not type(error).__module__.startswith(("httpx", "httpcore")):
            raise
        reason = f"{where} cannot be reached ({error or type(error).__name__}); what has come is kept"
    else:
        return
    raise ModelError(f"{name}: {' '.join(reason.split())}")
