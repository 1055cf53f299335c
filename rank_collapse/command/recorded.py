"""Recordings of checkpoint folders for `rank-collapse agree`, by transformers or `rc.apply`."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from rank_collapse import pretrained
from rank_collapse.agree.recording import (
    ROUNDING,
    collect_trace,
    open_recording,
    write_recording,
)
from rank_collapse.agree.replay import Replay
from rank_collapse.checks import refuse_if
from rank_collapse.command import inputs
from rank_collapse.network.added_branches import compute_added_branches
from rank_collapse.network.transformer import apply
from rank_collapse.paths.function_recording import record_function
from rank_collapse.paths.transport import name_states
from rank_collapse.text.tokens import Tokens

NOISE = 2.0**-10  # of probes: small enough to be linear, large beside float32's rounding


def read_tokens(flags: argparse.Namespace, folder: Path) -> Tokens:
    """Read the tokens that both runs get.

    Args:
        flags: Parsed flags, from `agree.add_arguments`.
        folder: The checkpoint whose tokenizer reads them.

    Raises:
        ValueError: The checkpoint does not take tokens, or the flags exclude one another.
    """
    opened = inputs.open_source(str(folder))
    flags.inputs = None
    batch = inputs.read_inputs(flags, opened)
    refuse_if(batch.mask is None, f"{folder} reads no tokens: record it in your own code")
    return Tokens(np.asarray(batch.x), np.asarray(batch.mask))


class Form(NamedTuple):
    """How a checkpoint is run.

    Attributes:
        dtype: Number format of weights and arithmetic.
        attention: Attention of transformers.
        backend: "torch" or "jax".
    """

    dtype: str
    attention: str
    backend: str


def record_folder(folder: Path, path: Path, tokens: Tokens, form: Form) -> None:
    """Run a checkpoint, and write its recording.

    Args:
        folder: The checkpoint.
        path: The recording.
        tokens: The input.
        form: Form in which the checkpoint runs.

    Raises:
        ValueError: The model cannot be run in this form.
    """
    if form.backend == "jax":
        dtype = form.dtype
        refuse_if(dtype != "float32", f"--with=jax computes in float32, not in --dtype={dtype}")
        _record_jax(folder, path, tokens)
    else:
        _run_torch(folder, tokens, form, [(path, {})])


def _replay(folder, tokens, form, plan):
    """Run a checkpoint on other inputs, once for each entry of a plan.

    Args:
        folder: The checkpoint.
        tokens: Ids and mask.
        form: Backend, dtype and attention of the run.
        plan: (path of the recording, options of `torch.record`) of each run.
    """
    if form.backend == "torch":
        _run_torch(folder, tokens, form, plan)
        return
    config, params = pretrained.load(folder)[:2]

    def run_examples(ids):
        return jax.vmap(lambda x, mask: name_states(params, config, mask=mask)(x))(ids, tokens.mask)

    branches = {kind: kind for kind in config.kinds}
    arrays = {"mask": tokens.mask.astype(np.uint8), "token_ids": tokens.ids}
    for path, options in plan:
        record_function(run_examples, tokens.ids, path, branches=branches, **arrays, **options)


def record_replay(
    folders: Sequence[Path],
    recordings: Sequence[Path],
    tokens: Tokens,
    forms: Sequence[Form | None],
) -> Replay | None:
    """Run one of two checkpoints, the one of the finer dtype, on the inputs of the other.

    Args:
        folders: Folders of both runs.
        recordings: Recordings of both runs; those of the replay are written into the same folders.
        tokens: The input.
        forms: The form in which each one is run; None where the source is a recording.

    Returns:
        The replay; None where neither can be run here, or the recordings do not fit it.
    """
    runs = [i for i, form in enumerate(forms) if form is not None]
    if not runs:
        return None
    # transformers is quicker: its operations are compiled.
    run = min(runs, key=lambda i: (ROUNDING[forms[i].dtype], forms[i].backend != "torch"))
    folder, other = folders[run], recordings[1 - run]
    run_recording, opened = open_recording(recordings[run]), open_recording(other)
    fits = run_recording.shape == opened.shape and run_recording.num_layers == opened.num_layers
    if not fits or not np.array_equal(run_recording.read_mask(), opened.read_mask()):
        return None
    scratch = recordings[run].parent
    names = [scratch / f"{name}.safetensors" for name in ("replay", "still", *"01")]
    noisy = [(path, {"noise": NOISE, "seed": i}) for i, path in enumerate(names[2:])]
    plans = [[(names[0], {})], [(names[1], {}), *noisy]]
    wide = forms[run]._replace(dtype="float32")
    if forms[run].dtype in ("float32", "float64"):  # one model computes all
        plans, names[1] = [[(names[0], {}), *noisy]], names[0]
    for plan, form in zip(plans, (forms[run], wide), strict=False):
        _replay(folder, tokens, form, [(p, o | {"inputs": other}) for p, o in plan])
    replay, *probes = map(open_recording, names)
    return Replay(run, replay, tuple(probes) if replay.branches else ())


def _run_torch(folder, tokens, form, plan):
    """Run a checkpoint by transformers, once for each entry of a plan; arguments as in `_replay`.

    Raises:
        ValueError: transformers or torch is not installed, or the folder lacks a tensor that the
            recorded run reads.
    """
    try:
        torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    except ImportError as error:
        raise ValueError(
            f"{folder} is run by transformers, and {error.name} is not installed: pip install "
            "torch transformers, or --with=jax"
        ) from None
    from rank_collapse.torch.recording import record

    options = {"dtype": getattr(torch, form.dtype), "attn_implementation": form.attention}
    names = transformers.AutoConfig.from_pretrained(folder).architectures or [""]
    is_decoder = any(name.endswith(("CausalLM", "LMHeadModel")) for name in names)
    load = transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModel
    model, loaded = load.from_pretrained(folder, output_loading_info=True, **options)
    missing = sorted(name for name in loaded["missing_keys"] if "pooler" not in name)
    refuse_if(
        missing, f"{folder}: tensor {''.join(missing[:1])!r} is missing; transformers draws it"
    )
    model.eval()
    batch = {
        "input_ids": torch.as_tensor(tokens.ids, dtype=torch.long),
        "attention_mask": torch.as_tensor(tokens.mask, dtype=torch.long),
    }
    for path, chosen in plan:
        with torch.no_grad(), record(model, path, **chosen):
            model(**batch)


def _record_jax(folder, path, tokens):
    """Run a checkpoint by `rc.apply`, and write the recording.

    Args:
        folder: The checkpoint.
        path: Path of the recording.
        tokens: Ids and mask.
    """
    config, params = pretrained.load(folder)[:2]

    def run_example(ids, mask):
        trace = apply(params, ids, config, mask=mask)
        return collect_trace(trace) | compute_added_branches(trace, params, config)

    # In a trace the layers come first, in a recording the layers and then the examples.
    arrays = jax.jit(jax.vmap(run_example, out_axes=1))(tokens.ids, tokens.mask)
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    write_recording(path, arrays | {"mask": tokens.mask.astype(np.uint8), "token_ids": tokens.ids})
