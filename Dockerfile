# covey with a CPU's torch, or with CUDA's; the second runs on a machine with NVIDIA's container toolkit.
#
#   docker build -t covey .
#   docker build -t covey:cuda --build-arg TORCH=https://download.pytorch.org/whl/cu126 .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" covey train run.yaml
#   docker run --rm --user "$(id -u):$(id -g)" --gpus all -v "$PWD:/work" covey:cuda train run.yaml
FROM python:3.11-slim

# gcc compiles the operations for the processor at hand, and torch's on a GPU; bubblewrap is the stronger sandbox.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev bubblewrap && rm -rf /var/lib/apt/lists/*

ARG TORCH=https://download.pytorch.org/whl/cpu
COPY constraints.txt /covey/
RUN pip install --no-cache-dir --index-url "$TORCH" --extra-index-url https://pypi.org/simple \
    "$(grep '^torch==' /covey/constraints.txt)"

COPY . /covey
RUN pip install --no-cache-dir -c /covey/constraints.txt /covey/packages/verify '/covey[gguf,lora,math,parquet,schema]'

# A user without rights; --user makes it the owner of the mounted folder, which gets the runs and the caches.
# USER names it for libraries that ask, because such a user is not in /etc/passwd.
RUN useradd covey
USER covey
ENV HOME=/work USER=covey
WORKDIR /work
ENTRYPOINT ["covey"]
CMD ["--help"]
