"""What a recipe makes of a checkpoint: for every tensor, in file order, whether it is quantized, and how.

Decided before any weight is read, so that a recipe that does not fit is refused at once.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ...layouts.errors import UserError
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.float_source import is_scale, refuse_unreadable, scale_of
from ..recipe import KEEP, Recipe, matches
from .linear_weights import (
    EMBEDDING,
    LM_HEAD,
    ROUTER,
    UNKNOWN,
    LinearWeight,
    ModelWeights,
    find_linear_weights,
)

NAMES_IN_AN_ERROR = 4
FALLBACK_GROUP_SIZES = (128, 64, 32, 16)


@dataclass(frozen=True)
class WeightTask:
    """One thing to write: a quantized linear, a linear sliced out unquantized, or a tensor copied as it is.

    tensor:     the checkpoint tensor it is made from
    linear:     the linear weight, None for a whole tensor copied under its own name
    group_size: None where it stays unquantized
    """

    tensor: str
    linear: LinearWeight | None = None
    group_size: int | None = None


@dataclass(frozen=True)
class QuantizationTasks:
    """Every task in the order of the files, and what the result's config has to say."""

    tasks: list[WeightTask]
    kept: dict[str, list[str]]
    """Tensors and modules that stay unquantized, by the reason."""
    ignore: list[str]
    """Linear modules that stay unquantized, as the quantization config names them."""
    untied: bool
    """The output projection gets weights of its own, and the config has to say so."""

    @property
    def group_sizes(self) -> dict[str, int]:
        return {task.linear.module: task.group_size for task in self.tasks if task.linear and task.group_size}

    @property
    def embeddings(self) -> list[str]:
        """Quantized modules that are embeddings."""
        linears = [task.linear for task in self.tasks if task.linear and task.group_size]
        return [linear.module for linear in linears if linear.role == EMBEDDING]


def make_plan(checkpoint: Checkpoint, recipe: Recipe) -> QuantizationTasks:
    """Apply `recipe` to `checkpoint`. UserError for an idle pattern or a K that does not fit."""
    weights = find_linear_weights(checkpoint)
    linears = {weight.module: weight for group in weights.linears.values() for weight in group}
    head = weights.tied_lm_head
    untied = head is not None and recipe.lm_head != KEEP
    if head is not None and untied:
        linears[head.module] = head
    _refuse_idle_patterns(recipe, linears.values())
    decisions = {module: _decide(recipe, weight) for module, weight in linears.items()}
    chosen = {module: size for module, size in decisions.items() if isinstance(size, int)}
    if not chosen:
        raise UserError(
            f"{checkpoint.source}: the recipe {recipe.name!r} leaves nothing to quantize in this "
            f"{checkpoint.model_type} model; it has {len(linears)} linear weights"
        )
    for module, size in chosen.items():
        _check_fit(checkpoint, linears[module], size)
    tasks, kept = _order(checkpoint, weights, decisions)
    if head is not None and untied:
        tasks.append(WeightTask(head.tensor, head, chosen[head.module]))
    unquantized = [m for m, weight in linears.items() if m not in chosen and weight.role != EMBEDDING]
    if head is not None and not untied:
        unquantized.append(head.module)
    return QuantizationTasks(tasks, kept, unquantized, untied)


def _decide(recipe: Recipe, weight: LinearWeight) -> int | str:
    """The group size `weight` gets, or the reason it stays as it is."""
    names = {weight.module, weight.tensor}
    if any(matches(pattern, name) for pattern in recipe.ignore for name in names):
        return "ignored by the recipe"
    rule = next((r for r in recipe.rules if any(matches(r.modules, name) for name in names)), None)
    if rule is not None and rule.ignore:
        return "ignored by the recipe"
    if weight.role == ROUTER:
        return "router, never quantized"
    if weight.role == LM_HEAD and recipe.lm_head == KEEP:
        return "lm_head, kept by the recipe"
    if weight.role == EMBEDDING and recipe.embeddings == KEEP:
        return "embedding, kept by the recipe"
    special = weight.role in (LM_HEAD, EMBEDDING)
    if recipe.include and not special and not any(matches(p, n) for p in recipe.include for n in names):
        return "not included by the recipe"
    if weight.role == UNKNOWN:
        raise UserError(
            f"{weight.tensor} holds fused experts in an order that is not known here; "
            f"to keep it unquantized, add it to the recipe's `ignore`"
        )
    return rule.group_size if rule is not None and rule.group_size else recipe.group_size


def _refuse_idle_patterns(recipe: Recipe, linears: Iterable[LinearWeight]) -> None:
    linears = list(linears)
    quantizable = [weight for weight in linears if weight.role != ROUTER]
    sized = [rule.modules for rule in recipe.rules if not rule.ignore]
    ignored = [*recipe.ignore, *(rule.modules for rule in recipe.rules if rule.ignore)]
    for what, patterns, candidates in (
        ("include", recipe.include, quantizable),
        ("rules", sized, quantizable),
        ("ignore", ignored, linears),
    ):
        for pattern in patterns:
            if any(
                matches(pattern, weight.module) or matches(pattern, weight.tensor) for weight in candidates
            ):
                continue
            routers = [w.module for w in linears if w.role == ROUTER and matches(pattern, w.module)]
            if routers:
                raise UserError(
                    f"the recipe's `{what}` pattern {pattern!r} matches only routers ({routers[0]}), "
                    "which are never quantized"
                )
            raise UserError(
                f"the recipe's `{what}` pattern {pattern!r} matches no linear module of this model; "
                f"its modules are called: {', '.join(_kinds(candidates))}"
            )


def _kinds(linears: Iterable[LinearWeight]) -> list[str]:
    """Module names with the numbers of layers and experts left out, the most frequent first."""
    kinds = Counter(
        ".".join("*" if part.isdigit() else part for part in weight.module.split(".")) for weight in linears
    )
    return [kind for kind, _ in kinds.most_common()]


def _check_fit(checkpoint: Checkpoint, weight: LinearWeight, group_size: int) -> None:
    refuse_unreadable(checkpoint, weight.tensor)
    if weight.k % group_size == 0:
        return
    fits = [str(size) for size in FALLBACK_GROUP_SIZES if weight.k % size == 0]
    kind = next(iter(_kinds([weight])))
    advice = f"a rule `modules: '{kind}'` with `group_size: {fits[0]}`" if fits else f"`ignore: ['{kind}']`"
    raise UserError(
        f"{weight.module} has K = {weight.k}, which group size {group_size} does not divide; "
        f"give the recipe {advice}"
    )


def _order(
    checkpoint: Checkpoint, weights: ModelWeights, decisions: dict[str, int | str]
) -> tuple[list[WeightTask], dict[str, list[str]]]:
    tasks: list[WeightTask] = []
    kept: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        if is_scale(checkpoint, name):
            continue
        linears = weights.linears.get(name, [])
        choices = [decisions[weight.module] for weight in linears]
        if not linears:
            kept.setdefault(weights.others[name], []).append(name)
        for weight, choice in zip(linears, choices, strict=True):
            if isinstance(choice, str):
                kept.setdefault(choice, []).append(weight.module)
        if any(isinstance(choice, int) for choice in choices):
            tasks += [
                WeightTask(name, weight, choice if isinstance(choice, int) else None)
                for weight, choice in zip(linears, choices, strict=True)
            ]
        else:
            scale_of(checkpoint, name)
            tasks.append(WeightTask(name))
    return tasks, kept
