"""Storage: how a paged slot is held."""
