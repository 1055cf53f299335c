"""Images as the patches that a vision model takes in, one flattened patch a row."""

from typing import Any

import numpy as np
from jaxtyping import Float

from rank_collapse.pretrained.entries import Settings
from rank_collapse.struct import refuse, refuse_if


def cut_patches(image: Any, size: int) -> Any:
    """Cut an image into squares, row by row, each flattened as (channel, y, x).

    Args:
        image: [channels, height, width].
        size: Side of a square.

    Returns:
        [n, channels · size²].

    Raises:
        ValueError: A height or width that the patch size does not divide.
    """
    c, height, width = image.shape
    refuse_if(
        height % size or width % size,
        f"patch size {size} does not divide an image of {height} x {width}",
    )
    grid = image.reshape(c, height // size, size, width // size, size)
    return grid.transpose(1, 3, 0, 2, 4).reshape(-1, c * size * size)


def image_patches(images: Any, settings: Settings) -> Float[np.ndarray, "b n i"]:
    """Cut a batch of images into the patches that a given model reads.

    Args:
        images: [b, channels, height, width].
        settings: Settings of the model, from `pretrained.settings_of`.

    Raises:
        ValueError: Images of another shape than the model's, or with values that are not finite.
    """
    shape = (settings["num_channels"], *_as_pair(settings["image_size"]))
    refuse(
        (
            images.ndim != 4 or images.shape[1:] != shape or not len(images),
            f"images of shape {images.shape} are not [b, {shape}]",
        ),
        (not np.isfinite(images).all(), "images hold values that are not finite"),
    )
    _, size = num_patches(settings)
    return np.stack([cut_patches(image, size) for image in images])


def num_patches(settings: Settings) -> tuple[int, int]:
    """Returns (patches of an image, side of each)."""
    height, width = _as_pair(settings["image_size"])
    size, other_side = _as_pair(settings["patch_size"])
    if size != other_side or height % size or width % size:
        raise ValueError(
            f"patch_size={settings['patch_size']} does not tile image_size={settings['image_size']}"
        )
    return (height // size) * (width // size), size


def _as_pair(value):
    pair = [value, value] if isinstance(value, int) else value
    refuse_if(
        len(pair) != 2 or any(type(n) is not int or not 1 <= n < 2**31 for n in pair),
        f"image or patch size {value!r} is neither a whole number nor two",
    )
    return tuple(pair)
