"""Models: configuration, weights, tokenizers and the one decoder that runs them all."""
