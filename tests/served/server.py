"""A server of vLLM in a process of its own, and a client that asks it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

NAME, LENGTH = "smollm2", 512
START_S = 600  # of a machine that does much else; ends a process that hangs


class Server:
    """The server at `port`; `log` is the file of what it writes."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.url, self.log = process, f"http://127.0.0.1:{port}", log
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def ask(self, prompt: str, **options: Any) -> Any:
        """Returns the most probable completion, of 16 tokens, or the stream of its pieces."""
        options = {"model": NAME, "temperature": 0, "max_tokens": 16, **options}
        return self.client.completions.create(prompt=prompt, **options)

    def metric(self, name: str) -> float:
        """Returns a number of those that the server shows to Prometheus."""
        with urllib.request.urlopen(f"{self.url}/metrics") as page:
            (found,) = re.findall(rf"^vllm:{name}{{.*}} (\S+)$", page.read().decode(), re.M)
        return float(found)

    def answers_health(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health") as page:
                return page.status == 200
        except (urllib.error.URLError, ConnectionError):
            return False

    def check_alive(self) -> None:
        code = self.process.poll()
        assert code is None, f"the server ended with {code}:\n{self.log.read_text()}"


@contextmanager
def started(model: Path, log: Path) -> Iterator[Server]:
    """A server of the model in bfloat16, whose weights become int8."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "model": model, "served-model-name": NAME, "quantization": "qfx", "dtype": "bfloat16",
        "host": "127.0.0.1", "port": port, "max-model-len": LENGTH, "max-num-seqs": 8,
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        server, until = Server(process, port, log), time.monotonic() + START_S
        while not server.answers_health():
            server.check_alive()
            assert time.monotonic() < until, f"the server does not start:\n{log.read_text()}"
            time.sleep(0.5)
        yield server
        server.check_alive()
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process, then those that it started and left."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
