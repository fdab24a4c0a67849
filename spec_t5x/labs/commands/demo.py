"""``spec-t5x demo``: a page on which plain and speculative decoding race."""

import argparse
import socket
import threading

from spec_t5x.cli import settings
from spec_t5x.errors import InputError, as_input_error, check_unused
from spec_t5x.names import AUTO, NO_DRAFT
from spec_t5x.options import GenerateOptions

HELP = "serve a web page that shows plain and speculative decoding side by side"

# Gamma, if none was given: a fixed one proposes tokens in every iteration, so that the page shows
# the draft at work.
_GAMMA = 4
# Names of this machine, and of Colab's proxy. By another name of 127.0.0.1, a page of that name's
# owner could read this one (DNS rebinding).
_OF_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_PROXIES = ("*.googleusercontent.com", "*.prod.colab.dev")
_PAGE = {
    "host": ("ADDRESS", "address to serve at; 0.0.0.0 lets in other machines (default: 127.0.0.1)"),
    "port": (int, "port to serve at (default: 7860)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags. A flag that is left out takes its value from gin."""
    settings.add_flags(parser.add_argument_group("page"), _PAGE)
    kind, text = settings.flags_of(GenerateOptions, "gamma")["gamma"]
    gamma = kind, text.replace(f"default: {AUTO}", f"default: {_GAMMA}")
    settings.add_arguments(parser, gamma=gamma)


def run(args: argparse.Namespace) -> int:
    """Serves the page until Ctrl-C; returns 0."""
    from spec_t5x.generation import Generator
    from spec_t5x.labs import demo
    from spec_t5x.machine.compilation_cache import enable

    models, options = settings.read(args, gamma=_GAMMA)
    if models.draft == NO_DRAFT:
        raise InputError(f"the page compares with a draft and --draft is {NO_DRAFT}: give one")
    host, port = args.host or "127.0.0.1", 7860 if args.port is None else args.port
    if not 0 <= port <= 65535:
        raise InputError(f"port is {port}: give one from 0 to 65535")
    # Before models are loaded.
    cannot, remedy = f"port is {port} and cannot be used at {host}", "give another port or host"
    name, is_ipv6 = host.strip("[]"), ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    unusable = as_input_error(cannot, remedy, OSError, UnicodeError)
    with unusable, socket.create_server((name, port), family=family) as free:
        port = free.getsockname()[1]
    demo.check_installed()
    check_unused(options, "the page streams one text of each", "num_decodes", "beams")
    enable()
    own, name = models != type(models)(), f"{models.target}, {models.draft_name()}"
    target, _ = Generator.open(models, [models.draft_name()], options)
    page = demo.page({name: Generator.load_named(models, target)} if own else {}, options)
    del target  # It may hold all weights of an old file.
    quietly = {"quiet": True, "footer_links": [], "prevent_thread_lock": True}
    # The page has no use for files, which any site that a browser shows could send to gradio.
    here = {"server_name": f"[{name}]" if is_ipv6 else host, "server_port": port}
    here |= {"share": False, "max_file_size": 0}
    if here["server_name"] in _OF_LOOPBACK:
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware

        known = Middleware(TrustedHostMiddleware, allowed_hosts=[*_OF_LOOPBACK, *_PROXIES])
        here["app_kwargs"] = {"middleware": [known]}
    with as_input_error(cannot, remedy, OSError):
        _, address, _ = page.launch(**here, **quietly)
    print(address, flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        page.close(verbose=False)
    return 0
