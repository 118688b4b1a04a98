"""`jaxml prove`: the real recipes run on a small copy of an experiment, and what must be equal is compared."""
