"""From a data set to this rank's micro batches: in which order, in which sizes, read how."""
