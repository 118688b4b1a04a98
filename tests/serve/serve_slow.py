"""A LitAPI that takes its time, behind our predict loop, for tests: `python serve_slow.py PORT DRAIN_S`."""

from __future__ import annotations

import sys
import time

from litserve import LitAPI

import jaxml.serve
from jaxml.errors import JaxmlError


class Slow(LitAPI):
    """Answers after the seconds that were sent."""

    def predict(self, x):
        time.sleep(x["seconds"])
        return x


if __name__ == "__main__":
    try:
        sys.exit(jaxml.serve.app(Slow()).run(port=int(sys.argv[1]), drain_s=float(sys.argv[2])))
    except JaxmlError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
