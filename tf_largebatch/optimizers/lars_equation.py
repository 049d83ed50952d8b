"""LARS's update in words a reader can check, with the numbers in force."""

from __future__ import annotations

from typing import Any


def lars_equation(lars: Any) -> list[str]:
    """One equation a line, of a `LARS`."""
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
