"""The accuracy of trained models in int8: settings of qfx against the float model, on real data.

SmolLM2-135M on news texts: mean divergence (KL) of the next-token distribution from float, how
often the likeliest token is the same (top-1), perplexity, and correct answers to questions about
capitals. Whisper base on speech: the same divergence, after the tokens that the float model
transcribed. MiniLM and all-mpnet-base-v2: 1 - cosine to the float embedding, and correlation with
human judgement of texts and words. A vision transformer trained here on 8x8 digits: accuracy and
negative log likelihood. Every linear is int8 whatever its speed, and attention if it gains.
Divergence resolves smaller differences than perplexity, of which 0.5 % are noise at this size.
    python -m benchmarks.accuracy --save                 all of it, into docs/results.md
    python -m benchmarks.accuracy --models smollm,mpnet --settings plain
    python -m benchmarks.accuracy --settings w8a8,w7a7   of benchmarks/settings.py
    python -m benchmarks.accuracy --options '{"recipe": "smollm.json"}'    one more setting
Once: pip install -c constraints.txt gguf; the models and texts are 1.1 GB in the cache folder.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import qfx._C as _C
import torch
from tabulate import tabulate
from torch import fx

import qfx
from benchmarks import results_page
from benchmarks.common import compiled_apart, machine, merge
from benchmarks.judged import Judged, images, language
from benchmarks.judged_encoders import base, small
from benchmarks.judged_speech import speech
from benchmarks.models import names
from benchmarks.settings import PLAIN, SETTINGS, Setting
from qfx.cost.device_models import current_costs
from qfx.graph.capture import clone
from qfx.pipeline import Context, run_passes
from qfx.plan.plan import Plan
from qfx.values.config import parse_options

FLOAT = "float"
ALL = {"minimum_gain": 0, "inner": "eager"}  # the numbers are the operators', whoever calls them
JUDGED: dict[str, Callable[[], Judged]] = {
    "smollm": language,
    "whisper": speech,
    "minilm": small,
    "mpnet": base,
    "digits": images,
}
KEY = ("model", "setting", "isa")
Row = dict[str, Any]


def figures(judged: Judged, options: Mapping[str, Any]) -> Row:
    """Returns the scores of the model compiled with `options`, and the schemes of its sites."""
    config, _ = parse_options({**ALL, **options})
    plans: list[Plan] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        context = Context(config, current_costs(), around=None)
        plans.append(run_passes(clone(gm), context, "decide").plan)
        return qfx.backend(gm, inputs, options={**ALL, **options})

    with torch.no_grad():
        run = compiled_apart(judged.model, backend)
        found = judged.judge([run(*inputs) for inputs in judged.inputs])
    torch._dynamo.reset()
    assert len(plans) == len(judged.inputs), f"{len(plans)} graphs, of {len(judged.inputs)} shapes"
    return {**found, "schemes": _schemes(plans[0])}


@torch.no_grad()
def calibrated(judged: Judged, setting: Setting) -> tuple[dict[str, Any], Row]:
    """Returns options with the recipe of a calibration, and the processor seconds that it took,
    which do not depend on other processes."""
    config, started = qfx.Config(**setting.options, minimum_gain=0), time.process_time()
    how = {"rounding": setting.rounding, **setting.asked}
    recipe = qfx.calibrate(judged.model, judged.batches, config, **how)
    torch._dynamo.reset()  # or the shapes of the batches would be remembered
    return {"recipe": recipe}, {"calibration s": round(time.process_time() - started, 1)}


def _schemes(plan: Plan) -> str:
    counts = Counter(str(entry.scheme or FLOAT) for entry in plan.entries)
    return ", ".join(f"{count} {scheme}" for scheme, count in counts.most_common())


def measure(name: str, settings: Mapping[str, Setting]) -> list[Row]:
    """Returns the float model's row, then one for each of `settings`. Calibrated ones are left out
    if the model has no inputs to spare."""
    judged = JUDGED[name]()
    rows = [{"model": name, "setting": FLOAT, **judged.judge(judged.expected)}]
    for label, setting in settings.items():
        options, spent = dict(setting.options), Row()
        if setting.rounding and not judged.batches:
            continue
        if setting.rounding:
            options, spent = calibrated(judged, setting)
        rows.append({"model": name, "setting": label, **figures(judged, options), **spent})
        print(rows[-1], flush=True)
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default=",".join(JUDGED))
    parser.add_argument(
        "--settings", default=",".join(SETTINGS), help="or plain: no calibrated one"
    )
    parser.add_argument(
        "--options", action="append", default=[], help="JSON: options of one more setting"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write results and their page")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    asked = PLAIN if options.settings == "plain" else names(options.settings, SETTINGS)
    settings = {name: SETTINGS[name] for name in asked}
    settings |= {text: Setting(json.loads(text)) for text in options.options}
    host = machine()
    for name in names(options.models, JUDGED):
        rows = measure(name, settings)
        print(tabulate(rows, headers="keys"), flush=True)
        if options.save:
            more = {"isa": _C.isa(), "commit": host["commit"], "threads": options.threads}
            print(f"wrote {merge('accuracy', [{**row, **more} for row in rows], KEY)}")
            results_page.write()


if __name__ == "__main__":
    main()
