"""Import this before torch: leaves out what nothing here computes with, most of the time that a worker's start takes.

That is a table of operators for devices that are not here, and the compiler, which the first optimizer imports.
"""

from __future__ import annotations

import sys
import types
from typing import Any

sys.modules["torch._meta_registrations"] = types.ModuleType("torch._meta_registrations")

import torch  # noqa: E402
import torch._prims.rng_prims  # noqa: E402  # torch.Generator insists on it


def _stub(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module
    return module


_stub(
    "torch._dynamo",
    disable=lambda function=None, *_, **__: function,
    graph_break=lambda: None,
    utils=_stub("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "no_optimization"),
    trace_rules=_stub("torch._dynamo.trace_rules", clear_lru_cache=lambda: None),
)
torch._dynamo = sys.modules["torch._dynamo"]
