"""The parts of `lower_to_host`, each built on those before: dataflow, loops, placement; buffers; communication, transfers, reshards."""
