"""Several devices: which ones, how arrays are cut over them, and what their processes must agree on.

mesh         ``Mesh``: devices in a grid of data x tensor x context; how every kind of array is cut
consistency  all processes were given the same arguments
head_order   KV heads in another order, so that devices hold about as much
all_heads    what a policy may ask about the KV heads on other devices
reshard      a state moved from one mesh to another

Why: kvjax/DESIGN.md, 14.
"""
