"""A server with small engines, for tests: `python serve_small.py PORT '{"max_batch": 2}' DRAIN_S ACCESS NAME...`.

ACCESS: the fields of `launch.Access` as JSON, a tier as the list of its fields.
"""

from __future__ import annotations

import json
import sys

from jaxml.errors import JaxmlError
from jaxml.serve.launch import Access, engine_app
from jaxml.serve.rates import Tier
from tests.serve.small_engine import OpenSmallEngine

if __name__ == "__main__":
    try:
        _, port, options, drain_s, given, *names = sys.argv
        access = json.loads(given)
        if "tiers" in access:
            access["tiers"] = tuple(Tier(*fields) for fields in access["tiers"])
        if "operations" in access:
            access["operations"] = tuple(access["operations"])
        served = engine_app({name: OpenSmallEngine(name=name, **json.loads(options)) for name in names})
        sys.exit(served.run(port=int(port), drain_s=float(drain_s), access=Access(**access)))
    except JaxmlError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
