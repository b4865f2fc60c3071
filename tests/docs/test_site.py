"""The documentation site in Chromium: every page, light and dark, on a desktop and on a phone."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted("" if path.stem == "index" else path.stem for path in (ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs is not installed: pip install 'dpps[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_page(site, chromium, page):
    chromium.size(1280, 900)
    chromium.open(site / page / "index.html")
    still = "const style = document.createElement('style'); style.textContent = '* { transition: none !important }';"
    chromium.run(f"{still} document.head.append(style)")  # colours that are on their way cannot be read
    for scheme in ("default", "slate"):  # the theme's names for light and dark
        chromium.run("document.body.setAttribute('data-md-color-scheme', arguments[0])", scheme)
        for width in (1280, 360):
            chromium.size(width, 900)
            assert chromium.run("return document.documentElement.scrollWidth") <= width
            assert chromium.too_wide() == []
            assert chromium.poor_contrast() == []
    assert chromium.run("return document.body.dataset.mdColorScheme") == "slate"
    assert chromium.run("return document.querySelectorAll('.katex-error').length") == 0
    unset = (
        "return [...document.querySelectorAll('.arithmatex')].filter(e => !e.querySelector('.katex')).length"
    )
    assert chromium.run(unset) == 0
    assert chromium.console() == []


def test_mathematics_and_examples_are_set(site, chromium):
    for page, formulas in (("proofs", 90), ("concepts", 15)):
        chromium.open(site / page / "index.html")
        assert chromium.run("return document.querySelectorAll('.katex').length") > formulas
    chromium.open(site / "data" / "index.html")
    assert "#N/A, <NA>, NaN" in chromium.run("return document.body.innerText")  # not taken for a tag
    chromium.open(site / "python" / "index.html")
    examples = chromium.run(
        "return [...document.querySelectorAll('pre code')].map(e => e.textContent).filter(t => t.includes('>>> '))"
    )
    assert any("dpps.DPPS(" in text for text in examples)
    prose = "return [...document.querySelectorAll('.doc-contents p')].filter(e => e.textContent.includes('>>> ')).length"
    assert chromium.run(prose) == 0


def test_nothing_is_loaded_from_elsewhere(site):
    for page in site.rglob("index.html"):
        text = page.read_text(encoding="utf-8")
        assert not [part for part in text.split("<script")[1:] if 'src="http' in part.split(">")[0]], page
        assert not [
            part
            for part in text.split("<link")[1:]
            if "stylesheet" in part.split(">")[0] and "//" in part.split(">")[0]
        ], page
