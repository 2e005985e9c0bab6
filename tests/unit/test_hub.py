"""`hf:owner/repo[:which]`: the right file, whole, whatever the network does; and none where there is none."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_tools import Hub, running_hub

from hetero.hub import download
from hetero.hub_names import HubName, choose, find_local, parse_hub_name
from hetero.model_folder import ModelError, list_names
from hetero.models import resolve

BIG = b"GGUF" + bytes(range(256)) * 3000
PARTS = {f"Q6_K/big-Q6_K-{i:05}-of-00003.gguf": BIG + bytes([i]) for i in (1, 2, 3)}
FILES = {
    "README.md": b"#",
    "tiny-Q4_K_M.gguf": BIG,
    "tiny-Q8_0.gguf": BIG + b"8",
    "tiny-UD-Q8_0.gguf": BIG + b"UD",
    "mmproj-tiny-f16.gguf": b"GGUF" + b"eyes" * 100,
    "tiny.imatrix.gguf": b"GGUF" + b"matrix" * 100,
    **PARTS,
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
        hub.repos["me/tiny-GGUF"] = dict(FILES)
        yield hub


def get(name: str, folder: Path, seen: list[tuple[str, float]] | None = None) -> Path:
    def progress(text: str, share: float) -> None:
        if seen is not None:
            seen.append((text, share))

    return download(parse_hub_name(name), folder, progress)


def left_in(folder: Path) -> list[str]:
    """Names of what is in the repository's folder, without locks."""
    return sorted(f.name for f in (folder / "me--tiny-GGUF").iterdir() if not f.name.endswith(".lock"))


def test_a_file_arrives_whole_with_progress(hub: Hub, tmp_path: Path):
    seen: list[tuple[str, float]] = []
    path = get("hf:me/tiny-GGUF:q8_0", tmp_path, seen)
    assert path == tmp_path / "me--tiny-GGUF" / "tiny-Q8_0.gguf"
    assert path.read_bytes() == FILES["tiny-Q8_0.gguf"]
    assert hub.downloads == [("tiny-Q8_0.gguf", None)]
    shares = [share for _, share in seen]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert {text for text, _ in seen} == {"downloading tiny-Q8_0.gguf (750.0 KiB)"}
    assert left_in(tmp_path) == ["tiny-Q8_0.gguf"] and list_names(tmp_path) == ["tiny-Q8_0"]


def test_what_was_downloaded_needs_no_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = get("hf:me/tiny-GGUF:Q8_0", tmp_path)
    before = len(hub.requests)
    assert resolve("hf:me/tiny-GGUF:Q8_0", tmp_path).path == path
    assert resolve("hf:me/tiny-GGUF", tmp_path).path == path  # the only one there
    assert resolve("tiny-Q8_0", tmp_path).path == path
    assert len(hub.requests) == before
    assert get("hf:me/tiny-GGUF:Q8_0", tmp_path) == path  # asks whether it is still the same
    assert len(hub.requests) == before + 1
    resolve("hf:me/tiny-GGUF:Q4_K_M", tmp_path)
    assert hub.downloads[-1] == ("tiny-Q4_K_M.gguf", None)


def test_a_split_model(hub: Hub, tmp_path: Path):
    first = get("hf:me/tiny-GGUF:Q6_K", tmp_path)
    assert first.name == "big-Q6_K-00001-of-00003.gguf"
    for path, data in PARTS.items():
        assert (first.parent / path.rpartition("/")[2]).read_bytes() == data
    assert find_local(parse_hub_name("hf:me/tiny-GGUF:q6_k"), tmp_path) == first
    (first.parent / "big-Q6_K-00002-of-00003.gguf").unlink()
    assert find_local(parse_hub_name("hf:me/tiny-GGUF:q6_k"), tmp_path) is None
    hub.requests.clear()
    get("hf:me/tiny-GGUF:Q6_K", tmp_path)
    assert hub.downloads == [("big-Q6_K-00002-of-00003.gguf", None)]


def test_goes_on_where_the_last_process_stopped(hub: Hub, tmp_path: Path):
    folder = tmp_path / "me--tiny-GGUF"
    folder.mkdir()
    digest = hashlib.sha256(BIG).hexdigest()[:12]
    part = folder / f".tiny-Q4_K_M.gguf.{digest}.part"
    part.write_bytes(BIG[:100_000])
    (folder / ".tiny-Q4_K_M.gguf.0123456789ab.part").write_bytes(b"of an older file")
    assert get("hf:me/tiny-GGUF:Q4_K_M", tmp_path).read_bytes() == BIG
    assert hub.downloads == [("tiny-Q4_K_M.gguf", "bytes=100000-")]
    assert left_in(tmp_path) == ["tiny-Q4_K_M.gguf"]


def test_goes_on_after_a_broken_connection(hub: Hub, tmp_path: Path):
    hub.cut_after = 300_000
    assert get("hf:me/tiny-GGUF:Q4_K_M", tmp_path).read_bytes() == BIG
    starts = [span for _, span in hub.downloads]
    assert starts[0] is None and len(starts) >= 3 and starts[-1].startswith("bytes=")


