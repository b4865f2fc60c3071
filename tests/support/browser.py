"""A small WebDriver client: enough to open a page in Chromium, run a script, print it and take a picture."""

import base64
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


_CONTRAST = r"""
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const parts = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
const over = (top, below) => [0, 1, 2].map((k) => top[k] * top[3] + below[k] * (1 - top[3])).concat(1);
const behind = (e) => { if (!e) return [255, 255, 255, 1];
  const own = parts(getComputedStyle(e).backgroundColor); return own[3] === 1 ? own : over(own, behind(e.parentElement)); };
const light = (c) => c.slice(0, 3).map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
const poor = new Set(), walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const e = walker.currentNode.parentElement, style = getComputedStyle(e), svg = e.namespaceURI.endsWith("svg");
  if (!walker.currentNode.data.trim() || e.closest("script, style, noscript, .katex-mathml, [aria-hidden=true]")) continue;
  if (!e.checkVisibility({ opacityProperty: true, visibilityProperty: true }) || e.getBoundingClientRect().width < 2) continue;
  const back = behind(e), ink = over(parts(svg ? style.fill : style.color), back);
  const [dim, bright] = [light(ink), light(back)].sort((a, b) => a - b), size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  const ratio = (bright + 0.05) / (dim + 0.05);
  if (ratio < (large ? 3 : 4.5) - 0.01) poor.add(`${ratio.toFixed(2)} ${e.tagName}.${e.className?.baseVal ?? e.className} ${walker.currentNode.data.trim().slice(0, 40)}`);
}
return [...poor];
"""

_TOO_WIDE = r"""
const wide = document.documentElement.clientWidth + 1, scrolls = (e) => e && (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
return [...document.body.querySelectorAll("*")].filter((e) => e.checkVisibility() && e.getBoundingClientRect().right > wide && !scrolls(e.parentElement))
  .map((e) => `${e.tagName}.${e.className?.baseVal ?? e.className} ${e.textContent.trim().slice(0, 40)}`);
"""


def programs() -> tuple[str, str] | None:
    """Chromium or Chrome and its driver ($CHROME and $CHROMEDRIVER, or on the path), or None when either is not installed."""
    named = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    installed = [name for name in named if name and not _is_snap(Path(name))]
    browser = os.environ.get("CHROME") or next(iter(installed), None)
    driver = os.environ.get("CHROMEDRIVER") or shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def _is_snap(program: Path) -> bool:
    """Ubuntu's Chromium: it has temporary folders of its own, and so can open no page that a test writes."""
    with program.resolve().open("rb") as file:
        return program.resolve().name == "snap" or (file.read(2) == b"#!" and b"/snap/" in file.read(4096))


class Browser:
    """One window."""

    def __init__(self, address: str, session: str) -> None:
        self._base = f"{address}/session/{session}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return _request(method, f"{self._base}/{path}", body)

    def open(self, page: Path) -> None:
        """Load a file and wait until it is there."""
        self.visit(page.resolve().as_uri())

    def visit(self, address: str) -> None:
        """Load a page of this machine."""
        self._call("POST", "url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a JavaScript function returns."""
        return self._call("POST", "execute/sync", {"script": script, "args": list(arguments)})

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the page in CSS pixels, and what the system prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)
        wish = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", {"media": "", "features": [wish]})

    def poor_contrast(self) -> list[str]:
        """Visible text that WCAG 2 (AA) finds hard to read: below 4.5 to 1, or 3 to 1 where it is large."""
        found: list[str] = self.run(_CONTRAST)
        return found

    def too_wide(self) -> list[str]:
        """What sticks out of the window and cannot be reached by scrolling a part of the page."""
        found: list[str] = self.run(_TOO_WIDE)
        return found

    def pdf(self, width: float = 8.27, height: float = 11.69) -> bytes:
        """The page as printed, on paper of this size in inches unless the page says otherwise."""
        wish = {"preferCSSPageSize": True, "paperWidth": width, "paperHeight": height}
        return base64.b64decode(self._devtools("Page.printToPDF", wish)["data"])

    def printed_text(self) -> str:
        """The words of the page as printed; it stays in the style of print until `size` is called."""
        self._devtools("Emulation.setEmulatedMedia", {"media": "print"})
        text: str = self.run("return document.body.innerText")
        return text

    def console(self) -> list[str]:
        """What the page has written to the console since the last time; network failures are there, too."""
        return [line["message"] for line in self._call("POST", "se/log", {"type": "browser"})]

    def picture(self, file: Path) -> Path:
        """The window as a PNG file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(self._call("GET", "screenshot")))
        return file

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._call("POST", "goog/cdp/execute", {"cmd": command, "params": parameters})


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A fresh Chromium with its profile in an empty folder; ended afterwards."""
    found = programs()
    assert found is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen(
        [found[1], f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address, driver)
        options = {"binary": found[0], "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = _request("POST", f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})[
            "sessionId"
        ]
        yield Browser(address, session)
        _request("DELETE", f"{address}/session/{session}")
    finally:
        driver.terminate()
        driver.wait(10)


def _wait(address: str, driver: subprocess.Popen[bytes], seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and driver.poll() is None:
        try:
            if _request("GET", f"{address}/status")["ready"]:
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("chromedriver did not start")


def _request(method: str, address: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
    try:
        with opener.open(request, timeout=300) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["value"]["message"]) from error
