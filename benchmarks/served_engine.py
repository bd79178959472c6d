"""An engine of vLLM that answers lines of JSON, run by benchmarks/served.py in an environment that
has vLLM: first the arguments of `vllm.LLM`, then prompts and a number of new tokens."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

_MB = 1024  # KB


def resident_mb() -> float:
    """Returns the resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / _MB


def generated(engine: Any, prompts: list[list[int]], new: int) -> dict[str, float]:
    """Returns the seconds that the requests take together, and the median of those to the first
    token."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    start = time.perf_counter()
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
    seconds = time.perf_counter() - start
    first = median(output.metrics.first_token_latency for output in outputs)
    return {"seconds": seconds, "first_s": first, "mb": resident_mb()}


def main() -> None:
    from vllm import LLM

    given = json.loads(sys.stdin.readline())
    engine = LLM(
        **given, max_num_seqs=32, enable_prefix_caching=False,
        disable_log_stats=False,
    )  # fmt: skip
    print("#", json.dumps({"mb": resident_mb()}), flush=True)
    for line in sys.stdin:
        print("#", json.dumps(generated(engine, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
