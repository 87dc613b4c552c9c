# Hostweave with CUDA 13, cuDNN and NCCL:
#   docker build -t hostweave . && docker run --gpus all --ipc host -it hostweave hostweave demo
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/hostweave PATH=/opt/hostweave/bin:$PATH
RUN python3 -m venv $VIRTUAL_ENV
COPY . /src
# The image has the toolkit; NCCL for CUDA 13 comes from the wheel, in the version that programs are tested with.
RUN pip install --no-cache-dir '/src[cuda13,cudnn13]' && hostweave doctor --target cuda
# Compiling for CUDA needs no GPU. It fails if a header or library is missing.
RUN hostweave compile seeds:ag_matmul --target cuda && hostweave cache clear
# Compiled programs are kept in a volume.
ENV HOSTWEAVE_CACHE=/var/cache/hostweave
RUN mkdir -m 700 $HOSTWEAVE_CACHE
VOLUME /var/cache/hostweave
CMD ["hostweave", "doctor"]
