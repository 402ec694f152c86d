"""`engram serve`: a page and an API for models."""

from __future__ import annotations

import json
import os
import sys
import threading
import webbrowser
from collections.abc import Sequence
from importlib.util import find_spec

from engram.cli.commands.model_common import check_new_model, config_arguments, prepare_hardware
from engram.cli.options.models import Serve
from engram.cli.streams import tell
from engram.cli.text import make_console, print_line
from engram.core.errors import EngramError
from engram.core.io import typed_path
from engram.models.store.writer import refuse_other_directory

NEEDED = ("fastapi", "uvicorn", "httptools", "python_multipart")
TOKEN = "ENGRAM_TOKEN"  # variable


def serve_command(options: Serve, _: Sequence[str]) -> int:
    """Carry out `engram serve`; return the exit status."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        names = " and ".join(name.replace("_", "-") for name in missing)
        raise EngramError(f"{names} must be installed for this: pip install '.[serve]' in the checkout of engram")
    if not 0 <= options.port <= 65_535:
        raise EngramError(f"--port must be 0 to 65535, got {options.port}")
    if options.checkpoint_minutes < 0:
        raise EngramError(f"--checkpoint-minutes must be 0 or more, got {options.checkpoint_minutes:g}")
    paths = [typed_path(text) for text in options.models]
    for path in paths:
        refuse_other_directory(path)
    if len({path.resolve() for path in paths}) < len(paths):
        raise EngramError("a model was given twice; give each once")
    check_new_model(options.new_model)
    if options.new_model.from_ is not None:
        raise EngramError("--from needs images to learn; make the model by 'engram learn MODEL IMAGES --from RUN'")
    prepare_hardware(options.hardware)
    from engram.serve.children import ChildOptions
    from engram.serve.server import ModelServer, ServerOptions

    child = ChildOptions(
        options.hardware.device,
        options.hardware.threads,
        options.checkpoint_minutes,
        config_arguments(options.new_model, is_new=True),
    )
    token = options.token or os.environ.get(TOKEN) or None
    server = ModelServer(paths, ServerOptions(options.host, options.port, token, options.allow_host, child))
    page = server.address if server.token is None else f"{server.address}#token={server.token}"
    console = make_console()

    def ready() -> None:
        if options.json:
            print_line(console, json.dumps({"address": server.address, "token": server.token, "pid": os.getpid()}))
        else:
            print_line(console, f"serving {', '.join(map(str, paths))} at {page}", "bold")
            print_line(console, f"the API is described at {server.address}api/v1/openapi.json; Ctrl-C ends the server")
        sys.stdout.flush()
        if not options.no_browser:
            threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()

    try:
        server.run(ready)
    except KeyboardInterrupt:
        tell("ended")
    return 0
