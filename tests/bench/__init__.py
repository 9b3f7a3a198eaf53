"""Ratios of this server to mlx_lm.server, and of its replies with and without a feature: `python -m tests.bench`.

Each module is a section of docs/performance.md: its docstring says what its table shows, and `table(short)` yields the
table's lines as they are measured. `short` is a few seconds of each, to see that it runs.
"""
