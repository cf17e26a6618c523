# A release in a container: on Hugging Face Jobs, on a cluster, or at home. docs/publishing.md has the commands.
# Everything is installed in the versions of constraints.txt. There is no ENTRYPOINT: some who run images put
# their words in its place, others behind it, and `pipeline …` is right for both.
FROM python:3.12-slim

# gcc: Triton compiles its launchers with it.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev git openssh-client \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /scalegate
COPY . .
# An image for GPUs is mostly built where there is none. For CPUs alone: docker build --build-arg TORCH=cpu
ARG TORCH=cuda
ENV PIP_NO_CACHE_DIR=1
RUN ./install_torch.sh python constraints.txt "$TORCH" && pip install . -c constraints.txt

WORKDIR /data
CMD ["pipeline", "--help"]
