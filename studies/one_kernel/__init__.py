"""One decode kernel a layer, as a prototype: what it would save over the operations that a step calls now."""
