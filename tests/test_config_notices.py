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
    assert parse_notices(text) == words


@pytest.mark.parametrize(
    "text", ["", "heroku", "aws,", "aws,aws", "volcengine,byteplus", "none,aws", "file:", "file:leave", "AWS", "file"]
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
