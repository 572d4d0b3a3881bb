"""One paper's laboratory each: what its numbers rest on, measured here; results go to ``results/<paper>``."""
