"""Training programs: run them from a checkout, ``python -m train.NAME``; they are not in the wheel."""
