"""A decode step of a layer's cache: ring and pages written in place, and read, in one kernel."""
