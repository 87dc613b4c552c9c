"""Kernels as loops. Passes choose the index space, the loop nests over the reduced dims (walks), the distribution over threads, the vector
width, and the rows that threads hold in registers."""
