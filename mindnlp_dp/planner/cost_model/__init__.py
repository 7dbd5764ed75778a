"""What a plan costs: sharding strategies of operators, memory, stages, and resharding between stages."""
