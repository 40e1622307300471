import importlib.util

import pytest


def _needs(module):
    # Linux alone has wheels of libtpu, and with it the extra tpu-aot.
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}, of the extra tpu-aot")


needs_jax, needs_libtpu = _needs("jax"), _needs("libtpu")
