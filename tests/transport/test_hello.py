"""What is not understood at the meeting point is refused with a name."""

import pytest

import dpps
from dpps.transport import decoded, same_facts, understood, unreached


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        "3",
        '{"address": "10.0.0.1"}',
        *(
            f'{{"address": "{address}", "port": {port}, "facts": {{}}, "key": "00"}}'
            for address, port in (
                ("10.0.0.1", '"x"'),
                ("10.0.0.1", "1e999"),
                ("10.0.0.1", "70000"),
                ("10.0.0.1\\u001b[2J", "5"),
                ("\u00fc" * 70, "5"),
            )
        ),
    ],
)
def test_what_is_not_a_hello(text: str) -> None:
    with pytest.raises(dpps.errors.PeerError, match="rank 2 says"):
        understood(2, text)


def test_what_is_a_hello() -> None:
    said = understood(2, '{"address": "10.0.0.1", "port": 5, "facts": {}, "key": "00"}')
    assert said == {"address": "10.0.0.1", "port": 5, "key": b"\0", "facts": {}}
    assert decoded(2, "{}") == {}


@pytest.mark.parametrize("text", ["[]", '{"x": "no answer"}', '{"-1": "no answer"}', '{"3": "no answer"}'])
def test_only_processes_of_this_run_can_be_out_of_reach(text: str) -> None:
    assert unreached(2, '{"1": "no\\u001b answer"}', 3) == {1: "no? answer"}
    with pytest.raises(dpps.errors.PeerError, match="rank 2 says"):
        unreached(2, text, 3)


def test_facts_that_are_equal_and_written_otherwise_are_told_apart() -> None:
    with pytest.raises(dpps.errors.UsageError, match=r"rank 1 .*configuration: rate is 1\.0,.* 1;"):
        same_facts([{"configuration": {"rate": rate}} for rate in (1, 1.0, 1)], 0)
