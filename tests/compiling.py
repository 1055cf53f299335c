"""How the tests compile: small loops are made by XLA's older generator, three times as fast.

To be imported before JAX starts.
The option belongs to the jaxlib that the tests were timed with; another one refuses to start with
an option that it does not know, so there it is left out.
"""

import os
from importlib import metadata

_OPTION = "xla_cpu_use_fusion_emitters"
_KNOWN = metadata.version("jaxlib").startswith("0.10.")
AS_USERS = {_OPTION: True} if _KNOWN else {}  # `compiler_options` of what users' programs are

if _KNOWN and _OPTION not in os.environ.get("XLA_FLAGS", ""):  # this process and its children
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_OPTION}=false".strip()
