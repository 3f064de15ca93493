"""What the site's tests need beside a browser: where it is, what goes wrong on a page, and a server."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SWITCH = "ZERO_FULL_NO_BROWSER"
HINT = (
    "the site's tests need Chromium and Playwright: `make browser` (on Debian, as root, it installs the "
    f"package chromium) and `pip install -e '.[dev]'`; or set {SWITCH}=1 to skip them"
)
SERVER = "http://127.0.0.1:"
Open = Callable[..., Any]


def program() -> str | None:
    """The browser, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def watch(page: Any, troubles: list[str]) -> None:
    """Write down what goes wrong on a page."""

    def note(what: str) -> None:
        troubles.append(f"{page.url}: {what}")

    def asked(request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:", SERVER)):
            note(f"asks for {request.url}")

    def failed(request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # we have gone to another page meanwhile
            note(f"{request.url} did not load: {request.failure}")

    page.on("console", lambda message: note(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: note(str(error)))
    page.on("requestfailed", failed)
    page.on("request", asked)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Nothing: pytest prints what matters."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A folder over HTTP, on a free port of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"{SERVER}{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
