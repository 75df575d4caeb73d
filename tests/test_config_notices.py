"""The words of `notices`, and a grace that leaves nothing."""

from __future__ import annotations

import pytest

from orchestrator.config import load_config, parse_notices
from orchestrator.errors import ConfigError

GIVEN = {"job": "a", "store": "s", "command": ("true",)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("auto", ("auto",)),
        ("none", ("none",)),
        ("aws, file:/run/leave,webhook", ("aws", "file:/run/leave", "webhook")),
        ("byteplus", ("volcengine",)),
        ("auto,file:/run/leave", ("auto", "file:/run/leave")),
    ],
)
def test_words(text: str, words: tuple[str, ...]) -> None:
    found = parse_notices(text)
    assert (found.names, found.addresses) == (words, {})


@pytest.mark.parametrize(
    ("text", "names", "addresses"),
    [
        ("aws@http://127.0.0.1:8123", ("aws",), {"aws": "http://127.0.0.1:8123"}),
        ("gcp@http://localhost", ("gcp",), {"gcp": "http://localhost"}),
        ("azure@http://[::1]:8123/", ("azure",), {"azure": "http://[::1]:8123"}),
        ("byteplus@http://127.9.9.9:1", ("volcengine",), {"volcengine": "http://127.9.9.9:1"}),
        ("auto@http://127.0.0.1:1, webhook", ("auto", "webhook"), {"auto": "http://127.0.0.1:1"}),
        ("file:/run/a@http://b", ("file:/run/a@http://b",), {}),
    ],
)
def test_an_address_is_a_rehearsal(text: str, names: tuple[str, ...], addresses: dict[str, str]) -> None:
    found = load_config(None, {**GIVEN, "notices": text}).notices
    assert (parse_notices(found).names, parse_notices(found).addresses) == (names, addresses)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:8123",
        "https://127.0.0.1:8123",
        "http://169.254.169.254",
        "http://127.0.0.1.example.org",
        "http://127.0.0.300",
        "http://[::2]:8123",
        "http://[::1",
        "http://me@127.0.0.1:8123",
        "http://127.0.0.1:8123/latest",
        "http://127.0.0.1:0",
        "http://127.0.0.1:65536",
        "http://127.0.0.1:8123?a",
    ],
)
def test_an_address_that_is_not_on_this_machine(address: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, {**GIVEN, "notices": f"aws@{address}"})
    (problem,) = raised.value.problems
    assert problem == (
        f"notices: aws@{address}: an address is for rehearsals on this machine, as in aws@http://127.0.0.1:8123; "
        "aws alone watches the real service"
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", "heroku", "aws,", "aws,aws", "volcengine,byteplus", "none,aws", "file:", "file:leave", "AWS", "file"),
        *("none@http://127.0.0.1:1", "webhook@http://127.0.0.1:1", "aws,aws@http://127.0.0.1:1", "@http://127.0.0.1:1"),
    ],
)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="notices: "):
        load_config(None, {**GIVEN, "notices": text})


def test_auto_is_what_a_job_does_unless_told_otherwise() -> None:
    assert load_config(None, GIVEN).notices == "auto"


@pytest.mark.parametrize("seconds", [0.5, 1.0])
def test_a_grace_that_leaves_nothing_is_refused_at_the_start(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"grace_seconds: .* leave nothing"):
        load_config(None, {**GIVEN, "grace_seconds": seconds})
