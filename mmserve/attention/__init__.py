"""Attention over the paged cache: the protocol, the registry of backends, and the torch reference."""
