"""A recipe applied to a checkpoint: for every tensor, in file order, whether and how it is quantized.

Every tensor's treatment is decided before any weight is read, so that a recipe that does not fit is refused
at once.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ....base.errors import UserError
from ....layouts.formats.unquantized import Unquantized
from ....layouts.formats.weight_format import WeightFormat, parameters
from ....serving_check.engine.options import UNQUANTIZED as KV_UNQUANTIZED
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.float_source import is_scale, refuse_unreadable, scale_of
from ...conventions.kv_cache import SCALE as KV_SCALE
from ...model_loader.linear_weights import (
    BIAS,
    EMBEDDING,
    LM_HEAD,
    NOT_LINEAR,
    ROUTER,
    UNKNOWN,
    ExpertBias,
    LinearWeight,
    ModelWeights,
    find_linear_weights,
)
from ...model_loader.reader_names import WEIGHT, names_of_unquantized, other_names
from ...records.recipe import Recipe, Rule, matches
from ...records.recipe_fields import EXACT, KEEP, NEAREST
from ...records.recipe_file import load_recipe, shipped_recipes

IGNORED = "ignored by the recipe"
KEPT = "kept, since "
SMALLEST = 32
"""The fewest inputs and outputs that vLLM's INT4 kernel for CPUs takes (`CPUWNA16LinearKernel`). Quantizing a
smaller layer would save nothing."""
MERGED = ("q_proj", "k_proj", "v_proj")
"""Layers that engines load as one, so that their outputs are counted together."""
BESIDE_EXPERTS = "transformers reads no zero points of experts"
UNQUANTIZED = Unquantized()


@dataclass(frozen=True)
class WeightTask:
    """One thing to write: a quantized linear weight, an unquantized slice (linear weight or bias), or a
    copied tensor.

    tensor: the checkpoint tensor it is made from
    linear: the linear weight, None for a whole tensor copied under its own name, or a bias
    spec:   the format in which it is written; Unquantized if it stays as it is
    bias:   a single expert's bias
    """

    tensor: str
    linear: LinearWeight | None = None
    spec: WeightFormat = UNQUANTIZED
    bias: ExpertBias | None = None

    @property
    def is_quantized(self) -> bool:
        return not isinstance(self.spec, Unquantized)

    @property
    def written_name(self) -> str:
        """Return the name of the tensor that the task writes if it stays unquantized."""
        if self.bias is not None:
            return self.bias.name
        return f"{self.linear.module}.weight" if self.linear else self.tensor


@dataclass(frozen=True)
class QuantizationTasks:
    """Every task in the order of the files, and the quantization entries of the artifact's config."""

    in_order: list[WeightTask]
    kept: dict[str, list[str]]
    """Tensors and modules that stay unquantized, by the reason."""
    ignore: list[str]
    """Every linear module that stays unquantized, by each name that a reader may know it by."""
    other_names: dict[str, str]
    """Names of quantized modules in other readers, each with the checkpoint's name, if the two differ."""
    untied: bool
    """Whether the output projection gets weights of its own, which the config then has to declare."""
    own_head: tuple[str, str] | None = None
    """The tensors of the output projection and of the embeddings; None if they share one tensor."""
    fitted: str = ""
    """One line on layers that cannot have the recipe's format and got another one; empty if there are
    none."""

    @property
    def specs(self) -> dict[str, WeightFormat]:
        """Return the format of each quantized module."""
        return {task.linear.module: task.spec for task in self.in_order if task.linear and task.is_quantized}

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return (N, K) of each quantized module."""
        linears = [task.linear for task in self.in_order if task.linear and task.is_quantized]
        return {linear.module: (linear.n, linear.k) for linear in linears}

    @property
    def embeddings(self) -> list[str]:
        """Return quantized modules that are embeddings."""
        linears = [task.linear for task in self.in_order if task.linear and task.is_quantized]
        return [linear.module for linear in linears if linear.role == EMBEDDING]


def with_whole_biases(tasks: QuantizationTasks) -> QuantizationTasks:
    """Return the tasks with each tensor of all experts' biases copied as it is."""
    in_order = [WeightTask(task.tensor) if task.bias is not None else task for task in tasks.in_order]
    return replace(tasks, in_order=list(dict.fromkeys(in_order)))


