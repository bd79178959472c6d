"""The workflow of a public repository: it calls targets and files that exist, on every Python that
the package names. It cannot run here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_every_command_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    steps = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
    for step in steps:
        command, *words = step.split()
        if command == "make":
            assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE), step
        elif command != "sudo":
            assert (ROOT / command).is_file(), step
    assert "make test" in steps


def test_it_runs_on_every_python_that_the_package_names() -> None:
    pythons = JOBS["test"]["strategy"]["matrix"]["python"]
    project = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={pythons[0]}"' in project
    assert [int(python.split(".")[1]) for python in pythons] == [*range(10, 10 + len(pythons))]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_of_issues(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in form["body"])
    assert "qfx info" in path.read_text()


def test_the_citation_names_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f'version = "{citation["version"]}"' in (ROOT / "pyproject.toml").read_text()
