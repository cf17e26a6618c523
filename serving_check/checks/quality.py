"""How far the artifact may be from its baseline on held-out text; the measuring is `..quality`."""

import math

from ..quality import Comparison
from ..settings import Bounds
from ..verdict import CheckResult, finite

NAME = "quality"


def check_quality(comparison: Comparison, bounds: Bounds) -> CheckResult:
    """Mean KL, extra nats per token and top-1 agreement, each within its bound."""
    extra = comparison.extra_nats_per_token
    problems = []
    if not all(map(math.isfinite, (comparison.mean_kl, comparison.nats_per_token))):
        problems.append("its logits are not finite: NaN or Inf in the weights, or an overflow in a kernel")
    else:
        if comparison.mean_kl > bounds.max_mean_kl:
            problems.append(f"mean KL {comparison.mean_kl:.4f} is above {bounds.max_mean_kl:g}")
        if extra > bounds.max_extra_nats:
            problems.append(f"{extra:.4f} extra nats per token are above {bounds.max_extra_nats:g}")
        if comparison.top1_agreement < bounds.min_top1_agreement:
            problems.append(
                f"top-1 agreement {comparison.top1_agreement:.1%} is below {bounds.min_top1_agreement:.0%}"
            )
    advice = "; quantize with smaller groups, or keep the layers with the largest errors unquantized"
    return CheckResult(
        name=NAME,
        status="fail" if problems else "pass",
        measured=(
            f"mean KL {comparison.mean_kl:.4f}, {extra:+.4f} nats per token, "
            f"top-1 agreement {comparison.top1_agreement:.1%}"
        ),
        bound=(
            f"KL at most {bounds.max_mean_kl:g}, at most {bounds.max_extra_nats:+g} nats per token, "
            f"top-1 agreement at least {bounds.min_top1_agreement:.0%}"
        ),
        reason=(
            "; ".join(problems) + advice
            if problems
            else f"exact over the whole vocabulary, on {comparison.tokens} held-out tokens"
        ),
        figures={
            "tokens": comparison.tokens,
            "nats_per_token": finite(comparison.nats_per_token),
            "baseline_nats_per_token": finite(comparison.baseline_nats_per_token),
            "extra_nats_per_token": finite(extra),
            "mean_kl": finite(comparison.mean_kl),
            "p99_kl": finite(comparison.p99_kl),
            "max_kl": finite(comparison.max_kl),
            "top1_agreement": comparison.top1_agreement,
        },
    )
