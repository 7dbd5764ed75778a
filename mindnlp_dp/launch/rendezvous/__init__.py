"""Let the launchers of several hosts meet at one endpoint, and follow the launcher there."""
