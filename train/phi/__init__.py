"""φ maps (``kvjax.policies.phi``), trained on traces by distillation of attention scores."""
