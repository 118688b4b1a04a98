"""Metrics sinks, progress display and reports. Reads events, never a train step."""
