"""The short form of tests/soak.py: 300 requests, and a server that holds no more after the last hundred than it may.

The bounds are generous, for 300 requests do not fill what is bounded (compiled grammars, the allocator's pools): a leak
of 200 kB or 25 objects a request, or of a thread, is found. `python -m tests.soak` prints what is held over 5,000.
"""

from tests.soak import KINDS, Soak

MORE = {"rss": 40_000, "active": 2_000_000, "arrays": 100, "objects": 5_000, "threads": 2, "descriptors": 2}
"""What it may hold more of after 300 requests than after 100."""


def test_short_requests_of_all_kinds_leave_nothing_behind():
    soak = Soak()
    try:
        first, _, last = (soak.go(100) for _ in range(3))
        assert soak.faults == [] and "Traceback" not in soak.server.log()
        assert set(soak.done) == set(KINDS) and sum(soak.done.values()) == 300
        assert soak.server.alive
        more = {name: last[name] - first[name] for name in first}
        assert all(more[name] <= MORE[name] for name in MORE), (first, last)
    finally:
        soak.stop()
