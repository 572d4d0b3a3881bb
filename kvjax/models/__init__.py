"""Models behind one seam: see ``decoder`` (the mathematics), ``spec`` (the sizes), ``hf`` (folders in HF format)."""
