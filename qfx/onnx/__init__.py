"""Translations of the operators to ONNX, for `torch.onnx.export`."""
