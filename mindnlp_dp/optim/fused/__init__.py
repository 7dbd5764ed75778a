"""Updates of flat arrays: the rule of each optimizer, weights in one array, and norms that do not depend on sharding."""
