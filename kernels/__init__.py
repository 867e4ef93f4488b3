"""Loop IR and kernels."""
