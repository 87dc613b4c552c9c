"""Measured times on 8 H200 of one host in milliseconds, of the slowest rank. Comments mark times on fewer GPUs.

A key of three numbers is rows x inner dim x columns of a rank's matmul. GATHER, SCATTER and REDUCE have times of a collective of NCCL and a
matmul of cuBLAS, one after the other. A pipeline uses four streams. In each iteration, one group call of NCCL sends a shard and receives a
shard. Only one parameter of the cost model was fitted to these times: the slowdown of communication kernels during matmuls. This parameter
was fitted to the times of the pipelines.
"""

GATHER = {
    (8192, 8192, 7168): 1.607,
    (8192, 8192, 1280): 0.602,
    (8192, 4096, 3584): 0.517,
    (8192, 16384, 13312): 5.38,
    (2048, 8192, 7168): 0.451,
    (32768, 32768, 1024): 8.116,
    (32768, 16384, 8192): 15.17,
    (32768, 32768, 8192): 31.02,
    (8192, 8192, 8192): 1.857,
}
SCATTER = {
    (8192, 3584, 8192): 1.019,
    (8192, 1024, 8192): 0.580,
    (8192, 1792, 4096): 0.365,
    (8192, 6656, 16384): 3.055,
    (2048, 3584, 8192): 0.278,
}
REDUCE = {(8192, 3584, 8192): 1.339, (2048, 1024, 8192): 0.260, (128, 3584, 8192): 0.058}

PIPELINE = {2: 1.484, 8: 2.68}  # number of ranks -> milliseconds of a gather of 8192 x 8192, with a matmul with 7168 columns

# 2 H200, from docs/performance.md: number of chunks of the put loop that was chosen then (0 for no loop), milliseconds of this choice, and
# milliseconds of the sequential program.
GATHER_OF_TWO = {
    (8192, 8192, 7168): (2, 1.229, 1.511),
    (8192, 8192, 1280): (4, 0.278, 0.508),
    (8192, 4096, 3584): (2, 0.335, 0.464),
    (2048, 8192, 7168): (2, 0.348, 0.413),
    (512, 8192, 7168): (0, 0.127, 0.127),
    (128, 8192, 7168): (0, 0.057, 0.057),
    (16, 8192, 7168): (0, 0.050, 0.050),
}
SCATTER_OF_TWO = {
    (8192, 3584, 8192): (2, 0.673, 0.946),
    (8192, 1024, 8192): (8, 0.322, 0.508),
    (8192, 1792, 4096): (4, 0.211, 0.331),
    (2048, 3584, 8192): (2, 0.182, 0.254),
    (512, 3584, 8192): (0, 0.079, 0.079),
    (128, 3584, 8192): (0, 0.041, 0.041),
    (16, 3584, 8192): (0, 0.031, 0.031),
}
# 2 H200: number of tokens -> milliseconds of a sequence-parallel layer of Llama 3 70B, with the chosen loops
LAYER = {8192: 2.916, 2048: 0.815}
# 2 H200: milliseconds of 8 layers, with replicated weights ("layers") or sharded weights
WEIGHTS = {"layers": 3.35, "in sequence": 6.84, "by kernels": 5.11, "by copies": 3.74}
