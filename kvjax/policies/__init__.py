"""One file per method, found by discovery.

A method is a module with ``EXAMPLES``, a tuple of policies. Discovery adds it to the one-string form, the
conformance laws, README's table and the evaluation. Policies never import each other: combinations are
written where policies are used.
"""
