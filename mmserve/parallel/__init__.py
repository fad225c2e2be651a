"""One model over several processes: groups of ranks, sharded layers, pipeline stages, and the workers that run them."""
