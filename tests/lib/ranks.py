"""Processes joined by gloo, for tests of distributed execution."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from qfx.cost.device_models import costs_from
from tests.lib.fresh_process import FORKS

RANKS = 2


class Ranks:
    """RANKS processes joined by gloo, which run functions of modules. They start at their first use
    and again after a failure; no call takes longer than its limit."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = 600) -> list[Any]:
        """Returns the result of `function(*arguments)` on each rank. Raises RuntimeError with the
        traceback of the first rank that failed, and TimeoutError after `seconds`."""
        if not self._processes:
            self._start()
        try:
            for connection in self._connections:
                connection.send((function, arguments))
            return self._results(time.monotonic() + seconds)
        except BaseException:
            self._kill()
            raise

    def _start(self) -> None:
        # the operating system chooses the port
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = FORKS
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            arguments = (rank, self._store.port, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _results(self, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < RANKS:
            left = deadline - time.monotonic()
            missing = [c for i, c in enumerate(self._connections) if i not in results]
            ready = wait(missing, max(left, 0))
            if not ready:
                raise TimeoutError(f"rank {list(set(range(RANKS)) - set(results))} did not answer")
            for connection in ready:
                rank = self._connections.index(connection)
                results[rank] = self._received(rank)
        return [results[rank] for rank in range(RANKS)]

    def _received(self, rank: int) -> Any:
        try:
            result, error = pickle.loads(self._connections[rank].recv_bytes())
        except EOFError:
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode
            raise RuntimeError(f"rank {rank} died with exit code {code}") from None
        if error:
            raise RuntimeError(f"rank {rank} failed:\n{error}")
        return result

    def stop(self) -> None:
        """Lets the processes end by themselves, and kills them after ten seconds."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []


def _serve(rank: int, port: int, connection: Connection) -> None:
    from tests.lib.costs import FIXED_COSTS

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:  # the tests are over
            return dist.destroy_process_group()
        try:
            with costs_from(FIXED_COSTS):
                answer = (function(*arguments), "")
        except BaseException:
            answer = (None, traceback.format_exc())
        torch._dynamo.reset()
        connection.send_bytes(pickle.dumps(answer))
