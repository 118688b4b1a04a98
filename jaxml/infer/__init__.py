"""From a checkpoint to tokens: cached decoding, sampling, scoring, evaluation, and the batching engine."""
