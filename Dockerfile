# A release in a container: on Hugging Face Jobs, on a cluster, or at home. docs/jobs.md has the commands.
# Everything is installed in the versions of constraints.txt. There is no ENTRYPOINT: some who run images put
# their words in its place, others behind it, and `pipeline …` is right for both.
FROM python:3.12-slim

# gcc: Triton compiles its launchers with it.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev git openssh-client \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /scalegate
COPY . .
RUN pip install --no-cache-dir torch -c constraints.txt \
    && pip install --no-cache-dir . -c constraints.txt

WORKDIR /data
CMD ["pipeline", "--help"]
