"""Updates of flat arrays: each optimizer's rule, weights in one array, and norms that do not depend on sharding."""