def test_gives_up_and_keeps_what_came(hub: Hub, tmp_path: Path):
    hub.cut_after = 0
    with pytest.raises(ModelError, match=r"^hf:me/tiny-GGUF:Q4_K_M: .* cannot be reached .*is kept$"):
        get("hf:me/tiny-GGUF:Q4_K_M", tmp_path)
    assert find_local(parse_hub_name("hf:me/tiny-GGUF"), tmp_path) is None
    hub.cut_after = None
    assert get("hf:me/tiny-GGUF:Q4_K_M", tmp_path).read_bytes() == BIG


def test_a_server_that_sends_no_parts(hub: Hub, tmp_path: Path):
    hub.ranges = False
    folder = tmp_path / "me--tiny-GGUF"
    folder.mkdir()
    part = folder / f".tiny-Q4_K_M.gguf.{hashlib.sha256(BIG).hexdigest()[:12]}.part"
    for begun in (BIG[:1000], b"x" * (len(BIG) + 5), BIG):
        part.write_bytes(begun)
        path = get("hf:me/tiny-GGUF:Q4_K_M", tmp_path)
        assert path.read_bytes() == BIG
        path.unlink()


def test_damage_on_the_way_is_noticed(hub: Hub, tmp_path: Path):
    hub.damaged = True
    with pytest.raises(ModelError, match=r"tiny-Q4_K_M\.gguf arrived damaged"):
        get("hf:me/tiny-GGUF:Q4_K_M", tmp_path)
    assert left_in(tmp_path) == []
    hub.damaged = False
    path = get("hf:me/tiny-GGUF:Q4_K_M", tmp_path)
    path.write_bytes(BIG[:-1] + b"?")  # damaged here: pull mends it
    assert get("hf:me/tiny-GGUF:Q4_K_M", tmp_path).read_bytes() == BIG


def in_cache(home: Path, file: str, data: bytes) -> Path:
    """A file in the cache that other programs of the hub share: a link to a blob named after its SHA-256."""
    repo = home / "hub" / "models--me--tiny-GGUF"
    blob = repo / "blobs" / hashlib.sha256(BIG).hexdigest()
    link = repo / "snapshots" / ("a" * 40) / file
    for path in (blob, link, repo / "refs" / "main"):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    link.symlink_to(blob)
    (repo / "refs" / "main").write_text("a" * 40)
    return blob


@pytest.mark.skipif(os.name == "nt", reason="symlinks need a privilege on Windows")
def test_what_other_programs_have_downloaded(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    blob = in_cache(tmp_path / "hf", "tiny-Q4_K_M.gguf", BIG)
    path = get("hf:me/tiny-GGUF:Q4_K_M", tmp_path)
    assert hub.downloads == [] and path.read_bytes() == BIG
    assert path.samefile(blob) and not path.is_symlink()  # takes no second place on the disk
    path.unlink()
    monkeypatch.setattr("hetero.hub.os.link", no_links)
    path = get("hf:me/tiny-GGUF:Q4_K_M", tmp_path)
    assert hub.downloads == [] and path.read_bytes() == BIG and not path.samefile(blob)
    path.unlink()
    blob.write_bytes(BIG[:-1] + b"?")
    assert get("hf:me/tiny-GGUF:Q4_K_M", tmp_path).read_bytes() == BIG
    assert len(hub.downloads) == 1


def no_links(source: Path, target: Path) -> None:
    raise OSError("another file system")


@pytest.mark.skipif(os.name == "nt", reason="symlinks need a privilege on Windows")
def test_nothing_is_written_through_a_link(hub: Hub, tmp_path: Path):
    outside, folder = tmp_path / "outside", tmp_path / "models"
    outside.mkdir()
    folder.mkdir()
    (folder / "me--tiny-GGUF").symlink_to(outside)
    with pytest.raises(ModelError, match="is a link"):
        get("hf:me/tiny-GGUF:Q4_K_M", folder)
    assert list(outside.iterdir()) == []
    (folder / "me--tiny-GGUF").unlink()
    (folder / "me--tiny-GGUF").mkdir()
    (outside / "file").write_bytes(b"precious")
    part = f".tiny-Q4_K_M.gguf.{hashlib.sha256(BIG).hexdigest()[:12]}.part"
    for name in (part, "tiny-Q4_K_M.gguf"):
        (folder / "me--tiny-GGUF" / name).symlink_to(outside / "file")
    assert get("hf:me/tiny-GGUF:Q4_K_M", folder).read_bytes() == BIG
    assert (outside / "file").read_bytes() == b"precious"


def test_two_at_once(hub: Hub, tmp_path: Path):
    from filelock import FileLock

    (tmp_path / "me--tiny-GGUF").mkdir()
    with (
        FileLock(tmp_path / "me--tiny-GGUF" / ".tiny-Q4_K_M.gguf.lock"),
        pytest.raises(ModelError, match="another process is downloading tiny-Q4_K_M"),
    ):
        get("hf:me/tiny-GGUF:Q4_K_M", tmp_path)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ((404, "RepoNotFound"), "has no such model; if it is a private one, set HF_TOKEN"),
        ((403, "GatedRepo"), "its licence must be accepted first, at http"),
        ((500, ""), "answered 500; try again later"),
    ],
)
def test_what_the_hub_refuses(hub: Hub, tmp_path: Path, error: tuple[int, str], words: str):
    hub.error = error
    with pytest.raises(ModelError) as caught:
        get("hf:me/tiny-GGUF", tmp_path)
    assert words in str(caught.value) and str(caught.value).startswith("hf:me/tiny-GGUF: ")
    assert "\n" not in str(caught.value)


