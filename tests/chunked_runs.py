"""Two runs of one command that were divided otherwise, or interrupted, have the same arrays."""

import numpy as np


def same_arrays(folder, other, rtol=0):
    """Two runs found the same but for times: bit for bit, or up to rounding."""
    with np.load(folder / "arrays.npz") as wanted, np.load(other / "arrays.npz") as found:
        assert set(wanted.files) == set(found.files) and wanted.files
        for name in wanted.files:
            if "seconds" not in name:
                np.testing.assert_allclose(found[name], wanted[name], rtol, err_msg=name)
                assert found[name].dtype == wanted[name].dtype, name
