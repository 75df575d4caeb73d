"""`python -m tests.preemption`: which source is tested in which case; Markdown, as it stands in docs/notices.md."""

from tests.preemption.table import markdown

print(markdown(), end="")
