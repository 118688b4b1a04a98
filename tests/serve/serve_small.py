"""A server with the small engine, for tests: `python serve_small.py PORT '{"max_batch": 2}' DRAIN_S`."""

from __future__ import annotations

import json
import sys

from jaxml.errors import JaxmlError
from jaxml.serve.launch import engine_app
from tests.serve.small_engine import OpenSmallEngine

if __name__ == "__main__":
    try:
        served = engine_app("small", OpenSmallEngine(**json.loads(sys.argv[2])))
        sys.exit(served.run(port=int(sys.argv[1]), drain_s=float(sys.argv[3])))
    except JaxmlError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
