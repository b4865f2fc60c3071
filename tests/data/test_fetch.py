"""Downloads against a local server: verified, from the next address when one fails."""

import contextlib
import hashlib
import io
import logging
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pooch
import pytest

from dpps.data import DATA_SETS, Recipe, Source, load, obtain
from dpps.data.catalog import fetch
from dpps.data.sets.cifar_10 import ARCHIVE, RECORD
from dpps.errors import RunError
from tests.support.data import write_idx

CONTENT = np.random.default_rng(0).bytes(700_000)


@dataclass
class Site:
    """What the server holds and how it misbehaves: the first `cuts` answers end after `cut_after` bytes."""

    files: dict[str, bytes]
    cuts: int = 0
    cut_after: int = 300_000
    delay: float = 0.0
    address: str = ""
    requests: list[str] = field(default_factory=list)


def handler(site):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # the name http.server calls
            site.requests.append(self.path)
            time.sleep(site.delay)
            content = site.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            cut, site.cuts = site.cuts > 0, site.cuts - 1
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content[: site.cut_after] if cut else content)

        def log_message(self, *_):
            """Say nothing."""

    return Handler


@contextlib.contextmanager
def serving(site):
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(site)) as server:
        site.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    """No proxy, no environment of the user, a cache of our own."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DPPS_DATA", raising=False)


@pytest.fixture
def site():
    with serving(Site({"/data.bin": CONTENT})) as running:
        yield running


def source(*sites, content=CONTENT, name="data.bin"):
    digest = hashlib.sha256(content).hexdigest()
    return Source(name, tuple(site.address for site in sites), f"sha256:{digest}")


def left(folder):
    return {file.name for file in folder.iterdir()}


def test_plain_download_and_no_second_one(site, tmp_path, capfd, monkeypatch):
    # pooch's handler writes to the standard error of when it was imported; give it that of now.
    monkeypatch.setattr(pooch.get_logger(), "handlers", [logging.StreamHandler()])
    for _ in range(2):
        file = fetch(source(site), tmp_path)
        assert file == tmp_path / "data.bin"
        assert file.read_bytes() == CONTENT
    assert site.requests == ["/data.bin"]
    assert left(tmp_path) == {"data.bin"}
    assert capfd.readouterr() == ("", ""), "quiet when not on a terminal"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("progress", [True, False])
def test_bar_on_a_terminal(site, tmp_path, monkeypatch, progress):
    monkeypatch.setattr(sys, "stderr", Terminal())
    fetch(source(site), tmp_path, progress)
    assert ("data.bin" in sys.stderr.getvalue()) == progress


def test_a_bar_ends_when_its_download_fails(site, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    site.cuts = 1
    with pytest.raises(RunError):
        fetch(source(site), tmp_path)
    drawing = [thread for thread in threading.enumerate() if type(thread).__module__.startswith("rich")]
    for thread in drawing:
        thread.join(5)
    assert not any(thread.is_alive() for thread in drawing)


def test_a_cut_download_leaves_nothing_and_works_the_next_time(site, tmp_path):
    site.cuts = 1
    with pytest.raises(RunError, match=r"data\.bin"):
        fetch(source(site), tmp_path)
    assert left(tmp_path) == set()
    assert fetch(source(site), tmp_path).read_bytes() == CONTENT


def test_tampered_file_is_refused_and_removed(tmp_path):
    changed = b"!" + CONTENT[1:]
    expected, found = (hashlib.sha256(content).hexdigest() for content in (CONTENT, changed))
    with serving(Site({"/data.bin": changed})) as bad, pytest.raises(RunError) as caught:
        fetch(source(bad), tmp_path)
    assert f"sha256:{expected} " in str(caught.value)
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == set()


def test_tampered_file_in_the_cache_is_replaced(site, tmp_path, caplog):
    (tmp_path / "data.bin").write_bytes(CONTENT[:-1])
    assert fetch(source(site), tmp_path).read_bytes() == CONTENT
    assert hashlib.sha256(CONTENT).hexdigest() in caplog.text


def test_tampered_file_in_the_cache_is_not_returned_when_there_is_no_other(tmp_path):
    (tmp_path / "data.bin").write_bytes(CONTENT[:-1])
    with serving(Site({})) as empty, pytest.raises(RunError):
        fetch(source(empty), tmp_path)
    assert left(tmp_path) == set()


@pytest.mark.parametrize("fault", ["missing", "tampered", "cut", "gone"])
def test_next_address_is_tried(site, tmp_path, fault):
    files = {"tampered": {"/data.bin": b"<html>"}, "cut": {"/data.bin": CONTENT}}.get(fault, {})
    with serving(Site(files, cuts=99)) as first:
        if fault != "gone":
            assert fetch(source(first, site), tmp_path).read_bytes() == CONTENT
            assert first.requests == ["/data.bin"]
    if fault == "gone":
        assert fetch(source(first, site), tmp_path).read_bytes() == CONTENT


def test_no_address_works(tmp_path):
    """A mirror may end with a slash."""
    with serving(Site({})) as one, serving(Site({})) as two, pytest.raises(RunError) as caught:
        fetch(replace(source(one), mirrors=(one.address, f"{two.address}/")), tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert f"{one.address}/data.bin (404" in message
    assert f"{two.address}/data.bin (404" in message
    assert f"put data.bin (sha256:{hashlib.sha256(CONTENT).hexdigest()}) into {tmp_path}" in message


def mnist_like(count):
    pixels = np.random.default_rng(1).integers(0, 256, (count, 28, 28), np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    return {
        f"{part}-{kind}": write_idx(values)
        for part in ("train", "t10k")
        for kind, values in (("images-idx3-ubyte", pixels), ("labels-idx1-ubyte", labels))
    }


def recipe_like(name, *sources):
    return Recipe(DATA_SETS[name].layouts, DATA_SETS[name].read, "nobody", sources)


def test_load_downloads_into_the_user_cache(tmp_path, monkeypatch):
    files = mnist_like(20)
    with serving(Site({f"/{name}": content for name, content in files.items()})) as site:
        sources = [source(site, content=content, name=name) for name, content in files.items()]
        monkeypatch.setitem(DATA_SETS._entries, "mnist", recipe_like("mnist", *sources))
        data = load("mnist", progress=False)
        load("mnist", progress=False)
    assert data.train.pixels.shape == (20, 1, 28, 28)
    assert len(site.requests) == 4
    assert set(files) <= left(tmp_path / "cache" / "dpps" / "mnist")


def cifar_archive(names):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for label, name in enumerate(names):
            content = bytes([label]) + bytes([label] * (RECORD - 1))
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def test_cifar_archive_is_unpacked_once_and_nothing_else_of_it(tmp_path):
    names = (*ARCHIVE.files, "../escaped", "/absolute")
    archive = cifar_archive(names)
    with serving(Site({"/c.tar.gz": archive})) as site:
        recipe = recipe_like("cifar-10", source(site, content=archive, name="c.tar.gz"))
        for _ in range(2):
            train, test = obtain(recipe, tmp_path / "inner", progress=False)
    assert len(site.requests) == 1
    assert recipe.images(train).labels.tolist() == [0, 1, 2, 3, 4]
    assert recipe.images(test).labels.tolist() == [5]
    assert left(tmp_path / "inner") == {".lock", "cifar-10-batches-bin"}
    assert left(tmp_path / "inner" / "cifar-10-batches-bin") == {
        name.rpartition("/")[2] for name in ARCHIVE.files
    }
    assert left(tmp_path) == {"inner"}


def test_archive_without_a_member_is_refused(tmp_path):
    archive = cifar_archive(ARCHIVE.files[:-1])
    with serving(Site({"/c.tar.gz": archive})) as site:
        recipe = recipe_like("cifar-10", source(site, content=archive, name="c.tar.gz"))
        with pytest.raises(RunError, match=r"c\.tar\.gz: .*cifar-10-batches-bin/test_batch\.bin"):
            obtain(recipe, tmp_path, progress=False)


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "blocked").write_text("a file where the folder should be")
    recipe = recipe_like("mnist", Source("x", ("http://127.0.0.1:1",), "sha256:0"))
    with pytest.raises(RunError, match="blocked/mnist"):
        obtain(recipe, tmp_path / "blocked" / "mnist")


def test_workers_that_start_together_download_once(tmp_path):
    """As when several processes of one machine start with an empty cache."""
    files = mnist_like(20)
    with serving(Site({f"/{name}": content for name, content in files.items()}, delay=0.05)) as site:
        recipe = recipe_like("mnist", *(source(site, content=c, name=name) for name, c in files.items()))
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda _: obtain(recipe, tmp_path, progress=False), range(3)))
    assert found[0] == found[1] == found[2]
    assert len(site.requests) == 4
