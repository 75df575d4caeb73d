"""From what a user writes to a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.storage.opening import job_url, open_store


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/data/checkpoints", "/data/checkpoints"),
        ("/data/100% of it", "/data/100% of it"),
        ("file:///data/checkpoints", "/data/checkpoints"),
        ("FILE:///data", "/data"),
        ("file://localhost/data", "/data"),
        ("file:///data/with%20space%3F", "/data/with space?"),
    ],
)
def test_folders(url: str, path: str) -> None:
    assert open_store(url).url == path


def test_paths_relative_to_here_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_store("checkpoints").url == str(tmp_path / "checkpoints")
    assert open_store("~/checkpoints").url == str(tmp_path / "home" / "checkpoints")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_stores_of_a_later_release(scheme: str) -> None:
    with pytest.raises(ConfigError, match=f"{scheme}:// needs a later release; this one supports folders only"):
        open_store(f"{scheme}://bucket/path")


@pytest.mark.parametrize(
    "url", ["http://host/path", "az://container", "ftp://x", "", "file://host/path", "file://", "file:///a?b", "a\0b"]
)
def test_what_is_no_store(url: str) -> None:
    with pytest.raises(ConfigError, match="store: "):
        open_store(url)


@pytest.mark.parametrize(
    ("store", "job", "url"),
    [
        ("/data", "job", "/data/job"),
        ("/data/", "job", "/data/job"),
        ("/", "job", "/job"),
        ("checkpoints", "my job", "checkpoints/my job"),
        ("file:///data", "my job", "file:///data/my%20job"),
    ],
)
def test_job_url(store: str, job: str, url: str) -> None:
    assert job_url(store, job) == url
    assert Path(open_store(url).url).name == job


@pytest.mark.parametrize("job", ["", ".", "..", "a/b", "/a", "a\0"])
def test_jobs_that_are_no_names(job: str) -> None:
    with pytest.raises(ConfigError, match="job: "):
        job_url("/data", job)


def test_job_url_needs_a_store() -> None:
    with pytest.raises(ConfigError, match="store: is empty"):
        job_url("", "job")
