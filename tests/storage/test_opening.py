"""From what a user writes to a store."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("S3://my-bucket.name/a/b/", "s3://my-bucket.name/a/b"),
        ("s3://bucket/100%20 of it", "s3://bucket/100%20 of it"),
        ("gs://bucket", "gs://bucket"),
        ("GS://my_bucket/a/b/", "gs://my_bucket/a/b"),
    ],
)
def test_buckets(url: str, found: str) -> None:
    assert open_store(url).url == found
    assert open_store(job_url(url, "my job")).url == f"{found}/my job"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://", "names no bucket"),
        ("s3:///path", "names no bucket"),
        ("s3://user:password@host/path", "names no bucket"),
        ("s3://bucket/a//b", "has a prefix that is none"),
        ("s3://bucket/../b", "has a prefix that is none"),
        ("s3://bucket/a?endpoint=x", "AWS_ENDPOINT_URL"),
        ("gs://", "write gs://bucket/prefix"),
        ("gs://bucket/a//b", "has a prefix that is none"),
        ("gs://bucket/a?endpoint=x", "STORAGE_EMULATOR_HOST"),
    ],
)
def test_what_is_no_bucket(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_store(url)


@pytest.mark.parametrize(("scheme", "module"), [("s3", "boto3"), ("gs", "google.cloud.storage")])
def test_only_a_bucket_needs_its_sdk(scheme: str, module: str) -> None:
    program = (
        "import sys\nfrom orchestrator.storage.opening import open_store\nopen_store('/data')\n"
        "sdks = {'boto3', 'google.cloud.storage'}\nassert not sdks & set(sys.modules)\n"
        f"open_store('{scheme}://bucket')\nassert sdks & set(sys.modules) == {{'{module}'}}"
    )
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True, timeout=50)


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
