"""The fixed-size summary that stands in for tokens a read leaves out (Top-K with φ completion)."""
