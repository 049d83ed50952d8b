"""What an optimizer does, in words a reader can check: its equation, and a line for each variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def explain(lars: Any, equation: Callable[[Any], list[str]] | None = None) -> str:
    """The equation of an optimizer in force, and for each variable what was done to it at the last step.

    Args:
      lars: the optimizer; before its first update there is the equation alone.
      equation: gives the equation's lines; None for those of LARS.
    """
    title = f"{type(lars).__name__}, gamma = {lars.current_learning_rate():.6g} at step {int(lars.iterations)}"
    lines = [title, *(equation or lars_equation)(lars)]
    if not getattr(lars, "_state_created", False):
        return "\n".join([*lines, "", "Not built yet: the variables are known from the first update on."])
    ratios = lars.trust_ratios()
    rate = lars.last_learning_rate()
    rows = [("variable", "shape", "adapted", "decayed", "trust ratio", "effective rate")]
    for path, shape, adapted, decay, ratio in zip(lars.paths, lars.shapes, lars._adapted, lars._decays, ratios):
        shown = ("-", "-") if rate is None else (f"{ratio:.4g}", f"{rate * ratio:.4g}")
        rows.append((path, "x".join(map(str, shape)) or "scalar", _yes(adapted), _yes(decay > 0), *shown))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, "", *table])


def lars_equation(lars: Any) -> list[str]:
    """The update, with the numbers in force, one equation a line."""
    rule, beta = lars.trust_rule, lars._beta
    mu, order = lars.momentum, lars.momentum_order
    d = f"g + {beta:g} w" if beta and lars.decay_in_update else "g"
    lines = [f"  d      = {d}" + (f", elements cut to +-{lars.gradient_clip:g}" if lars.gradient_clip else "")]
    epsilon = f" + {rule.epsilon:g}" if rule.epsilon else ""
    denominator = {
        "sum": f"|g| + {beta:g} |w|" if beta else "|g|",
        "vector": "|u|" if order == "post_trust" else "|d|",
        "gradient": "|g|",
    }[rule.norm_rule]
    ratio = f"  lambda = {rule.coefficient:g} |w| / ({denominator}{epsilon})"
    if rule.trust_min is not None or rule.trust_max is not None:
        low, high = rule.trust_min, rule.trust_max
        ratio += f", within [{0 if low is None else f'{low:g}'}, {'inf' if high is None else f'{high:g}'}]"
    ratio += "; then min(lambda, gamma) / gamma" if rule.clip == "larc" else ""
    at_zero = {"coefficient": f"{rule.coefficient:g}", "one": "1", "zero": "0", "plain": "1 and no decay"}
    ratio += f"; {at_zero[rule.zero_norm]} where a norm is 0"
    inside, outside = {
        "classic": ("gamma lambda ", ""),
        "torch": ("lambda ", "gamma "),
        "unscaled": ("", "gamma lambda "),
        "post_trust": ("", "gamma lambda "),
    }[order]
    velocity = [f"  v      = {mu:g} v + {inside}d"]
    if lars.momentum_correction:
        velocity.insert(0, "  v      = v gamma_t / gamma_(t-1) while gamma grows")
    ahead = f"{mu:g} v + {inside}d" if lars.nesterov else "v"
    if order == "post_trust":
        lines += [*velocity, f"  u      = {ahead}", ratio, f"  w      = w - {outside}u"]
    else:
        lines += [
            ratio,
            *velocity,
            f"  w      = w - {outside}({ahead})" if outside or lars.nesterov else "  w      = w - v",
        ]
    multiplier = lars.excluded_lr_multiplier
    lines.append(f"  not adapted: lambda = {multiplier:g}; not decayed: d = g, and no decay in lambda")
    return lines


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
