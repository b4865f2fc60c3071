"""How a member's run stands: the file, and the live page."""

import http.client
import json
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dpps.errors import UsageError
from dpps.peers import FINISHED, LivePage, bytes_in_words, read_status, write_status
from dpps.peers.status import FILE, RUNNING, check_page
from tests.support.browser import Browser
from tests.support.peers import STATES, status
from tests.support.processes import free_port, until


def test_what_is_written_is_read(tmp_path: Path) -> None:
    told = status()
    write_status(tmp_path, told)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    found = read_status(tmp_path)
    assert found == told
    assert found.here == ["hospital-a", "hospital-b", "hospital-g", "hospital-h"]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_process_that_is_gone_is_not_alive(tmp_path: Path) -> None:
    told = replace(status(), state=RUNNING)
    write_status(tmp_path, told)
    assert told.alive
    assert not replace(told, state=FINISHED).alive
    assert not replace(told, updated="2020-01-01T00:00:00.000+00:00").alive
    assert not replace(told, process=2**22 + 1).alive


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"dpps federation join.*--out"):
        read_status(tmp_path)
    for content in ("", "{}", json.dumps({"members": [{}], "links": []})):
        (tmp_path / FILE).write_text(content)
        with pytest.raises(UsageError, match=r"status\.json"):
            read_status(tmp_path)


def test_bytes_for_people() -> None:
    assert [bytes_in_words(n) for n in (0, 999, 1500, 2_300_000, 4e9)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.3 MB",
        "4.0 GB",
    ]


@pytest.fixture
def page() -> Iterator[LivePage]:
    with LivePage(f"127.0.0.1:{free_port()}", status) as served:
        yield served


def asked(page: LivePage, path: str, host: str | None = None) -> tuple[int, bytes]:
    """What is answered to a path, from the page's own unless it begins with a slash."""
    connection = http.client.HTTPConnection(page.address, timeout=30)
    if not path.startswith("/"):
        path = page.url.removeprefix(f"http://{page.address}") + path
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_what_it_serves(page: LivePage) -> None:
    assert json.loads(asked(page, "status.json")[1])["round"] == 17
    code, content = asked(page, "")
    assert code == 200
    assert b"http://" not in content.replace(b"http://www.w3.org/2000/svg", b"")  # nothing from elsewhere
    assert asked(page, "../status.json")[0] == 404
    assert asked(page, "status.json", host="evil.example:80")[0] == 403


def test_who_has_not_been_told_the_url_finds_nothing(page: LivePage) -> None:
    with LivePage(f"127.0.0.1:{free_port()}", status) as other:
        assert other.url.split("/")[3] != page.url.split("/")[3]
        for path in ("/", "/status.json", "//", f"/{page.url.split('/')[3]}/status.json"):
            assert asked(other, path)[0] == 404


@pytest.mark.parametrize(
    "address", ["0.0.0.0:8080", "192.168.1.5:8080", "[::]:8080", "hospital.example:8080"]
)
def test_it_is_for_this_machine_only(address: str) -> None:
    with pytest.raises(UsageError, match=r"--page is .*127\.0\.0\.1:8080"):
        check_page(address)


def test_local_addresses() -> None:
    assert check_page("127.0.0.1:80") == ("127.0.0.1", 80)
    assert check_page("localhost:80") == ("localhost", 80)
    assert check_page("[::1]:80") == ("::1", 80)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_it_is_drawn_and_readable(
    chromium: Browser, page: LivePage, width: int, dark: bool, tmp_path: Path
) -> None:
    chromium.size(width, 900, dark=dark)
    chromium.visit("about:blank")  # the page of the test before may ask a server that has been closed since
    chromium.console()
    chromium.visit(page.url)
    until(lambda: chromium.run("return document.querySelectorAll('#members tr').length") == len(STATES))
    text = chromium.run("return document.body.innerText")
    for words in ("hospital-a", "17 of 100", "1.235 of 3", "4 of 8", "123.5 MB", "<b>somebody</b>"):
        assert words in text
    assert chromium.run(
        "return [...document.querySelectorAll('#network circle')].map(e => e.getAttribute('class'))"
    ) == list(STATES)
    links = "return [...document.querySelectorAll('#network line')].map(e => [e.dataset.link, e.getAttribute('class')])"
    assert chromium.run(links) == [["0-1", "open"], ["0-2", ""], ["0-4", ""], ["1-2", ""]]
    assert chromium.run("return document.documentElement.scrollWidth") <= width
    assert chromium.too_wide() == []
    assert chromium.poor_contrast() == []
    assert chromium.console() == []
    chromium.picture(tmp_path / f"live-{width}.png")
    outside = chromium.run(
        """const around = document.querySelector("#network").getBoundingClientRect();
           return [...document.querySelectorAll("#network text")].filter(e => { const box = e.getBoundingClientRect();
             return box.left < around.left || box.right > around.right; }).map(e => e.textContent)"""
    )
    assert outside == []
