"""The only place where stages meet."""
