import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from dpps.errors import UsageError
from dpps.peers import FINISHED, bytes_in_words, read_status, write_status
from dpps.peers.status import FILE, RUNNING
from tests.support.peers import status


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
    with pytest.raises(UsageError, match=r"dpps join.*--out"):
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
