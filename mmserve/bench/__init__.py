"""Benchmarks: this engine against transformers' own generate(), and the attention backends against each other."""
