"""The tutorial between organisations, as it stands in the docs: three members in three processes, by gRPC on this machine."""

import io
import json
import os
import re
import shlex
import time
import urllib.request
from contextlib import redirect_stdout, suppress
from pathlib import Path

from dpps.cli import DONE, main
from dpps.peers import Identity
from tests.support.holding.sitecustomize import hold
from tests.support.processes import PATIENCE, context, free_port

PAGE = Path(__file__).parents[2] / "docs" / "organisations.md"


def blocks():
    text, _, rest = PAGE.read_text().partition("\n## How it works\n")
    assert rest, "the tutorial is the first part of the page"
    for port in re.findall(r"127\.0\.0\.1:(744\d)", text):
        text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}")
    # nobody is left behind, however slow the machine
    text = text.replace("--soft-deadline 5 --hard-deadline 20", "--soft-deadline 60 --hard-deadline 300")
    return re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def execute(block):
    """Carry out a block: a Python program for `python -`, files for `cat`, and commands of dpps; what it printed."""
    said = io.StringIO()
    here = re.compile(r"(python -|cat > (\S+)) <<'END'\n(.*?)^END\n", re.DOTALL | re.MULTILINE)
    while (found := here.match(block)) is not None:
        if found[2]:
            Path(found[2]).write_text(found[3])
        else:
            exec(compile(found[3], "<tutorial>", "exec"), {})
        block = block[found.end() :]
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        assert words[0] == "dpps", line
        file = Path(words.pop()) if words[-2] == ">" else None
        out = io.StringIO()
        with redirect_stdout(out):
            assert main([word for word in words[1:] if word != ">"]) == DONE, line
        said.write(out.getvalue())
        if file is not None:
            file.write_text(out.getvalue())
    return said.getvalue()


def carry_out(block, log):
    hold(50, Path("gate"))  # until status and page were looked at
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os._exit(main(shlex.split(block)[1:]))


def test_three_terminals(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    install, tables, keys, contract, *joins, status, afterwards = blocks()
    assert install == "pip install 'dpps[peers]'\n"
    assert len(joins) == 3
    execute(tables)
    printed = "".join(execute(keys).split())  # lines may be wrapped
    assert all(Identity.open(Path(f"member-{member}")).fingerprint in printed for member in "abc")
    assert "epsilon 3, delta 0.0001" in execute(contract)
    assert all(join.startswith("dpps federation join ") for join in joins)
    page = f"127.0.0.1:{free_port()}"
    joins[2] += f" --page {page} --log-json"  # which the page speaks of
    terminals = [context.Process(target=carry_out, args=(join, f"log-{k}")) for k, join in enumerate(joins)]
    for terminal in terminals:
        terminal.start()
    deadline = time.monotonic() + PATIENCE
    while not Path("run-a/status.json").exists():
        assert terminals[0].is_alive(), Path("log-0").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "hospital-a (this one)" in execute(status)
    shown = None
    while shown is None and terminals[2].is_alive() and time.monotonic() < deadline:
        url = re.search(
            r'"url": "(http://[^"]*)"', Path("log-2").read_text() if Path("log-2").exists() else ""
        )
        with suppress(OSError):
            if url is not None:
                with urllib.request.urlopen(f"{url[1]}status.json", timeout=30) as answer:
                    shown = json.load(answer)
        time.sleep(0.05)
    assert shown is not None, Path("log-2").read_text()
    assert shown["member"] == "hospital-c"
    Path("gate").touch()
    for terminal in terminals:
        terminal.join(PATIENCE)
    logs = [Path(f"log-{k}").read_text() for k in range(3)]
    assert [terminal.exitcode for terminal in terminals] == [DONE] * 3, logs
    for k, member in enumerate("abc"):
        summary = json.loads(Path(f"run-{member}/summary.json").read_text())
        assert summary["privacy"]["epsilon"] <= 3
        assert k == 2 or f"hospital-{member}" in logs[k]
        assert k == 2 or "3 of 3 here" in logs[k]
        assert k == 2 or "epsilon 3 " in logs[k]
        told = json.loads(Path(f"run-{member}/status.json").read_text())
        assert (told["state"], told["round"]) == ("finished", 100)
        assert [peer["state"] for peer in told["members"]] == ["finished"] * 3
        # a handshake that takes a slow machine longer than its time is told, and made again
        assert [line for line in told["refusals"] if "TLS" not in line] == []
    lines = [json.loads(line) for line in logs[2].splitlines()]
    rounds = [line for line in lines if line.get("event") == "round"]
    assert rounds[-1]["round"] == rounds[-1]["rounds"] == 100
    assert set(rounds[-1]["here"]) <= {"hospital-a", "hospital-b", "hospital-c"}
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    execute(afterwards)
    assert "dpps train" not in Path("run-a/report.html").read_text(), "one member cannot repeat it alone"
