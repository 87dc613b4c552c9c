"""Kernels as loops: index space, walks, distribution over threads, vector width and rows in registers, each decided by a pass."""
