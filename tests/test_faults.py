"""Every bad input of tests/fault_table.py: its answer, the next request, the one that runs beside it, one process."""

import json
from contextlib import nullcontext

import pytest

from tests.fault_table import FAULTS, Beside, Target


@pytest.fixture(scope="module")
def target():
    ours = Target(upstream=False)
    with Beside(ours.server) as beside:
        yield ours, beside, ours.server.pid
    ours.stop()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.row}: {fault.what}"[:90])
def test_a_fault_is_one_requests_alone(target, fault):
    ours, beside, pid = target
    with beside.only_one() if fault.armed else nullcontext():
        got = ours.try_out(fault)
    assert (got.status, fault.said in got.text) == (fault.status, True), (got, ours.server.log()[-3000:])
    if got.status >= 400:
        error = json.loads(got.text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in got.text and ".py" not in got.text and "armed" not in got.text
    assert got.plain and ours.server.alive and ours.server.pid == pid
    ran = beside.took()
    assert fault.deadly or set(ran) == {(200, True)}


def test_enough_of_them():
    assert len(FAULTS) >= 60 and len({fault.row for fault in FAULTS}) >= 9
