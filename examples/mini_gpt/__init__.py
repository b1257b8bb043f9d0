"""MiniGPT: a small causal language model that learns arithmetic. See `train.py` and `generate.py`."""
