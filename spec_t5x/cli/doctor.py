"""``spec-t5x doctor``: what there is on this machine, what is missing, whether it would work."""

import argparse
import dataclasses
import json
from collections.abc import Iterator

HELP = "show devices, kernels, caches and versions, and what is missing"

_GIB, _MIB = 2**30, 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--json", action="store_true", help="one JSON object")
    text = "also decode a short text with the packaged pair"
    parser.add_argument("--try", action="store_true", dest="decode", help=text)


def run(args: argparse.Namespace) -> int:
    """Exit status 0 if ``generate`` would work, on the accelerator if there is one, else 1."""
    from spec_t5x.generation.installation import inspect

    found = inspect(args.decode)
    if args.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        from spec_t5x.labs.benchmark import results

        lines = list(_lines(found))
        columns = {"what": lambda line: line[0], "found": lambda line: line[1]}
        results.show(results.table(columns, lines), _verdict(found))
    return 1 if found.problems or found.accelerator else 0


def _verdict(found) -> str:
    if found.problems:
        return f"generate would not work: {'; '.join(found.problems)}."
    if found.accelerator:
        device = found.machine["platform"].upper()
        return f"generate works here, but on the {device} only: {found.accelerator}."
    if found.cpu_kernels and not found.cpu_kernels[0]:
        return f"generate works here, but slowly: {found.cpu_kernels[1]}."
    return "generate works here." if found.tried else "generate would work here."


def _lines(found) -> Iterator[tuple[str, str]]:
    from spec_t5x.cli.gin_files import GIN_ROOT

    installed = {name: version for name, version in found.versions.items() if version}
    yield "versions", ", ".join(f"{name} {version}" for name, version in installed.items())
    if machine := found.machine:
        count, name = machine["num_devices"], machine["device"]
        yield "devices", f"{count} x {name}, platform {machine['platform']}"
        yield "processor", f"{machine['processor']}, {machine['threads']} threads"
        host = machine["host_memory"]
        memory = f"{host['free'] / _GIB:.1f} of {host['total'] / _GIB:.1f} GiB free"
        if machine["platform"] != "cpu" and machine["free_memory"] is not None:
            memory += f", {machine['free_memory'] / _GIB:.1f} GiB free on the device"
        yield "memory", memory
    if found.cpu_kernels:
        used, why = found.cpu_kernels
        yield "CPU kernels", why if used else f"not used: {why}"
    for name, cache in found.caches.items():
        size = "empty" if cache.num_bytes is None else f"{cache.num_bytes / _MIB:.1f} MiB"
        locked = "" if cache.writable else ", cannot be written"
        yield f"cache: {name}", f"{size}{locked}, {cache.path}"
    yield "packaged models", ", ".join(found.packaged_models) or "none"
    yield "gin files", str(GIN_ROOT / "gin_configs")
    yield "not installed", "; ".join(found.missing) or "nothing"
    set_ = ", ".join(f"{name}={value}" for name, value in found.environment.items())
    yield "environment", set_ or "nothing that matters is set"
    if found.tried:
        tried = found.tried
        yield "tried", f"{tried['input']} -> {tried['output']}, in {tried['seconds']:.1f} s"
