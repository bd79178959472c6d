"""Whole networks of convolutions and recurrent layers: float32, qfx, and the peers that are
installed, with random weights and with real ones.

As in benchmarks/models.py all candidates of a network are timed in turns in one process, and one
that does not run is a row with the reason.
The peers: pip install -c constraints.txt --no-build-isolation -e '.[peers]'
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from benchmarks.common import keep_memory
from benchmarks.models import below, measure
from benchmarks.network_models import IMAGE, RANDOM, RECURRENT, TRANSFORMER
from benchmarks.network_peers import ways
from benchmarks.question import Question, Row, chosen
from benchmarks.results_cells import BASELINE
from benchmarks.trained_networks import TRAINED

TABLE = {subject.name: subject for subject in (*RANDOM, *TRAINED)}
WAYS = list(ways((IMAGE, RECURRENT, TRANSFORMER)))


def tables(options: Namespace) -> Iterator[list[Row]]:
    keep_memory()
    kept = {BASELINE, *chosen(options.candidates, WAYS)}
    for name in chosen(options.models, TABLE):
        subject = TABLE[name]
        used = {n: way for n, way in ways(subject.traits).items() if n in kept}
        yield measure(subject, used, options.rounds, judge=subject.judge)


QUESTION = Question(
    "How fast are whole networks of convolutions and recurrent layers, compared with others?",
    tables,
    key=("model", "candidate"),
    options={"models": list(TABLE), "candidates": WAYS},
    rounds=7,
    below=below,
)
