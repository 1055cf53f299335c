"""How the tests compile: small loops by XLA's older generator, three times as fast, in one module.

A program split into 32 modules, to be compiled by as many cores, takes a sixth longer on one.
To be imported before JAX starts.
The options belong to the jaxlib that the tests were timed with; another one refuses to start with
an option that it does not know, so there they are left out.
"""

import os
from importlib import metadata

_KNOWN = metadata.version("jaxlib").startswith("0.10.")
_QUICK = {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_parallel_codegen_split_count": "1"}
# `compiler_options` of what users' programs are
AS_USERS = {"xla_cpu_use_fusion_emitters": True} if _KNOWN else {}

if _KNOWN:  # this process and its children
    flags = os.environ.get("XLA_FLAGS", "")
    added = (f"--{name}={value}" for name, value in _QUICK.items() if name not in flags)
    os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()
