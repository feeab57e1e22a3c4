# covey with a CPU's torch, or with CUDA's; the second runs on a machine with NVIDIA's container toolkit.
#
#   docker build -t covey .
#   docker build -t covey:cuda --build-arg TORCH=https://download.pytorch.org/whl/cu126 .
#   docker run --rm -v "$PWD:/work" covey train run.yaml
#   docker run --rm --gpus all -v "$PWD:/work" covey:cuda train run.yaml
FROM python:3.11-slim

# gcc compiles the operations for the processor at hand, and torch's on a GPU; bubblewrap is the stronger sandbox.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev bubblewrap && rm -rf /var/lib/apt/lists/*

ARG TORCH=https://download.pytorch.org/whl/cpu
COPY constraints.txt /covey/
RUN pip install --no-cache-dir --index-url "$TORCH" --extra-index-url https://pypi.org/simple \
    "$(grep '^torch==' /covey/constraints.txt)"

COPY . /covey
RUN pip install --no-cache-dir -c /covey/constraints.txt /covey/packages/verify '/covey[gguf,lora,math,parquet,schema]'

# A user without rights, whose runs and caches are in the mounted folder.
RUN useradd --create-home covey
USER covey
WORKDIR /work
ENTRYPOINT ["covey"]
CMD ["--help"]
