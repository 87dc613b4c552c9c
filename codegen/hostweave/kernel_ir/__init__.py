"""Kernels as loops. Passes decide the index space, the walks over the reduced dims, the distribution over threads, the vector width, and
the rows to hold in registers."""
