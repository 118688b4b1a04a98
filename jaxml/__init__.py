"""jaxml: one functional JAX codebase for a model's whole life, from a text file to an answered request.

Import from the rooms (`jaxml.models.decoder`, `jaxml.train.step`, ...); `docs/map.md` is the tour in data-flow order.
This file imports nothing, so that `jaxml --help` stays fast.
"""

__version__ = "0.1.0"