def tasks_by_tensor(tasks: Iterable[WeightTask]) -> list[list[WeightTask]]:
    """Return the tasks, in order, with those of one tensor of the checkpoint together."""
    return [list(own) for _, own in groupby(tasks, lambda task: task.tensor)]


def source_bytes(checkpoint: Checkpoint, task: WeightTask) -> int:
    """Return the bytes read to carry out a task."""
    info = checkpoint.tensors[task.tensor]
    if task.bias is not None:
        return info.shape[-1] * info.dtype.itemsize
    return info.nbytes if task.linear is None else task.linear.n * task.linear.k * info.dtype.itemsize


def make_tasks(checkpoint: Checkpoint, recipe: Recipe) -> QuantizationTasks:
    """Apply `recipe`. Raise UserError for a pattern that matches nothing, or a shape that does not fit the
    format."""
    weights = find_linear_weights(checkpoint)
    linears = {weight.module: weight for group in weights.linears.values() for weight in group}
    head = weights.tied_lm_head
    if head is not None and recipe.lm_head != KEEP:
        linears[head.module] = head
    _refuse_idle_patterns(recipe, linears.values(), _all_names(checkpoint, weights))
    decisions = {module: _decide(recipe, weight) for module, weight in linears.items()}
    chosen = {module: choice for module, choice in decisions.items() if not isinstance(choice, str)}
    for module in chosen:
        refuse_unreadable(checkpoint, linears[module].tensor)
    adapted = _for_other_readers(linears, chosen) if recipe.fit == NEAREST else {}
    chosen |= adapted
    decisions |= adapted
    small = {m: _how_small(linears, linears[m]) for m in chosen} if recipe.fit == NEAREST else {}
    unfit = {m: reason for m, s in chosen.items() if (reason := s.refuses(linears[m].n, linears[m].k))}
    if unfit and recipe.fit == EXACT:
        raise _unfit(recipe, [linears[module] for module in unfit], chosen)
    unfit |= {module: reason for module, reason in small.items() if reason is not None}
    fitted = _fitted(linears, chosen, (module for module in unfit if small.get(module) is None))
    for module in unfit:
        chosen.pop(module)
        decisions[module] = fitted.get(module, f"{KEPT}{unfit[module]}")
    chosen |= fitted
    if not chosen and recipe.kv_cache == KV_UNQUANTIZED:
        raise UserError(
            f"{checkpoint.source}: the recipe {recipe.name!r} leaves nothing to quantize in this "
            f"{checkpoint.model_type} model ({_counted(decisions, weights.others)}), and it does not "
            f"quantize keys and values; choose another recipe{_that_fit([linears[m] for m in unfit])}"
        )
    quantized = {linears[module].tensor for module in chosen}
    tasks, kept = _order(checkpoint, weights, decisions)
    if recipe.kv_cache != KV_UNQUANTIZED:
        tasks = [task for task in tasks if not KV_SCALE.search(task.tensor)]
    untied = head is not None and head.module in chosen
    if head is not None and untied:
        tasks.append(WeightTask(head.tensor, head, chosen[head.module]))
    unquantized = [m for m, weight in linears.items() if m not in chosen and weight.role != EMBEDDING]
    if head is not None and head.module not in linears:
        unquantized.append(head.module)
    # The embeddings' tensor, which a quantized copy of a tied head is made from, stays.
    replaced = quantized - ({head.tensor} if head is not None else set())
    outside = names_of_unquantized(checkpoint, weights.readers, replaced, chosen.keys())
    by_tensor = {linears[module].tensor: module for module in chosen if linears[module].expert is None}
    return QuantizationTasks(
        tasks,
        kept,
        list(dict.fromkeys([*unquantized, *outside])),
        other_names(weights.readers, by_tensor),
        untied,
        _own_head(linears.values()),
        _said(dict.fromkeys(adapted, BESIDE_EXPERTS) | unfit, adapted | fitted),
    )


def _counted(decisions: Mapping[str, WeightFormat | str], others: Mapping[str, str]) -> str:
    """Return how many linear weights stay for which reason, and the number of tensors that only look like
    linear weights: `14 × K = 96 is no multiple of 256, 16 × Conv1D weight, not a Linear`."""
    kept = [reason.removeprefix(KEPT) for reason in decisions.values() if isinstance(reason, str)]
    unlike = [kind for kind in others.values() if kind.endswith(NOT_LINEAR)]
    return ", ".join(f"{count} × {kind}" for kind, count in Counter(kept + unlike).items())


