"""Storage: how a slot of GLOBAL is held."""
