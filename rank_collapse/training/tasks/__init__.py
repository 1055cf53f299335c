"""The paper's trained tasks: data made on the device from a key, with their metrics."""