def _that_fit(linears: Sequence[LinearWeight]) -> str:
    """Return the formats of shipped recipes that all of `linears` can have, as the end of a sentence; empty
    if there are none."""
    specs = [load_recipe(name).spec for name in shipped_recipes()] if linears else []
    fitting = {
        spec.name
        for spec in specs
        if all(spec.refuses(w.n, w.k) is None or spec.nearest(w.n, w.k) is not None for w in linears)
    } - {UNQUANTIZED.name}
    return f", in a format that fits: {', '.join(sorted(fitting))}" if fitting else ""


def _for_other_readers(
    linears: Mapping[str, LinearWeight], chosen: Mapping[str, WeightFormat]
) -> dict[str, WeightFormat]:
    """Record the modules that get another format because other readers do not support their format in a model
    with quantized experts.
    """
    if not any(linears[module].is_expert for module in chosen):
        return {}
    taken = {module: spec.beside_experts() for module, spec in chosen.items()}
    return {module: spec for module, spec in taken.items() if spec != chosen[module]}


def _how_small(linears: Mapping[str, LinearWeight], weight: LinearWeight) -> str | None:
    """Return the reason why `weight` is too small for other readers; None if it is not."""
    parent, _, leaf = weight.module.rpartition(".")
    together = [f"{parent}.{name}" for name in MERGED] if leaf in MERGED else [weight.module]
    n = sum(linears[module].n for module in together if module in linears)
    if min(n, weight.k) >= SMALLEST:
        return None
    return f"{'N' if n < SMALLEST else 'K'} = {min(n, weight.k)} is below {SMALLEST}"


def _own_head(linears: Iterable[LinearWeight]) -> tuple[str, str] | None:
    by_role = {weight.role: weight.tensor for weight in linears if weight.role in (LM_HEAD, EMBEDDING)}
    head, embeddings = by_role.get(LM_HEAD), by_role.get(EMBEDDING)
    return None if head is None or embeddings is None or head == embeddings else (head, embeddings)


def _decide(recipe: Recipe, weight: LinearWeight) -> WeightFormat | str:
    """Return the format of `weight`, or the reason why it stays unquantized."""
    names = {weight.module, weight.tensor}
    if any(matches(pattern, name) for pattern in recipe.ignore for name in names):
        return IGNORED
    rule = rule_for(recipe, weight)
    if rule is not None and isinstance(rule.spec, Unquantized):
        return rule.reason or IGNORED
    if weight.role == ROUTER:
        return "router, never quantized"
    if weight.role == LM_HEAD and recipe.lm_head == KEEP:
        return "lm_head, kept by the recipe"
    if weight.role == EMBEDDING and recipe.embeddings == KEEP:
        return "embedding, kept by the recipe"
    special = weight.role in (LM_HEAD, EMBEDDING)
    if recipe.include and not special and not any(matches(p, n) for p in recipe.include for n in names):
        return "not included by the recipe"
    spec = recipe.spec if rule is None else rule.spec
    if isinstance(spec, Unquantized):
        return "not included by the recipe"
    if weight.role == UNKNOWN:
        raise UserError(
            f"{weight.tensor} holds fused experts in an order that is not known here; "
            f"to keep it unquantized, add it to the recipe's `ignore`"
        )
    return spec


def rule_for(recipe: Recipe, weight: LinearWeight) -> Rule | None:
    """Return the first of the recipe's rules that names `weight`."""
    names = {weight.module, weight.tensor}
    return next((r for r in recipe.rules if any(matches(r.modules, name) for name in names)), None)


def _all_names(checkpoint: Checkpoint, weights: ModelWeights) -> set[str]:
    """Return every name in the checkpoint and of its linear layers, in or beside the language model."""
    tensors = {name for tensor in checkpoint.tensors for name in (tensor, tensor.removesuffix(WEIGHT))}
    return tensors.union(*(reader.linears for reader in weights.readers))


