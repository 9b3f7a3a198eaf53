"""A server that counts what it holds: `serve_private(..., module="counting_server", env={"COUNTS": file})`.

On SIGUSR1 it writes one JSON object to the file, which is whole once it is there: `rss` (KB), `threads`, `descriptors`,
`active` (bytes of live mlx buffers), `pooled` (bytes of free ones that mlx keeps), `arrays` (mlx arrays that Python
holds) and `objects` (all that its garbage collector knows of), the last four after a collection.
"""

import gc
import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import mlx.core as mx

import mlx_patched_server


def resident() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())]))


def count(*_) -> None:
    gc.collect()
    objects = gc.get_objects()
    found = {
        "rss": resident(),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/dev/fd")),
        "active": mx.get_active_memory(),
        "pooled": mx.get_cache_memory(),
        "arrays": sum(isinstance(each, mx.array) for each in objects),
        "objects": len(objects),
    }
    new = os.environ["COUNTS"] + ".new"
    with open(new, "w") as file:
        json.dump(found, file)
    os.replace(new, os.environ["COUNTS"])


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, count)
    mlx_patched_server.main()
