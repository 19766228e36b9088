"""The stages of `examples/train_pair.py`, one file each."""
