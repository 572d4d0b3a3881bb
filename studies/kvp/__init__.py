"""What learned rankers (KVP) rest on: cost per budget, transfer, ablations, the time that ranking takes."""
