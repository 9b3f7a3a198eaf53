"""Ratios of this server to mlx_lm.server, and of its replies with and without a feature: `python -m tests.bench`."""
