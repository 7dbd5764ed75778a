"""The exchange of gradients: from every rank's own to the same weighted mean on all."""
