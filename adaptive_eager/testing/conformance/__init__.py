"""Tests of any PyTorch device: `pytest --pyargs adaptive_eager.testing.conformance --device=DEVICE`."""
