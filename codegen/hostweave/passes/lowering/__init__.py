"""The parts of `lower_to_host`, in the order of their imports: dataflow, loops, placement; buffers; reshards."""
