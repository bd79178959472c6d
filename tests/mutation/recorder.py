"""A plugin of pytest that writes which tests run which lines of MUTATION_FILES, one file for each
process of the tests, into the folder MUTATION_RECORDS."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage


class Recorder:
    def __init__(self) -> None:
        self.files = os.environ["MUTATION_FILES"].split(os.pathsep)
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self.coverage = Coverage(data_file=None, include=self.files, config_file=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.coverage.switch_context(item.nodeid)
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.perf_counter() - start
            self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        lines = {file: self.coverage.get_data().contexts_by_lineno(file) for file in self.files}
        text = json.dumps({"lines": lines, "seconds": self.seconds, "failed": self.failed})
        (Path(os.environ["MUTATION_RECORDS"]) / f"{os.getpid()}.json").write_text(text)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder())
