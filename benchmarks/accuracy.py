"""The accuracy of trained models in int8: settings of qfx against the float model, on real data.

SmolLM2-135M on news texts: mean divergence (KL) of the next-token distribution from float, how
often the likeliest token is the same (top-1), perplexity, and correct answers to questions about
capitals. MiniLM and all-mpnet-base-v2: 1 - cosine to the float embedding, and correlation with
human judgement of texts and words. A vision transformer trained here on 8x8 digits: accuracy and
negative log likelihood. Every linear is int8 whatever its speed, and attention if it gains.
Divergence resolves smaller differences than perplexity, of which 0.5 % are noise at this size.
    python -m benchmarks accuracy --models smollm,mpnet --settings w8a8,w7a7
    python -m benchmarks accuracy --more '{"recipe": "smollm.json"}'    options of one more setting
Once: pip install -c constraints.txt gguf; the models and texts are 1 GB in the cache folder.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

import qfx
import qfx._C as _C
from benchmarks.common import compiled_apart
from benchmarks.judged import Judged, images, language
from benchmarks.judged_encoders import base, small
from benchmarks.question import Question, Row, chosen
from benchmarks.settings import SETTINGS, Setting
from qfx.cost.device_models import current_costs
from qfx.graph.capture import clone
from qfx.pipeline import Context, run_passes
from qfx.plan.plan import Plan
from qfx.values.config import parse_options

FLOAT = "float"
ALL = {"minimum_gain": 0, "inner": "eager"}  # the numbers are the operators', whoever calls them
JUDGED: dict[str, Callable[[], Judged]] = {
    "smollm": language,
    "minilm": small,
    "mpnet": base,
    "digits": images,
}


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
    schemes = Counter(str(entry.scheme or FLOAT) for entry in plans[0].entries)
    return {**found, "schemes": ", ".join(f"{n} {scheme}" for scheme, n in schemes.most_common())}


@torch.no_grad()
def calibrated(judged: Judged, setting: Setting) -> tuple[dict[str, Any], Row]:
    """Returns options with the recipe of a calibration, and the processor seconds that it took,
    which do not depend on other processes."""
    config, started = qfx.Config(**setting.options, minimum_gain=0), time.process_time()
    how = {"rounding": setting.rounding, **setting.asked}
    recipe = qfx.calibrate(judged.model, judged.batches, config, **how)
    torch._dynamo.reset()  # or the shapes of the batches would be remembered
    return {"recipe": recipe}, {"calibration s": round(time.process_time() - started, 1)}


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
    return [{**row, "isa": _C.isa()} for row in rows]


def tables(options: Namespace) -> Iterator[list[Row]]:
    settings = {name: SETTINGS[name] for name in chosen(options.settings, SETTINGS)}
    if options.more:
        settings[options.more] = Setting(json.loads(options.more))
    for name in chosen(options.models, JUDGED):
        yield measure(name, settings)


QUESTION = Question(
    "How exact are trained models in int8?",
    tables,
    key=("model", "setting", "isa"),
    options={"models": list(JUDGED), "settings": list(SETTINGS), "more": ""},
)
