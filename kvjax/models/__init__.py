"""Models that call one attention function.

``decoder`` is the mathematics, ``spec`` the sizes, ``hf`` reads and writes folders in HF format,
``module`` defines the same weights as a Flax NNX module.
"""
