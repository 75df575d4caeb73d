"""`orchestrator status JOB`: what the supervisor of a running job says, as a table or as JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType

from orchestrator.cli import kubernetes
from orchestrator.cli.client import SupervisorClient, connect
from orchestrator.cli.kubernetes import Namespace
from orchestrator.cli.terminal import duration_text, facts, output, print_json, say, table
from orchestrator.core.wording import counted
from orchestrator.errors import SupervisorError

WATCH_SECONDS = 1.0


def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="The job's name; without it: all jobs.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second, until the job ends.")] = False,
    namespace: Namespace = None,
) -> None:
    """Show what a running job is doing: phase, step, newest checkpoint, nodes and ranks. Of one that ended: how."""
    if job is None:
        _list_jobs(json_output=json_output)
        return
    found = kubernetes.find(job, namespace)
    if found is not None:
        while kubernetes.show(found, as_json=json_output) and watch:
            time.sleep(WATCH_SECONDS)
        return
    try:
        client = connect(job)
    except SupervisorError:
        if not _say_how_it_ended(job, json_output=json_output):
            raise
        return
    if not watch:
        now = client.status()
        if json_output:
            print_json(now)
        else:
            output().print(describe(now))
        return
    try:
        _watch_lines(client) if json_output else _watch(client)
    except KeyboardInterrupt:
        return
    say(f"the job {job!r} has ended")


def _say_how_it_ended(job: str, *, json_output: bool) -> bool:
    """Whether it has ended, as its end record says."""
    from orchestrator.cli.absent import absence_of

    absence = absence_of(job)
    if absence is None or absence.outcome is None:
        return False
    if json_output:
        ended = {"outcome": absence.outcome, "reason": absence.reason, "newest_committed": absence.newest_committed}
        print_json({"job": job, "phase": "ended", **ended})
    else:
        output().print(absence.words, soft_wrap=True, highlight=False, markup=False)
    return True


def _list_jobs(*, json_output: bool) -> None:
    """Every job that runs or has run on this machine (for this user)."""
    from orchestrator.supervisor.state_folder import known_jobs

    rows = [
        {
            "job": one.job,
            "url": one.job_url,
            "running": one.supervisor() is not None,
            "namespace": one.cluster_job(),
        }
        for one in known_jobs()
    ]
    if json_output:
        print_json(rows)
    elif rows:
        shown = [(row["job"], _where(row), row["url"]) for row in rows]
        output().print(table(("job", "", "its folder"), shown))
    if not rows:
        say("no job has run on this machine yet: `orchestrator run` starts one")


def _where(row: dict[str, Any]) -> str:
    if row["running"]:
        return "running"
    return f"in Kubernetes, namespace {row['namespace']}" if row["namespace"] else "not running"


def _watch_lines(client: SupervisorClient) -> None:
    """One line of JSON a second."""
    while (now := _status_or_end(client)) is not None:
        sys.stdout.write(json.dumps(now) + "\n")
        sys.stdout.flush()
        time.sleep(WATCH_SECONDS)


def _watch(client: SupervisorClient) -> None:
    from rich.live import Live

    console = output()
    if not console.is_terminal:
        while (now := _status_or_end(client)) is not None:
            console.print(describe(now))
            time.sleep(WATCH_SECONDS)
        return
    with Live(console=console, auto_refresh=False) as live:
        while (now := _status_or_end(client)) is not None:
            live.update(describe(now), refresh=True)
            time.sleep(WATCH_SECONDS)


def _status_or_end(client: SupervisorClient) -> dict[str, Any] | None:
    """The status; None once the supervisor has ended. Raises SupervisorError while it is there but cannot answer."""
    try:
        return client.status()
    except SupervisorError:
        client.wait_until_gone(timeout_seconds=10)
        return None


def describe(now: dict[str, Any]) -> RenderableType:
    """The status as a table."""
    return Group(facts(_summary(now)), _nodes(now), _ranks(now))


def _summary(now: dict[str, Any]) -> list[tuple[str, object]]:
    step = str(now["step"])
    if now["until"]:
        step += f" of {now['until']} ({100 * now['progress']:.1f} %)"
    newest = now["newest_committed"]
    if newest is not None and now["commit_age_seconds"] is not None:
        newest += f", {duration_text(now['commit_age_seconds'])} ago"
    return [
        ("job", now["job"]),
        ("phase", now["phase"]),
        ("generation", now["generation"]),
        ("world size", now["world_size"]),
        ("step", step),
        ("a step takes", duration_text(now["step_seconds"])),
        *(
            (("hang", f"no step for {duration_text(now['seconds_without_step'])}: {now['hang']}"),)
            if now["hang"]
            else ()
        ),
        *((("loss", _loss(now["loss_trouble"])),) if now["loss_trouble"] else ()),
        *(
            (("rollback", f"to step {now['rollback']['to']}, as soon as the next generation can be opened"),)
            if now["rollback"]["to"] is not None
            else (("not rolled back", now["rollback"]["refusal"]),)
            if now["rollback"]["refusal"]
            else ()
        ),
        ("done in", duration_text(now["eta_seconds"])),
        ("newest checkpoint", newest or "none yet"),
        *(("saving", _saving(save)) for save in now["saves"]),
        ("failures since", now["failures"]),
    ]


def _loss(trouble: dict[str, Any]) -> str:
    others = trouble["ranks"] - 1
    more = f"; {counted(others, 'more rank')} as well" if others > 0 else ""
    return f"{trouble['reason']}{more}"


def _saving(save: dict[str, Any]) -> str:
    counts = f"{save['staged']} of {save['ranks']} ranks staged, {save['durable']} durable"
    return f"{save['checkpoint']}, for {duration_text(save['since_seconds'])}: {counts}"


def _nodes(now: dict[str, Any]) -> RenderableType:
    rows = [
        (
            node["node"],
            node["agent_pid"],
            _rank_range(node["ranks"]),
            _leaving(node),
        )
        for node in now["nodes"]
    ]
    return table(("node", "agent process", "ranks", "state"), rows)


def _leaving(node: dict[str, Any]) -> str:
    if not node["going"]:
        here = "here; it may go, as a hint says" if node["hinted"] else "here"
        return f"{here}, but not for another generation: {'; '.join(node['condemned'])}" if node["condemned"] else here
    left = node["seconds_left"]
    return "will go" if left is None else f"will go in {duration_text(max(0.0, left))}"


def _rank_range(ranks: list[int]) -> str | None:
    if not ranks:
        return None
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def _ranks(now: dict[str, Any]) -> RenderableType:
    rows = [
        (rank["rank"], rank["pid"] or None, rank["step"], duration_text(rank["step_seconds"] or None), rank["save"])
        for rank in now["ranks"]
    ]
    return table(("rank", "process", "step", "a step takes", "its save"), rows)
