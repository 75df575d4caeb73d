"""What is wrong with something under the workers, in words, and whether the node should be used any longer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Told; `condemns`: besides, its node is not to be in the next generation, if the job can do without."""

    words: str
    condemns: bool = False
