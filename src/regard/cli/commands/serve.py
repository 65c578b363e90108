"""`regard serve`: the page of a folder of recordings, on this machine."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard._display.texts import language
from regard._display.texts import text as say
from regard.cli import options, terminal
from regard.cli.options import about

if TYPE_CHECKING:
    from regard._serve._folder import Folder
    from regard.recording import Recording


WORDS = {
    "serving": ("{address}  shows {folder}; Ctrl-C stops it", "{address}  显示 {folder} 中的记录；按 Ctrl-C 停止"),
    "stopped": ("stopped", "已停止"),
}


def serve(
    folder: Annotated[Path, typer.Argument(help="Folder with recordings; new recordings are saved there too.")] = Path(
        "."
    ),
    port: Annotated[int, about("Port on this machine (default: a free one).", show_default=False)] = 0,
    open_page: Annotated[bool, about("Open the page in the browser.", "--open")] = False,
    lang: Annotated[str, options.language("Language of the page: en or zh.")] = "en",
) -> None:
    """Show the recordings of a folder on a local page, and look at models on text typed there.

    Only this machine can reach it. Ctrl-C stops it.

    Examples:
      regard serve
      regard serve recordings --open
      regard serve recordings --port 8600 --lang zh
    """
    with terminal.one_line(ValueError, ImportError):
        language(lang)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
        if not 0 <= port < 65536:
            raise ValueError(f"--port is {port}; expected 1 to 65535, or 0 for a free one")
        try:
            import uvicorn

            from regard._serve import application
            from regard._serve._looks import Looks
        except ImportError:
            raise ImportError("the local page needs two packages: pip install starlette uvicorn") from None
        listener = _listen(port)
    port = listener.getsockname()[1]
    hosts = frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost"))
    app = application(folder, Looks(folder, Models()), hosts, lang)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))
    address = f"http://127.0.0.1:{port}/"
    typer.echo(say(WORDS, lang, "serving", address=address, folder=folder))
    if open_page:
        import webbrowser

        webbrowser.open(address)
    with _stopping(server):
        server.run(sockets=[listener])
    typer.echo(say(WORDS, lang, "stopped"))


def _listen(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("127.0.0.1", port))
        made.listen(128)  # whoever reads the address finds somebody there
    except OSError as error:
        made.close()
        raise ValueError(f"port {port} cannot be used ({error.strerror}); leave --port out for a free one") from None
    return made


@contextlib.contextmanager
def _stopping(server: Any) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the server and then the command, with status 0: that is how it is meant to end."""
    server.capture_signals = contextlib.nullcontext  # it would raise the signal again when it is done
    before = {name: signal.signal(name, server.handle_exit) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


class Models:
    """Models that are on this machine (packages, the folder, Hugging Face's cache), as `regard look` runs them."""

    def names(self, folder: Folder) -> list[str]:
        from importlib.util import find_spec

        from regard.cli.names import PACKAGED, cached

        packaged = [name for name, (_, module, _) in PACKAGED.items() if find_spec(module)]
        return list(dict.fromkeys([*packaged, *folder.models(), *cached()]))

    def load(self, name: str, folder: Folder) -> Any:
        from regard.cli.loading import load
        from regard.cli.names import PACKAGED, cached

        if name in PACKAGED:
            return load(name)
        return load(str(folder.root / name if name in folder.models() else cached()[name]))

    def layers(self, loaded: Any) -> int | None:
        config = loaded.model.config
        found = getattr(config, "num_hidden_layers", None)
        # a model of two parts attends in both, and from one to the other: how often is not known before
        return found if isinstance(found, int) and not getattr(config, "is_encoder_decoder", False) else None

    def run(self, loaded: Any, text: str, on_call: Callable[..., None], **watch: Any) -> Recording:
        from regard.cli import loading
        from regard.cli.commands.look import _want

        read = loading.read(loaded, text, False, None, None, 0)
        watch.setdefault("want", _want(read.ids.shape[1]))
        return loading.watched(loaded, loading.arguments(loaded, read), read, on_call=on_call, **watch)[0]