def test_offline_and_unreachable(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"http://127.0.0.1:9 cannot be reached"):
        get("hf:me/tiny-GGUF", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids"):
        get("hf:me/tiny-GGUF", tmp_path)


def test_more_than_the_hub_sends(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.MAX_HTTP_DOWNLOAD_SIZE", 1000)
    with pytest.raises(ModelError, match=r"'hf download me/tiny-GGUF tiny-Q8_0\.gguf', where it is found"):
        get("hf:me/tiny-GGUF:Q8_0", tmp_path)
    assert hub.downloads == [] and left_in(tmp_path) == []


def test_a_full_disk(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hetero.hub.shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(ModelError, match=r"750.0 KiB are still to come, 1000 B are free"):
        get("hf:me/tiny-GGUF:Q4_K_M", tmp_path)


@pytest.mark.parametrize(
    ("which", "wanted"),
    [
        ("", ["x-Q4_K_M"]),
        ("Q4_K_M", ["x-Q4_K_M"]),
        ("q4_k_m", ["x-Q4_K_M"]),
        ("x-q8_0.gguf", ["x-Q8_0"]),
        ("Q8_0", ["x-Q8_0"]),  # and not x-UD-Q8_0
        ("UD-Q8_0", ["x-UD-Q8_0"]),
        ("Q4_K_XL", ["x-UD-Q4_K_XL"]),
        ("F16", ["x-F16"]),  # and not x-BF16
        ("Q4", ["x-Q4_K_M"]),
        ("Q3_K", []),
        ("x", ["x-Q4_K_M", "x-Q8_0", "x-F16", "x-BF16", "x-UD-Q8_0", "x-UD-Q4_K_XL"]),
    ],
)
def test_choice(which: str, wanted: list[str]):
    models = ["x-Q4_K_M", "x-Q8_0", "x-UD-Q8_0", "x-UD-Q4_K_XL", "x-F16", "x-BF16"]
    assert sorted(choose(which, models)) == sorted(wanted)


def test_no_choice_lists_what_there_is(hub: Hub, tmp_path: Path):
    with pytest.raises(ModelError) as caught:
        get("hf:me/tiny-GGUF:Q2_K", tmp_path)
    assert "no model Q2_K; name one after a colon: big-Q6_K (2.2 MiB), tiny-Q4_K_M (750.0 KiB)" in str(
        caught.value
    )
    assert "mmproj" not in str(caught.value) and "imatrix" not in str(caught.value)
    hub.repos["me/tiny-GGUF"] = {"a-x.gguf": BIG, "b-x.gguf": BIG}
    with pytest.raises(ModelError, match="several models; name one after a colon: a-x"):
        get("hf:me/tiny-GGUF", tmp_path)
    hub.repos["me/tiny-GGUF"] = {"mmproj-a.gguf": BIG}
    with pytest.raises(ModelError, match="holds no GGUF model"):
        get("hf:me/tiny-GGUF", tmp_path)


def test_names_that_leave_the_folder(hub: Hub, tmp_path: Path):
    for name in ("..\\evil.gguf", "..gguf", "CON.gguf", "a:b.gguf", "x" * 300 + ".gguf"):
        hub.repos["me/tiny-GGUF"] = {name: BIG}
        with pytest.raises(ModelError, match=r"unusable name|holds no"):
            get("hf:me/tiny-GGUF", tmp_path)
    hub.repos["me/tiny-GGUF"] = {"a/../../m.gguf": BIG, "b/m.gguf": BIG}
    get("hf:me/tiny-GGUF:b--m", tmp_path)
    assert left_in(tmp_path) == ["b--m.gguf"]


@pytest.mark.parametrize(
    "name",
    [
        "hf:",
        "hf:a",
        "hf:a/",
        "hf:../b",
        "hf:a/..",
        "hf:a/b/c",
        "hf:a/b:",
        "hf:a/b:c/d",
        "hf:a b/c",
        "hf:a/b\n",
    ],
)
def test_what_is_no_name(name: str, tmp_path: Path):
    with pytest.raises(ModelError, match="must be hf:owner/repo"):
        parse_hub_name(name)


def test_names():
    assert parse_hub_name("hf:a.b/c-d:Q4_K_M") == HubName("a.b", "c-d", "Q4_K_M")
    assert str(parse_hub_name("hf:a/b")) == "hf:a/b"
