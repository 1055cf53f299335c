"""Depth parametrisations: how gains, rates, decay and ε follow from a network's depth and width.

    rule = rc.depth_rule("completep", base=small)       # whose hyperparameters were tuned
    params = rule.init(key, config)
    optimizer = rule.adamw(1e-3, config, weight_decay=0.1)
    trace = rc.apply(params, ids, rule.network(config))
    logits = rule.logit_gain(config) * trace.output @ params.embedding.tokens.T

Against the base's shape m_N = d/d₀, m_L = L/L₀ for L layers with weights of their own, m_R = R/R₀
where these are passed R times; α is the power of the depth:

    group       parameters                     variance  Adam's rate       decay  ε
    embedding   matrices outside of blocks     σ²        η                 λ      ε
    matrix      matrices in blocks             σ²/m_N    η m_N⁻¹ m_L^(α−1) λ m_N  ε m_N⁻¹ m_L^−α
    vector      biases and gains in blocks     σ²        η m_L^(α−1)       0      ε m_N⁻¹ m_L^−α
    final       those outside of blocks        σ²        η                 0      ε

Branches are multiplied by (m_L m_R)^−α, scores by √(k₀/k) in addition to their own 1/√k, and logits
by 1/m_N. At the base's shape every rule gives the plain network with the plain optimizer.

Source: CompleteP, Dey et al. 2025 (arXiv 2505.01618), table 1.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax

from rank_collapse import checks, struct
from rank_collapse.annotations import Key, Leaf, Number
from rank_collapse.network import parameters
from rank_collapse.network.config import TransformerConfig, check_config
from rank_collapse.network.parameters import TransformerParams

RuleName = Literal["sp", "mup", "half", "completep", "looped"]
GROUPS = ("embedding", "matrix", "vector", "final")


class Factors(NamedTuple):
    """Factors of a rule for one group of parameters."""

    init: Number  # the initial values
    rate: Number
    decay: Number
    eps: Number


class DepthRule(struct.Struct):
    """A depth parametrisation; its floats may be traced, so one program serves all rules.

    Attributes:
        base: The network whose hyperparameters are known.
        width: Power of m_N in the width's factors: 1, or 0 for none.
        gain, rate, eps: Powers of m_L in branches, rates and ε of blocks.
        loop_gain: Power of m_R in branches.
    """

    base: TransformerConfig
    width: Number = 1.0
    gain: Number = 0.0
    rate: Number = 0.0
    eps: Number = 0.0
    loop_gain: Number = 0.0

    def multipliers(self, config: TransformerConfig) -> tuple[float, float, float]:
        """Compute (m_N, m_L, m_R)."""
        check_config(config)
        base = self.base
        loops, base_loops = config.depth / config.num_rows, base.depth / base.num_rows
        return config.d_model / base.d_model, config.num_rows / base.num_rows, loops / base_loops

    def factors(self, config: TransformerConfig) -> dict[str, Factors]:
        """Compute {group: `Factors`} of a network: see the table above."""
        wide, deep, _ = self.multipliers(config)
        wide, rate = wide**self.width, deep**self.rate
        eps = deep**self.eps / wide
        # a variance of 1/fan-in has the width's factor already
        variance = 1.0 if config.init in ("lecun", "xavier") else wide
        return {
            "embedding": Factors(1.0, 1.0, 1.0, 1.0),
            "matrix": Factors(variance**-0.5, rate / wide, wide, eps),
            "vector": Factors(1.0, rate, 0.0, eps),
            "final": Factors(1.0, 1.0, 0.0, 1.0),
        }

    def network(self, config: TransformerConfig) -> TransformerConfig:
        """Return the config with gains of branches and a temperature by the rule."""
        _, deep, loops = self.multipliers(config)
        gain = deep**self.gain * loops**self.loop_gain
        heads = (config.qk_width / self.base.qk_width) ** (self.width / 2)
        return config.replace(
            branch_gain=jax.tree.map(lambda branch_gain: branch_gain * gain, config.branch_gain),
            temperature=config.temperature * heads,
        )

    def logit_gain(self, config: TransformerConfig) -> Number:
        """Compute 1/m_N, what multiplies logits."""
        return self.multipliers(config)[0] ** -self.width

    def init(self, key: Key, config: TransformerConfig, **scales: object) -> TransformerParams:
        """Draw `rc.init` with the variance σ²/m_N of matrices in blocks.

        Args:
            key, config, **scales: See `rc.init`.

        Raises:
            ValueError: init="reference", where some matrices have a variance of 1/fan-in.
        """
        checks.refuse_if(
            config.init == "reference",
            "init='reference' draws matrices from two distributions: use init='bert' or 'lecun'",
        )
        factors, params = self.factors(config), parameters.init(key, config, **scales)
        return jax.tree_util.tree_map_with_path(
            lambda path, a: a * factors[parameter_group(path, a)].init, params
        )

    def adamw(
        self,
        rate: Number,
        config: TransformerConfig,
        *,
        weight_decay: Number = 0.1,
        b1: float = 0.9,
        b2: float = 0.95,
        eps: Number = 1e-8,
    ) -> Any:
        """Make AdamW of optax with each group's rate, decay and ε; clip gradients before it.

        Args:
            rate: η of the base; a number, traced or not, or a schedule.
            config: The network, whose parameters may stand in any tree under the name "layers".
            weight_decay, b1, b2, eps: λ, β₁, β₂ and ε of the base.

        Raises:
            ValueError: A rate, decay or ε below 0 or not finite, or a β not below 1.
        """
        import optax  # here: it takes half a second, which `--help` need not

        rates = {} if callable(rate) else {"rate": rate}
        checks.check_numbers("[0, inf)", **rates, weight_decay=weight_decay, eps=eps)
        checks.check_numbers("[0, 1)", b1=b1, b2=b2)

        def group_optimizer(factors):
            """Make the AdamW of one group from its factors."""

            def schedule(step):
                return factors.rate * rate(step)

            group_rate = schedule if callable(rate) else factors.rate * rate
            decay = factors.decay * weight_decay
            return optax.adamw(group_rate, b1, b2, factors.eps * eps, weight_decay=decay)

        groups = {name: group_optimizer(factors) for name, factors in self.factors(config).items()}
        return optax.transforms.partition(
            groups, lambda params: jax.tree_util.tree_map_with_path(parameter_group, params)
        )

    def groups(
        self,
        module: object,
        blocks: object,
        rate: float,
        config: TransformerConfig,
        *,
        weight_decay: float = 0.1,
        eps: float = 1e-8,
    ) -> list[dict[str, object]]:
        """List parameter groups for torch: `AdamW(rule.groups(model, model.layers, η, config))`.

        Args:
            module: The model.
            blocks: The module's list of blocks, itself a module.
            rate, weight_decay, eps: Rate, decay and ε of the base optimizer.
            config: The shape of the model: depth, d_model.

        Returns:
            A dictionary for each group that has parameters: "name", "params", "lr",
            "weight_decay", "eps" and "init", the factor of its initial values. For matrices "init"
            is m_N^−½ where config.init="bert", whose deviation is the same at every width. It is 1
            for "lecun" and "xavier", whose variance falls with the width.

        Raises:
            ValueError: A rate, decay or ε below 0 or not finite, or blocks of another model.
        """
        checks.check_numbers("[0, inf)", rate=rate, weight_decay=weight_decay, eps=eps)
        inside = {id(p) for p in blocks.parameters()}
        checks.refuse_if(
            not inside or not inside <= {id(p) for p in module.parameters()},
            "blocks do not belong to this module: some of their parameters are not among its own",
        )
        parameters = {name: [] for name in GROUPS}
        for p in module.parameters():
            parameters[_name_group(id(p) in inside, p.ndim > 1)].append(p)
        return [
            {
                "name": name,
                "params": parameters[name],
                "lr": factors.rate * rate,
                "weight_decay": factors.decay * weight_decay,
                "eps": factors.eps * eps,
                "init": factors.init,
            }
            for name, factors in self.factors(config).items()
            if parameters[name]
        ]


RULES = {
    "sp": {"width": 0.0},
    "mup": {},
    "half": {"gain": -0.5, "rate": -0.5, "eps": -0.5, "loop_gain": -0.5},
    "completep": {"gain": -1.0, "eps": -1.0, "loop_gain": -1.0},
    # λ/(R √L): rates depend on the layers of their own alone (Wang et al. 2026, arXiv 2606.18524)
    "looped": {"gain": -0.5, "rate": -0.5, "eps": -0.5, "loop_gain": -1.0},
}


def depth_rule(name: RuleName, base: TransformerConfig) -> DepthRule:
    """Return a depth parametrisation by name.

    Args:
        name: "sp", standard: nothing is scaled. "mup": by width alone (Yang et al. 2022). "half"
            and "completep": by width, and by depth with α = ½ (Yang et al. 2024; Bordelon et al.
            2024) and α = 1 (Dey et al. 2025). "looped": α = ½ in the number of layers that have
            their own weights, 1 in the number of times that these are applied (Wang et al. 2026).
        base: The network whose hyperparameters are known.

    Raises:
        ValueError: An unknown name, or a base that is not a network.
    """
    check_config(base, "base")
    checks.check_choice(f"depth rule {name!r}", name, RULES)
    return DepthRule(base, **RULES[name])


def parameter_group(path: Iterable[object], leaf: Leaf) -> str:
    """Return the group of a parameter by its path; stacked blocks are under "layers"."""
    *above, name = jax.tree_util.keystr(tuple(path), simple=True, separator=".").split(".")
    inside = "layers" in above
    return _name_group(inside, name.startswith("w_") if inside else leaf.ndim > 1)


def _name_group(inside, is_matrix):
    if inside:
        return "matrix" if is_matrix else "vector"
    return "embedding" if is_matrix else "final"
