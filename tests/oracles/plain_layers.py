"""A JAX function of three layers with scopes or names, whose stream and branches are recorded."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

L, N, D = 3, 5, 8
X = jax.random.normal(jax.random.key(0), (N, D))
WEIGHTS = jax.random.normal(jax.random.key(1), (L, 5, D, D)) / np.sqrt(D)
BOTH = {"attention": "att", "mlp": "mlp"}


def norm(x):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def attend(w, h):
    scores = (h @ w[0]) @ (h @ w[1]).T / np.sqrt(D)
    return jax.nn.softmax(scores) @ (h @ w[2])


def compute_layer(w, x, place="pre", named=False):
    """Return (state after, attention, MLP) of a layer of a plain function."""

    def call(kind, f, h):
        if named:
            return checkpoint_name(f(h), kind)
        with jax.named_scope(kind):
            return f(h)

    def compute_mlp(h):
        return jax.nn.gelu(h @ w[3]) @ w[4]

    if place == "parallel":
        attention = call("att", lambda h: attend(w, h), norm(x))
        mlp = call("mlp", compute_mlp, norm(x))
        return x + (attention + mlp) * 0.5, 0.5 * attention, 0.5 * mlp
    h = x if place == "post" else norm(x)
    attention = call("att", lambda h: attend(w, h), h)
    attention = norm(attention) if place == "sandwich" else attention
    y = x + attention
    y = norm(y) if place == "post" else y
    mlp = call("mlp", compute_mlp, y if place == "post" else norm(y))
    mlp = (norm(mlp) if place == "sandwich" else mlp) * (0.7 if place == "sandwich" else 1)
    out = y + mlp
    return (norm(out) if place == "post" else out), attention, mlp


def run_plain(x, place="pre", named=False):
    for w in WEIGHTS:
        x = compute_layer(w, x, place, named)[0]
    return norm(x) if place != "post" else x


def scale_skips(x, place="pre", factors=(1.5, 0.9), scale=1.0):
    """Branches read x and are added to a multiple of it: by numbers, by features, by a quotient."""
    x = scale * x
    for index, w in enumerate(WEIGHTS):
        for kind, factor in zip(("att", "mlp"), factors, strict=True):
            with jax.named_scope(kind):
                h = x if place == "post" else norm(x)
                branch = attend(w, h) if kind == "att" else jax.nn.gelu(h @ w[3]) @ w[4]
            skip = x / factor if index == 1 else factor * x
            x = skip + branch
            x = norm(x) * jnp.linspace(0.5, 2, D)[None] if place == "post" else x
    return x


def scan_model(x):
    step = jax.checkpoint(lambda h, w: (compute_layer(w, h)[0], None))
    return norm(jax.lax.scan(step, x, WEIGHTS)[0])


def loop_model(x):
    def step(i, h):
        return compute_layer(WEIGHTS[i], h)[0]

    return jax.lax.fori_loop(0, jnp.asarray(L), step, x)


FACTORS = {
    "numbers": ("pre", (1.5, 0.9)),
    "features": ("pre", (jnp.linspace(0.5, 1.5, D)[None], 0.9)),
    "DeepNorm": ("post", (1.7, 1.7)),
    "small": ("pre", (1.0, 1e-3)),
}
FACTORS["embedding"] = (*FACTORS["numbers"], 3.0)  # the stream is the scaled embedding
PLACES = ["pre", "post", "sandwich", "parallel"]
MODELS = {place: lambda x, place=place: run_plain(x, place) for place in PLACES}
MODELS |= {f"{p}, names": lambda x, p=p: run_plain(x, p, named=True) for p in PLACES}
MODELS |= {n: lambda x, f=f: scale_skips(x, *f) for n, f in FACTORS.items()}
MODELS |= {"scan": scan_model, "loop": loop_model, "jit": jax.jit(run_plain)}
