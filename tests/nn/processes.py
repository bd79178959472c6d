"""Runs a function in processes that talk to each other by gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.lib.fresh_process import FORKS


def in_processes(function: Callable[[Any], None], count: int = 2) -> None:
    """Calls it in `count` processes, one thread each, with their mesh. Raises what one raised."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    how = (port, count, function), count
    torch.multiprocessing.start_processes(_run, *how, start_method=FORKS.get_start_method())  # type: ignore[no-untyped-call]


def _run(rank: int, port: int, count: int, function: Callable[[Any], None]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    dist.init_process_group("gloo", rank=rank, world_size=count)
    function(init_device_mesh("cpu", (count,)))
    dist.barrier()  # nobody leaves while others send
    dist.destroy_process_group()
    # Of float models without qfx, too, one process in some 150 aborts when Python ends after gloo
    # ("terminate called without an active exception"): what was to be tested has passed by then.
    os._exit(0)
