"""DSpark speculative decoding in JAX.

What is listed here is public: `load` a target and its drafter, `generate` completions or `stream`
tokens as they are committed. The building blocks live in the modules, one concept each.
"""

from dspark_jax.config import DrafterConfig, InputError, TargetConfig
from dspark_jax.generation import Pair, generate, load, stream
from dspark_jax.request import Completion, Request

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "DrafterConfig",
    "InputError",
    "Pair",
    "Request",
    "TargetConfig",
    "generate",
    "load",
    "stream",
]
