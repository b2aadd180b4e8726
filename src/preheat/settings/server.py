"""Options of the HTTP server and of the images in its requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from preheat.options.options import option

_server = partial(option, group="Server")
_images = partial(option, group="Images")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Options of the group Server."""

    models: tuple[str, ...] = _server(
        (),
        "Several models behind one port, each as `NAME=PATH`: see docs/several-models.md. `--model NAME=PATH`, once "
        "for each model, does the same.",
    )
    model_options: dict[str, Any] | None = _server(  # noqa: RUF009 - None is not mutable
        None, "Options of each of several models: a JSON object from the model's name to an object of options."
    )
    host: str = _server("127.0.0.1", "Address to listen on.")
    port: int = _server(8000, "Port to listen on; 0 picks a free one.", low=0, high=65535)
    uds: str | None = _server(None, "Path of a Unix socket to listen on, instead of host and port.")
    root_path: str = _server("", "Path prefix of the server behind a proxy, such as `/llm`.")
    served_model_name: tuple[str, ...] | None = _server(
        None, "Names of the model for clients; answers give the first one.", default_text="the model"
    )
    api_key: tuple[str, ...] = _server(
        (), "Keys that clients may use; without any, no key is needed.", env="VLLM_API_KEY", secret=True, one_word=True
    )
    pods: tuple[str, ...] = _server(
        (), "URLs of the servers behind `preheat front`; a host with several addresses names several: docs/fleet.md."
    )
    allowed_origins: tuple[str, ...] = _server(("*",), "Origins of pages that may call from a browser (CORS).")
    allowed_methods: tuple[str, ...] = _server(("*",), "Methods that browsers may use from another origin (CORS).")
    allowed_headers: tuple[str, ...] = _server(("*",), "Headers that browsers may send from another origin (CORS).")
    allow_credentials: bool = _server(
        False,
        "Let browsers send credentials such as cookies from another origin; name that origin in `allowed_origins`.",
    )
    ssl_keyfile: str | None = _server(None, "Private key, to serve over TLS.", path="file")
    ssl_certfile: str | None = _server(None, "Certificate, to serve over TLS.", path="file")
    ssl_ca_certs: str | None = _server(
        None, "File of authorities for client certificates; clients are asked for one.", path="file"
    )
    ssl_cert_reqs: int | None = _server(
        None,
        "Check of client certificates, as in Python's `ssl`: 0 none, 1 if a client sends one, 2 required.",
        low=0,
        high=2,
        default_text="2 with `ssl_ca_certs`, else 0",
    )
    ssl_ciphers: str | None = _server(None, "Ciphers of TLS before 1.3, as OpenSSL lists them.")
    middleware: tuple[str, ...] = _server(
        (),
        "Your own ASGI middleware, as `module.NAME`: a class, or an `async def` that gets a request and the next "
        "handler. Its code is run.",
        one_word=True,
    )
    disable_fastapi_docs: bool = _server(False, "Do not serve `/openapi.json`, the description of the endpoints.")
    response_role: str = _server("assistant", "Role of the messages in chat answers.")
    enable_force_include_usage: bool = _server(
        False, "End each stream with its usage, as if `stream_options.include_usage` were true."
    )
    stream_interval: int = _server(
        1, "Tokens in each event of a stream, except the first and the last, unless a request sets it.", low=1
    )
    return_tokens_as_token_ids: bool = _server(
        False, "Show tokens in logprobs as `token_id:5`, for clients that need to tell tokens of equal text apart."
    )
    enable_responses_store: bool = _server(
        False,
        "Keep the last answers of `/v1/responses` in memory, for `previous_response_id` and for reading them again.",
        env="VLLM_ENABLE_RESPONSES_API_STORE",
    )
    batch_dir: str | None = _server(
        None,
        "Folder for the files and batches of `/v1/files` and `/v1/batches`: see docs/batches.md. Without it these "
        "endpoints are not served.",
        path="new folder",
    )
    max_batch_file_bytes: int = _server(200 * 2**20, "Maximum bytes of a batch's file.", low=1024)
    max_batch_files: int = _server(1000, "Maximum files kept, including the answers of batches.", low=3)
    max_batches: int = _server(8, "Maximum unfinished batches; beyond it, status 429.", low=1)
    request_fields: str = _server(
        "accept",
        "Handling of unknown fields in a request: `accept` ignores them and names them in the header "
        "`X-Ignored-Fields`; `strict` refuses the request.",
        choices=("accept", "strict"),
    )
    api: str = _server(
        "openai",
        "`ollama` also serves Ollama's API, for desktop tools: see docs/try-it.md.",
        choices=("openai", "ollama"),
    )
    ui: bool = _server(True, "Serve a page at `/` to try the model: see docs/try-it.md.")
    max_queued_requests: int = _server(
        20_000, "Maximum sequences waiting for the engine; beyond it, status 429.", low=1
    )
    max_concurrent_requests: int = _server(4096, "Maximum HTTP requests served at once; beyond it, status 429.", low=1)
    max_body_bytes: int = _server(16 * 2**20, "Maximum bytes in the body of an HTTP request.", low=1024)
    max_header_bytes: int = _server(2**16, "Maximum bytes in the headers of an HTTP request.", low=1024)
    timeout_headers: float = _server(
        10.0,
        "Time limit for the headers of an HTTP request to arrive, in seconds; then the connection closes.",
        low=0.1,
    )
    timeout_keep_alive: int = _server(
        5, "Seconds until an idle connection closes.", env="VLLM_HTTP_TIMEOUT_KEEP_ALIVE", low=1
    )
    shutdown_timeout: float = _server(
        30.0, "Seconds for running requests to finish after SIGTERM; then they end with an error.", low=0
    )
    engine_restarts: int = _server(
        10,
        "Restarts of an engine in ten minutes; its requests go on behind the tokens that their clients have. 0: an "
        "engine that ends stays away, and the last one ends the server.",
        low=0,
    )
    engine_restart_wait: float = _server(
        120.0,
        "Seconds that requests wait for an engine to start again while no other runs; then they end with an error.",
        low=0,
    )
    access_log: str = _server(
        "off", "Log each HTTP request after its answer, as text or as JSON.", choices=("text", "json", "off")
    )
    metrics_prefix: str = _server(
        "preheat", "Prefix of the metrics' names; `vllm` gives vLLM's names.", choices=("preheat", "vllm")
    )
    otlp_traces_endpoint: str | None = _server(
        None, "Address of an OpenTelemetry collector, to send it a span of each request: see docs/metrics.md."
    )
    otlp_traces_protocol: str = _server(
        "grpc", "Protocol for sending spans: `grpc` or `http/protobuf`.", env="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    )  # checked where spans are sent, as the variable may be meant for other programs
    collect_detailed_traces: str | None = _server(
        None,
        "Times of the engine's parts in spans.",
        choices=("model", "worker", "all"),
        later="a step computes many requests, and measuring its parts would hold it up",
    )
    server_dev_mode: bool = _server(
        False,
        "Serve an operator's endpoints, such as `/pause` and `/update_weights`: see docs/weight-updates.md. Needs "
        "`api_key`.",
        env="VLLM_SERVER_DEV_MODE",
    )
    weight_transfer_config: dict[str, Any] | None = _server(  # noqa: RUF009 - None is not mutable
        None,
        'Transfer of new weights from a trainer, as a JSON object like vLLM\'s: `{"backend": "nccl"}`, or `gloo`; see '
        "docs/weight-updates.md.",
    )
    weights_root: str | None = _server(
        None, "Folder for new weights that `/update_weights` may read, subfolders included.", path="folder"
    )


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Options of the group Images."""

    allowed_media_domains: tuple[str, ...] = _images(
        (), "Hosts, or `host:port`, of image URLs that are fetched; without any, only data URLs are read."
    )
    allowed_local_media_path: str | None = _images(
        None, "Folder for images with `file://` URLs, subfolders included.", path="folder"
    )
    image_fetch_timeout: float = _images(
        5.0, "Time limit for fetching an image, in seconds.", env="VLLM_IMAGE_FETCH_TIMEOUT", low=0.01
    )
    limit_mm_per_prompt: dict[str, Any] | None = _images(  # noqa: RUF009 - None is not mutable
        None, 'Maximum images in a prompt, as `{"image": 4}`.', default_text="as many as fit the model's length"
    )
    max_image_bytes: int = _images(20 * 2**20, "Maximum bytes of an image's file.", low=1)
    max_image_pixels: int = _images(2**25, "Maximum pixels of an image, both as sent and as resized.", low=1)
