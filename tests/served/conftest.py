"""What the tests of vLLM itself need. `make vllm` runs them, in an environment of their own, and
without tests/conftest.py, which needs what is not in it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# The engine runs in this process, whose counters the tests read.
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)
NEEDED = ("vllm", "transformers", "openai")


def pytest_configure() -> None:
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise pytest.UsageError(
            f"tests/served runs in an environment with vLLM, and this one has no "
            f"{', '.join(missing)}: make vllm"
        )


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Graphs that vLLM compiled in an earlier run are not found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm")))
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama."""
    from tests.served import models  # once it is known that transformers is there

    return models.written(models.LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny mixture of experts."""
    from tests.served import models

    return models.written(models.OLMOE, tmp_path_factory.mktemp("olmoe"))
