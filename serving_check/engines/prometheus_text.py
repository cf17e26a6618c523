"""Reading Prometheus' text format, and the few series that the check looks at, under any vLLM-like server."""

import re

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\.")
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


def parse_metrics(text: str) -> dict[str, float]:
    """Sample name with its labels as written (`vllm:num_requests_running{model_name="m"}`) to its value."""
    samples = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            try:
                samples[name] = float(value)
            except ValueError:
                continue
    return samples


def total(samples: dict[str, float], metric: str) -> float | None:
    """The sum of `metric` over all its label sets; None where it is absent.

    A counter may be asked for with or without its `_total` ending.
    """
    wanted = {metric, metric.removesuffix("_total"), metric + "_total"}
    values = [value for name, value in samples.items() if name.partition("{")[0] in wanted]
    return sum(values) if values else None


def labels_of(sample: str) -> dict[str, str]:
    """The labels in a sample's name, as they were before they were escaped."""
    return {
        name: _ESCAPED.sub(lambda match: _ESCAPES.get(match[0], match[0]), value)
        for name, value in _LABEL.findall(sample)
    }


def by_label(samples: dict[str, float], metric: str, label: str) -> dict[str, float]:
    """`metric` summed by the value of one label."""
    sums: dict[str, float] = {}
    for name, value in samples.items():
        if name.partition("{")[0] == metric and (key := labels_of(name).get(label)) is not None:
            sums[key] = sums.get(key, 0.0) + value
    return sums
