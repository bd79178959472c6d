"""What a folder or a file holds is old or new, at whatever system call its writer ends."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.files.kill_points import SCENARIOS
from tests.files.savers import run
from tests.lib.faults import with_faults

MEMORY = Path("/dev/shm")  # flushing to it takes no time
PLACE = MEMORY if MEMORY.is_dir() else None


def test_every_system_call_that_changes_a_file_may_be_the_last() -> None:
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        done = with_faults("tests.files.kill_points", Path(folder))
    if done is None:
        pytest.skip("needs Linux and a C compiler")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [*SCENARIOS]
    for line in lines:
        ends = ("KILL new", "KILL old", "ERROR old", "FULL old")
        assert "the same" in line or all(f"'{end}'" in line for end in ends), line


def test_two_savers_and_two_readers() -> None:
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        found = run(Path(folder), 5)
    assert found.reads > 20
    assert (found.lost, found.failed, found.refused, found.mixed) == (0, 0, 0, 0)
