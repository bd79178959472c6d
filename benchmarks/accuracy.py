"""What int8 does to trained models: settings of qfx against the float model, on real data.

SmolLM2-135M on news texts: mean divergence (KL) of the next-token distribution from float, how
often the likeliest token is the same (top-1), perplexity, and questions for capitals that it
answers rightly. MiniLM: correlation with human judgement of texts and words. A vision transformer
trained here on 8x8 digits: accuracy and negative log likelihood. Every linear is int8 whatever it
costs, and attention where it gains. Divergence resolves more than perplexity, of which 0.5 % are
noise at this size.
    python -m benchmarks.accuracy [--models smollm,...] [--settings w8a8,...] [--save]
    python -m benchmarks.accuracy --models smollm --calibrate w8a8,w7a7,w8a8-static,w8a8:gptq
    python -m benchmarks.accuracy --options '{"recipe": "smollm.json"}'    one more setting
Once: pip install -c constraints.txt gguf
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import qfx._C as _C
import torch
from tabulate import tabulate
from torch import fx

import qfx
from benchmarks.common import compiled_apart, machine, merge
from benchmarks.judged import JUDGED, Judged
from benchmarks.models import names
from qfx.cost.chosen import chosen_costs
from qfx.graph.capture import clone
from qfx.pipeline import Context, run_passes
from qfx.plan.plan import Plan
from qfx.values.config import parse_options
from qfx.values.scheme import Scheme

FLOAT = "float"
ALL = {"minimum_gain": 0, "inner": "eager"}  # the numbers are the operators', whoever calls them
SCHEMES = ("w8a8-groups", "w8a8-asymmetric", "w8a8-symmetric", "w7a7", "w4a8")
SETTINGS: dict[str, dict[str, Any]] = {
    "w8a8": {},
    "w8a8-unsmoothed": {"smoothing": False},
    "rotated-symmetric": {"scheme": Scheme(rotation=64)},
    **{name: {"scheme": name} for name in SCHEMES},
}
KEY = ("model", "setting", "isa")
Row = dict[str, Any]


def figures(judged: Judged, options: Mapping[str, Any]) -> Row:
    """What `judged` says of its model compiled with `options`, and the schemes the sites got."""
    config, _ = parse_options({**ALL, **options})
    plans: list[Plan] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        context = Context(config, chosen_costs(), around=None)
        plans.append(run_passes(clone(gm), context, "decide").plan)
        return qfx.backend(gm, inputs, options={**ALL, **options})

    with torch.no_grad():
        run = compiled_apart(judged.model, backend)
        found = judged.judge([run(*inputs) for inputs in judged.inputs])
    torch._dynamo.reset()
    assert len(plans) == len(judged.inputs), f"{len(plans)} graphs, of {len(judged.inputs)} shapes"
    return {**found, "schemes": _schemes(plans[0])}


@torch.no_grad()
def calibrated(judged: Judged, how: str) -> tuple[dict[str, Any], Row]:
    """Options with a recipe for this scheme, with codes if a rounding stands behind a colon, and
    the seconds it took."""
    scheme, _, rounding = how.partition(":")
    config, started = qfx.Config(scheme=scheme, minimum_gain=0), time.perf_counter()
    recipe = qfx.calibrate(judged.model, judged.batches, config, rounding=rounding or "nearest")
    torch._dynamo.reset()  # or the shapes of the batches would be remembered
    return {"recipe": recipe}, {"calibration s": round(time.perf_counter() - started, 1)}


def _schemes(plan: Plan) -> str:
    counts = Counter(str(entry.scheme or FLOAT) for entry in plan.entries)
    return ", ".join(f"{count} {scheme}" for scheme, count in counts.most_common())


def measure(
    name: str, settings: Mapping[str, Mapping[str, Any]], calibrate: Sequence[str] = ()
) -> list[Row]:
    """The float model's row, then one for each of `settings`, and of the schemes to calibrate."""
    judged = JUDGED[name]()
    rows = [{"model": name, "setting": FLOAT, **judged.judge(judged.expected)}]
    for setting, options in settings.items():
        rows.append({"model": name, "setting": setting, **figures(judged, options)})
        print(rows[-1], flush=True)
    for how in calibrate:
        options, spent = calibrated(judged, how)
        setting = " ".join([how.partition(":")[0], "calibrated", *how.split(":")[1:]])
        rows.append({"model": name, "setting": setting, **figures(judged, options), **spent})
        print(rows[-1], flush=True)
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default=",".join(JUDGED))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument(
        "--options", action="append", default=[], help="JSON: options of one more setting"
    )
    parser.add_argument(
        "--calibrate",
        default="",
        help="schemes, as w8a8 or w8a8:gptq, for models with texts to spare",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    chosen = {name: SETTINGS[name] for name in names(options.settings, SETTINGS)}
    settings = {**chosen, **{text: json.loads(text) for text in options.options}}
    host = machine()
    for name in names(options.models, JUDGED):
        rows = measure(name, settings, [s for s in options.calibrate.split(",") if s])
        print(tabulate(rows, headers="keys"), flush=True)
        if options.save:
            saved = [{**row, "isa": _C.isa(), "commit": host["commit"]} for row in rows]
            print(f"wrote {merge('accuracy', saved, KEY)}")


if __name__ == "__main__":
    main()
