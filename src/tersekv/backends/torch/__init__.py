"""The oracle: eager PyTorch in fp32, on any device, written to be read and believed."""
