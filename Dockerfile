# Serves a model of your own images on a CPU, with a token for whoever asks:
#   docker build -t engram .
#   docker run --rm -p 8000:8000 -e ENGRAM_TOKEN=... -v "$PWD/model:/model" engram
FROM python:3.12-slim
RUN useradd --create-home engram
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir '.[serve]' && rm -rf /src/*
USER engram
WORKDIR /home/engram
EXPOSE 8000
ENTRYPOINT ["engram"]
CMD ["serve", "/model", "--host", "0.0.0.0", "--port", "8000", "--no-browser"]
