"""From what a user writes to a store."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError, StoreDeniedError
from orchestrator.storage.opening import job_url, open_store
from orchestrator.storage.s3.bucket import bucket_at
from orchestrator.storage.s3.location import parse_location


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
        ("s3://bucket/a#b", "has a '#'"),
        ("s3://bucket/a?", "setting '' is not known; known are endpoint, region, profile, kms_key, without_cond"),
        ("s3://bucket/a?end=x", "setting 'end' is not known; known are endpoint, region, profile, kms_key"),
        ("s3://bucket/a?region=a&region=b", "setting 'region' is given twice; known are endpoint, region"),
        ("s3://bucket/a?profile=&region=a", "setting 'profile' is empty; known are endpoint, region"),
        ("s3://bucket/a?profile", "setting 'profile' is empty"),
        ("s3://bucket/a?region=eu/1", "'region' is no region's name"),
        ("s3://bucket/a?profile=a%0Ab", "'profile' holds what cannot be printed"),
        ("s3://bucket/a?without_conditional_writes=yes", "has one value: accept"),
        (
            "s3://bucket/a?endpoint=127.0.0.1:9000",
            "is no http:// or https:// address; write endpoint=https://host:port",
        ),
        ("s3://bucket/a?endpoint=http://", "is no http:// or https:// address"),
        ("s3://bucket/a?endpoint=http://host:99999", "is no address"),
        ("s3://bucket/a?endpoint=http://[::1", "is no address"),
        ("s3://bucket/a?endpoint=http://host/path", "has more than an address"),
        ("s3://bucket/a?endpoint=http://host?x=1", "has more than an address"),
        ("gs://", "write gs://bucket/prefix"),
        ("gs://bucket/a//b", "has a prefix that is none"),
        ("gs://bucket/a?endpoint=x", "setting 'endpoint' is not known; known are kms_key"),
    ],
)
def test_what_is_no_bucket(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://me:hunter2@bucket/a",
        "s3://bucket/a?endpoint=http://me:hunter2@host:9000",
        "s3://bucket/a?endpoint=http://me%3Ahunter2%40host:9000",
        "s3://bucket/a?access_key=me&secret_key=hunter2",
        "s3://bucket/a?endpoint=hunter2",
    ],
)
def test_no_secret_in_a_url_and_none_that_is_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


def test_all_that_is_wrong_with_a_bucket_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        open_store("s3://bucket/a//b?secret_key=x&region=&profile=a&profile=b")
    assert len(caught.value.problems) == 4
    assert "credentials never stand in a URL" in str(caught.value)


SETTINGS = "?endpoint=http://[::1]:9000&region=eu-1&profile=a%26b&kms_key=arn:aws:kms:eu-1:1:key/2"


@pytest.mark.parametrize(
    ("url", "found"),
    [
        (f"s3://bucket/a{SETTINGS}", f"s3://bucket/a{SETTINGS}"),
        ("s3://bucket?region=eu-1", "s3://bucket?region=eu-1"),
        (
            "S3://bucket/a/?region=eu-1&endpoint=http%3A%2F%2Fhost:9000/",
            "s3://bucket/a?endpoint=http://host:9000&region=eu-1",
        ),
        ("s3://bucket/a?without_conditional_writes=accept", "s3://bucket/a?without_conditional_writes=accept"),
        ("GS://bucket/a/?kms_key=projects/p/key", "gs://bucket/a?kms_key=projects/p/key"),
    ],
)
def test_settings_in_a_url_have_one_form_and_travel_with_it(url: str, found: str) -> None:
    assert open_store(url).url == found
    path, _, settings = found.partition("?")
    of_job = job_url(url, "my job")
    assert open_store(of_job).url == f"{path}/my job?{settings}"
    assert open_store(open_store(of_job).url).url == open_store(of_job).url


def test_what_a_url_says_reaches_the_sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile gives the credentials, and the URL beats the environment and the profile."""
    (tmp_path / "config").write_text(
        "[profile train]\nregion = from-profile\naws_access_key_id = a\naws_secret_access_key = b\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://elsewhere:1")
    bucket = bucket_at(parse_location("s3://bucket/a?endpoint=https://host:9000&region=eu-1&profile=train"))
    client = bucket._made_client()
    assert (client.meta.endpoint_url, client.meta.region_name) == ("https://host:9000", "eu-1")
    assert client.meta.config.s3["payload_signing_enabled"] is False
    bucket = bucket_at(parse_location("s3://bucket/a?profile=train"))
    assert bucket._made_client().meta.region_name == "from-profile"


def test_a_profile_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreDeniedError, match=r"config profile \(train\) could not be found"):
        open_store("s3://bucket/a?profile=train").size("key")


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


@pytest.mark.parametrize("job", ["a?b", "a#b"])
def test_jobs_whose_names_would_end_a_urls_path(job: str) -> None:
    assert job_url("/data", job) == f"/data/{job}"
    with pytest.raises(ConfigError, match="job: "):
        job_url("s3://bucket/path", job)


def test_a_folder_may_have_a_question_mark() -> None:
    assert job_url("/data/what?/", "job") == "/data/what?/job"


def test_job_url_needs_a_store() -> None:
    with pytest.raises(ConfigError, match="store: is empty"):
        job_url("", "job")
