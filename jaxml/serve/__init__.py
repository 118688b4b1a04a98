"""The LitServe endpoint: HTTP in front, the engine behind a unix socket."""
