"""One file per method, found by discovery.

A method is a module with an ``EXAMPLES`` tuple of policies. Discovery gives it its names in the
one-string form, the conformance laws, its README row and its evaluation entry. Policies never import
each other: combinations are written where policies are used.
"""
