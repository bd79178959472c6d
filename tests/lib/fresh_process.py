"""Runs Python code in a new process that finds PyTorch imported.

Importing torch and Inductor takes four seconds of a processor. The tests that need a process of
their own fork it from one that has imported them, and qfx itself is imported anew in each. A test
of what is imported, or of environment variables that PyTorch reads when it is imported, starts an
interpreter of its own instead.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

PRELOADED = ["torch._dynamo", "torch._inductor.compile_fx", "transformers"]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(PRELOADED)


def run_python(
    code: str | Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    seconds: float = 300,
    warnings_of: str | None = None,
) -> CompletedProcess[str]:
    """Runs source text, or a script by its path, as `__main__`, and returns what it printed.

    `environment` is added to that of the tests; `folder` is the current directory. Warnings whose
    message begins with `warnings_of` are errors. After `seconds` the process is killed.
    """
    with tempfile.TemporaryDirectory() as outputs:
        files = [str(Path(outputs, name)) for name in ("stdout", "stderr")]
        everything = {**os.environ, **(environment or {})}
        how = (code, arguments, everything, folder, files, warnings_of)
        process = FORKS.Process(target=_run, args=how)  # type: ignore[attr-defined]
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
        printed = [Path(file).read_text(errors="replace") for file in files]
    return CompletedProcess([str(code), *arguments], process.exitcode or 0, *printed)


def _run(
    code: str | Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path | None,
    files: Sequence[str],
    warnings_of: str | None,
) -> None:
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder or os.getcwd())
    multiprocessing.set_start_method(None, force=True)  # what a script begins with
    if warnings_of is not None:
        warnings.filterwarnings("error", message=warnings_of)
    sys.argv = [str(code) if isinstance(code, Path) else "-c", *arguments]
    status = 1
    try:
        _execute(code)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)


def _execute(code: str | Path) -> None:
    if isinstance(code, Path):
        runpy.run_path(str(code), run_name="__main__")
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(code, "<string>", "exec"), main.__dict__)