def _refuse_idle_patterns(recipe: Recipe, linears: Iterable[LinearWeight], names: Collection[str]) -> None:
    """Raise UserError for a pattern that matches nothing; a pattern that only keeps weights that no recipe
    quantizes is allowed.

    names: names that a pattern may keep
    """
    linears = list(linears)
    quantizable = [weight for weight in linears if weight.role != ROUTER]
    quantized = [rule.modules for rule in recipe.rules if not isinstance(rule.spec, Unquantized)]
    kept = [rule.modules for rule in recipe.rules if isinstance(rule.spec, Unquantized)]
    for what, patterns, candidates in (
        ("include", recipe.include, quantizable),
        ("rules", quantized, quantizable),
        ("ignore", [*recipe.ignore, *kept], linears),
    ):
        for pattern in patterns:
            if any(
                matches(pattern, weight.module) or matches(pattern, weight.tensor) for weight in candidates
            ) or (what == "ignore" and any(matches(pattern, name) for name in names)):
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
    """Return module names with the numbers of layers and experts left out, the most frequent first."""
    kinds = Counter(
        ".".join("*" if part.isdigit() else part for part in weight.module.split(".")) for weight in linears
    )
    return [kind for kind, _ in kinds.most_common()]


def _unfit(recipe: Recipe, linears: Sequence[LinearWeight], chosen: Mapping[str, WeightFormat]) -> UserError:
    """Return an error text that lists every kind of layer that cannot have its format, and the rules that
    would fit.
    """
    said, rules = [], []
    by_kind = {next(iter(_kinds([weight]))): weight for weight in reversed(linears)}
    for kind, weight in by_kind.items():
        spec = chosen[weight.module]
        said.append(f"{weight.module} cannot be {spec.label}: {spec.refuses(weight.n, weight.k)}")
        nearest = spec.nearest(weight.n, weight.k)
        if nearest is None:
            rules.append(f"`ignore: ['{kind}']`")
        else:
            changes = " and ".join(f"`{change}`" for change in _changes(recipe.spec, spec, nearest))
            rules.append(f"a rule `modules: '{kind}'` with {changes}")
    return UserError(
        "; ".join(said)
        + f"; give the recipe {', '.join(rules)}, or `fit: {NEAREST}`, which does so by itself"
    )


def _fitted(
    linears: Mapping[str, LinearWeight], chosen: Mapping[str, WeightFormat], unfit: Iterable[str]
) -> dict[str, WeightFormat]:
    """Return the nearest format of each module that cannot have its own; modules without one are left out."""
    nearest = {m: chosen[m].nearest(linears[m].n, linears[m].k) for m in unfit}
    return {module: spec for module, spec in nearest.items() if spec is not None}


def _said(unfit: Mapping[str, str], fitted: Mapping[str, WeightFormat]) -> str:
    """Return the fitted formats as text: `48 x INT4 g64, zero points (K = 2880 is no multiple of group size
    128)`."""
    counts = Counter(
        (fitted[module].label if module in fitted else "kept as it is", reason)
        for module, reason in unfit.items()
    )
    return "; ".join(f"{count} × {became} ({reason})" for (became, reason), count in counts.items())


def _changes(own: WeightFormat, refused: WeightFormat, wanted: WeightFormat) -> list[str]:
    """Return the YAML of a rule that asks for `wanted`, if the recipe asks for `own` elsewhere."""
    is_own = type(own) is type(wanted)
    known, tried = parameters(own) if is_own else {}, parameters(refused)
    changed = {
        name: value
        for name, value in parameters(wanted).items()
        if known.get(name) != value or tried.get(name) != value
    }
    said = changed if is_own else {"format": wanted.name} | changed
    return [f"{name}: {v if isinstance(v, str) else json.dumps(v)}" for name, v in said.items()]


def _order(
    checkpoint: Checkpoint, weights: ModelWeights, decisions: dict[str, WeightFormat | str]
) -> tuple[list[WeightTask], dict[str, list[str]]]:
    tasks: list[WeightTask] = []
    kept: dict[str, list[str]] = {}
    split = {
        name
        for name, linears in weights.linears.items()
        if any(not isinstance(decisions[weight.module], str) for weight in linears)
    }
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
        if name in weights.biases and name.removesuffix(BIAS) in split:
            tasks += [WeightTask(name, bias=bias) for bias in weights.biases[name]]
        elif name in split:
            tasks += [
                WeightTask(name, weight, UNQUANTIZED if isinstance(choice, str) else choice)
                for weight, choice in zip(linears, choices, strict=True)
            ]
        else:
            scale_of(checkpoint, name)
            tasks.append(WeightTask(name))
    return tasks, kept
