"""Trained networks of a folder of checkpoints, and the texts that they read."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from experiments.lab import Options, content_hash
from experiments.lab.text_inputs import encode_texts
from experiments.trained.packages import PACKAGES
from rank_collapse import pretrained
from rank_collapse.pretrained.published import RANDOM
from rank_collapse.printed import format_one_line
from rank_collapse.text import encoders, tokens, words

_SMALL = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 20,
}
UNTRAINED = {
    "albert": _SMALL | {"model_type": "albert", "embedding_size": 8},
    "llama": _SMALL | {"model_type": "llama"},
}


class Network(NamedTuple):
    """One network and its texts."""

    label: str
    source: pretrained.OpenCheckpoint
    inputs: dict[str, np.ndarray]  # x and mask, as of `rank_collapse.apply`
    mask_id: int | None  # [MASK], where the vocabulary has it
    folder: Path | None = None  # its checkpoint; None of weights at random
    is_initialised: bool = False  # of a published size, whose weights nobody trained


def load_networks(options: Options, num_texts: int) -> list[Network]:
    """Loads the networks that the flags ask for, first those of the packages.

    A network that cannot be read is skipped, and a line reports it.

    Args:
        options: Flags `folder`, `networks`, `text`, `last_texts`, `skip_texts` and `max_tokens`.
        num_texts: Largest number of texts for each network, including those that are skipped.

    Raises:
        FileNotFoundError, ValueError: A folder, text or network that does not exist or cannot be
            read.
    """
    if options.flags.grows and not options.text:
        raise ValueError(
            "--until=decided needs --text: the file that comes with the package has too few texts"
        )
    folder = Path(options.folder)
    if not folder.is_dir():
        advice = "python -m experiments.trained_weights makes it"
        raise FileNotFoundError(f"--folder={folder} does not exist: {advice}")
    if options.text and not Path(options.text).is_file():
        raise FileNotFoundError(f"--text={options.text} does not exist")
    present = sorted(path.parent.name for path in folder.glob("*/config.json"))
    names = options.networks or [*PACKAGES, *(name for name in present if name not in PACKAGES)]
    networks, reasons = [], []
    for name in names:
        if name not in present and name not in PACKAGES:
            names_present = ", ".join(present)
            raise ValueError(f"--networks={name} is not in {folder}, which has {names_present}")
        if name not in present:
            requirement = PACKAGES[name].requirement
            print(f"skipped: {name} is not in {folder}; its package is {requirement}")
            continue
        try:
            networks.append(
                load_network(
                    folder / name,
                    options.text,
                    num_texts,
                    options.max_tokens,
                    are_last=options.last_texts,
                    is_widened=options.flags.grows,
                )
            )
        except (ValueError, OSError, ModuleNotFoundError) as error:
            reasons.append(format_one_line(error))
            print(f"skipped: {name}: {reasons[-1]}")
    if not networks:
        reason = reasons[0] if reasons else "it is empty"
        raise FileNotFoundError(f"{folder} holds no checkpoint folder that can be read: {reason}")
    return networks


def make_untrained(name: str, options: Options) -> Network:
    """Makes a small network at random, and random tokens for it."""
    draw, shape = np.random.default_rng(options.seed), (options.num_texts, options.max_tokens)
    source = pretrained.open_random(UNTRAINED[name], jax.random.key(options.seed))
    inputs = {"x": draw.integers(1, 20, shape), "mask": np.ones(shape, bool)}
    return Network(name, source, inputs, 0)


def make_initialised(name: str, options: Options) -> Network:
    """Makes a published architecture with random weights, and texts for it: pieces of the text that
    is shipped with the package.

    Args:
        name: Name in `pretrained.PUBLISHED`.
        options: Flags `num_few` (number of texts), `max_tokens` (largest number of tokens in each
            text) and `seed` (of the weights).
    """
    source = pretrained.open_random(f"{RANDOM}{name}", jax.random.key(options.seed))
    texts = words.cut_windows(words.default_text(), options.num_few, options.max_tokens)
    encoder = encoders.trained_tokenizer(texts, source.config.embedding.vocab_size)
    batch = encode_texts(texts, encoder, max_tokens=options.max_tokens)
    inputs = {"x": batch.ids, "mask": batch.mask}
    return Network(f"{name} at init", source, inputs, mask_id=None, is_initialised=True)


def load_network(
    folder: Path,
    text: str | None,
    num_texts: int,
    max_tokens: int,
    *,
    are_last: bool = False,
    is_widened: bool = False,
) -> Network:
    """Opens one checkpoint and reads its texts: features.npy, ids.txt, or its tokenizer's.

    Args:
        folder: Folder of the checkpoint.
        text: Text file for networks with a tokenizer; None for pieces of a text shipped with the
            package.
        num_texts: At most.
        max_tokens: Largest number of tokens in each text that a tokenizer reads; two frames of a
            spectrogram are a token.
        are_last: Whether the texts are the last of their file, the very last one first.
        is_widened: Whether texts are padded to one width for any number of texts.

    Raises:
        ValueError: A checkpoint with neither texts nor a tokenizer.
    """
    source, path = pretrained.open_checkpoint(folder), folder / "vocab.txt"
    selection = slice(-1, -num_texts - 1, -1) if are_last else slice(num_texts)
    vocabulary = path.read_text("utf-8").split("\n") if path.is_file() else []
    mask_id = vocabulary.index("[MASK]") if "[MASK]" in vocabulary else None
    if (folder / "features.npy").is_file():
        spectra = np.load(folder / "features.npy")[selection, :, : 2 * max_tokens]
        inputs = {"x": spectra.transpose(0, 2, 1), "mask": None}
        return Network(folder.name, source, inputs, mask_id=None, folder=folder)
    if (folder / "ids.txt").is_file():
        sequences = tokens.read_ids(folder / "ids.txt")
        batch = tokens.pad_sequences(sequences[selection])
        width = max(map(len, sequences))
    else:
        encoder = encoders.load_tokenizer(folder, source.settings)
        if encoder is None:
            raise ValueError(f"{folder} has no tokenizer and no ids.txt")
        if text:
            texts = tokens.read_texts(text)[selection]
        else:
            # No two pieces overlap: they are draws.
            shipped = words.default_text()
            count = min(num_texts, max(1, len(shipped.split()) // max_tokens))
            texts = words.cut_windows(shipped, count, max_tokens)
        batch = encode_texts(texts, encoder, max_tokens=max_tokens)
        width = max_tokens
    missing = [(0, 0), (0, width - batch.ids.shape[1] if is_widened else 0)]
    inputs = {"x": np.pad(batch.ids, missing), "mask": np.pad(batch.mask, missing)}
    return Network(folder.name, source, inputs, mask_id, folder)


def skip_texts(network: Network, count: int) -> Network:
    """Leaves out the first texts of a network.

    Raises:
        ValueError: No text is left.
    """
    inputs = {name: a if a is None else a[count:] for name, a in network.inputs.items()}
    if not len(inputs["x"]):
        raise ValueError(f"{network.label} has no more than --skip_texts={count} texts")
    return network._replace(inputs=inputs)


def identify_texts(networks: Sequence[Network], count: int | None = None) -> dict[str, str]:
    """Returns what identifies the texts of each network, for config.json.

    Args:
        networks: Networks with their texts.
        count: Number of texts that identify them, if more may follow; all by default.
    """
    return {
        network.label: content_hash(np.ascontiguousarray(network.inputs["x"][:count]).tobytes())
        for network in networks
    }
