"""Storage: how a paged slot is stored."""
