"""Recordings of checkpoint folders for `rank-collapse agree`, by transformers or `rc.apply`."""

import argparse
import importlib
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from rank_collapse import pretrained
from rank_collapse.agree.recording import collect_trace, write_recording
from rank_collapse.command import inputs
from rank_collapse.network.transformer import apply
from rank_collapse.struct import refuse_if


class Tokens(NamedTuple):
    """Token ids [b, n] and which of them exist [b, n]."""

    ids: np.ndarray
    mask: np.ndarray


def read_tokens(flags: argparse.Namespace, folder: Path) -> Tokens:
    """Read the tokens that both runs get.

    Args:
        flags: Parsed flags, from `agree.add_arguments`.
        folder: The checkpoint whose tokenizer reads them.

    Raises:
        ValueError: The checkpoint takes in no tokens, or the flags exclude one another.
    """
    opened = inputs.open_source(str(folder))
    flags.inputs = None
    batch = inputs.read_inputs(flags, opened)
    refuse_if(batch.mask is None, f"{folder} takes in no tokens: record it in your own code")
    return Tokens(np.asarray(batch.x), np.asarray(batch.mask))


def record_folder(
    folder: Path, path: Path, tokens: Tokens, *, dtype: str, attention: str, backend: str
) -> None:
    """Run a checkpoint, and write its recording.

    Args:
        folder: The checkpoint.
        path: The recording.
        tokens: The input.
        dtype: Number format of weights and arithmetic.
        attention: Attention of transformers.
        backend: "torch" or "jax".

    Raises:
        ValueError: The model cannot be run so.
    """
    if backend == "jax":
        refuse_if(dtype != "float32", f"--with=jax computes in float32, not in --dtype={dtype}")
        _record_jax(folder, path, tokens)
    else:
        _record_torch(folder, path, tokens, dtype, attention)


def _record_torch(folder, path, tokens, dtype, attention):
    """Run a checkpoint by transformers."""
    try:
        torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    except ImportError as error:
        raise ValueError(
            f"{folder} is run by transformers, and {error.name} is not installed: pip install "
            "torch transformers, or --with=jax"
        ) from None
    from rank_collapse.torch.recording import record

    options = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    names = transformers.AutoConfig.from_pretrained(folder).architectures or [""]
    is_decoder = any(name.endswith(("CausalLM", "LMHeadModel")) for name in names)
    load = transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModel
    model = load.from_pretrained(folder, **options).eval()
    batch = {
        "input_ids": torch.as_tensor(tokens.ids, dtype=torch.long),
        "attention_mask": torch.as_tensor(tokens.mask, dtype=torch.long),
    }
    with torch.no_grad(), record(model, path):
        model(**batch)


def _record_jax(folder, path, tokens):
    """Run a checkpoint by `rc.apply`."""
    config, params = pretrained.load(folder)[:2]

    def run_example(ids, mask):
        return collect_trace(apply(params, ids, config, mask=mask))

    # In a trace the layers come first, in a recording the layers and then the examples.
    arrays = jax.jit(jax.vmap(run_example, out_axes=1))(tokens.ids, tokens.mask)
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    write_recording(path, arrays | {"mask": tokens.mask.astype(np.uint8), "token_ids": tokens.ids})
