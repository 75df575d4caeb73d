"""A race between processes for the same keys of a bucket: 16 writers, in 4 processes of 4 threads each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from orchestrator.storage.base import ObjectStore

REPOSITORY = Path(__file__).parents[2]
RACER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from orchestrator.errors import AlreadyExistsError
from orchestrator.storage.{kind}.bucket import Bucket
from orchestrator.storage.{kind}.store import {store}

store, name, turns = {store}(Bucket("bucket", sys.argv[1])), sys.argv[2], int(sys.argv[3])
store.probe()
print("ready", flush=True)
sys.stdin.readline()

def race(turn_and_thread):
    turn, thread = turn_and_thread
    try:
        store.create(f"turn/{{turn}}/key", [f"{{name}} {{thread}}".encode()])
    except AlreadyExistsError:
        return None
    return f"{{turn}}:{{thread}}"

with ThreadPoolExecutor(4) as threads:
    won = [one for one in threads.map(race, [(turn, thread) for turn in range(turns) for thread in range(4)]) if one]
print(" ".join(won), flush=True)
store.close()
"""


def exactly_one_wins(kind: str, store: ObjectStore, prefix: str, variables: Mapping[str, str], *, turns: int) -> None:
    """Each turn has one winner, and what it wrote is there. `store` reads what the racers wrote below `prefix`."""
    program = RACER.format(kind=kind, store=type(store).__name__)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", program, prefix, f"process {number}", str(turns)],
            cwd=REPOSITORY,
            env={**os.environ, **variables},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in range(4)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    winners: dict[int, str] = {}
    for number, racer in enumerate(racers):
        for word in racer.communicate(timeout=50)[0].split():
            turn, _, thread = word.partition(":")
            assert int(turn) not in winners
            winners[int(turn)] = f"process {number} {thread}"
        assert racer.returncode == 0
    assert sorted(winners) == list(range(turns))
    for won, name in winners.items():
        assert store.read(f"turn/{won}/key") == name.encode()
