"""Servers from one start: each line of standard input is a model's folder, for which one process is forked.

    python many_servers.py FLAGS

What takes the time of a start, importing, is done once. Each process runs main() and prints its ready line; the end of
standard input ends none of them. FREE in the environment: no grammar holds what calls may say, as for a format whose
grammar is not known.
"""

import os
import signal
import sys

import mlx_patched_server
from mlx_patches import tool_choice

if os.environ.get("FREE"):
    tool_choice.FORMATS.clear()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if not os.fork():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.argv = ["mlx_patched_server", "--model", line.strip(), "--port", "0", *sys.argv[1:]]
        mlx_patched_server.main()
        os._exit(0)
