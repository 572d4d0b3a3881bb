from tiny import quick_compiles  # noqa: F401
