"""Run of ``spec-t5x reproduce``: from the names of the items to the files of the report."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_t5x.errors import InputError, as_input_error
from spec_t5x.inference.signals import Interrupted, stopping
from spec_t5x.labs.benchmark.reliability import caution
from spec_t5x.labs.reproduction import (
    acceptance_rates,
    closed_forms,
    curves,
    decodes,
    example_texts,
    kept_results,
    public,
    report,
    speed_ups,
)
from spec_t5x.labs.reproduction.contents import Exhibit, ReproduceOptions
from spec_t5x.labs.reproduction.kept_results import Results, reason
from spec_t5x.machine.atomic import check_can_be_made, remove_unfinished

log = logging.getLogger(__name__)

ALL = "all"
# The item that "all" excludes, since its models are downloaded.
PUBLIC = "public"

# In the paper's order.
ITEMS: dict[str, Exhibit] = {
    "table1": closed_forms.TABLE_1,
    "table2": speed_ups.TABLE_2,
    "table3": acceptance_rates.TABLE_3,
    "table4": closed_forms.TABLE_4,
    "table5": acceptance_rates.TABLE_5,
    "figure1": decodes.FIGURE_1,
    "figure2": curves.FIGURE_2,
    "figure3": curves.FIGURE_3,
    "figure4": curves.FIGURE_4,
    "figure5": decodes.FIGURE_5,
    "factors": closed_forms.FACTORS,
    PUBLIC: public.PUBLIC,
}


def select(names: Sequence[str]) -> dict[str, Exhibit]:
    """Returns the items of the given names, in the report's order; "all" is all but "public".

    Raises:
      InputError: no item has the name.
    """
    for name in names:
        if name not in (*ITEMS, ALL):
            raise InputError(f"no item {name!r}: give {ALL}, or some of {', '.join(ITEMS)}")
    return {
        name: item
        for name, item in ITEMS.items()
        if name in names or (ALL in names and name != PUBLIC)
    }


def reproduce(items: dict[str, Exhibit], options: ReproduceOptions, output: Path) -> int:
    """Measures what ``output`` does not hold yet, and writes the report there.

    Args:
      items: as ``select`` returns them.
      options: settings of the run.
      output: a directory, made if there is none; ``output/cache`` holds results.

    Returns:
      The exit status: 0, or 1 if an item could not be computed, with the reason in the report;
      after a signal 128 plus its number, with the finished measurements kept.

    Raises:
      InputError: ``output`` cannot be written, ``options.data_dir`` lacks files, or an item's
        check fails.
    """
    example_texts.check(options.data_dir)
    given = ["pairs"] if options.pairs else options.built_in
    if given and PUBLIC not in items:
        raise InputError(f"--{given[0]} is for the item {PUBLIC}: name it, or leave it out")
    # Before the items' models are downloaded.
    check_can_be_made(output)
    for item in items.values():
        item.check(options)
    remedy = "give another, or check its space and permissions"
    try:
        with as_input_error(f"cannot write to --output {output}", remedy, OSError):
            output.mkdir(parents=True, exist_ok=True)
            # Fails now rather than after hours of work, if the output cannot be written.
            (output / ".probe").touch()
            (output / ".probe").unlink()
            with stopping():
                return _reproduce(items, options, output)
    except Interrupted as signal:
        log.error(
            f"stopped by {signal}: what was finished is kept in {output / 'cache'}, and the same "
            "command resumes from there"
        )
        return 128 + signal.number


def _reproduce(items: dict[str, Exhibit], options: ReproduceOptions, output: Path) -> int:
    # Files that a killed run was writing.
    remove_unfinished(output / "cache")
    origin = kept_results.origin(options)
    results = Results(output / "cache", origin)
    sections = [_section(name, item, options, results) for name, item in items.items()]
    report.write(output, sections, origin)
    for section in sections:
        for problem in section["not_computed"]:
            log.error(f"{section['name']} not computed: {problem}")
    measured = [one["result"] for one in results.found.values()]
    rows = [row for one in measured for row in one.get("rows", one.get("runs", []))]
    if doubts := caution([row for row in rows if "beside" in row]):
        log.warning(f"{doubts} Results are kept in {output}: give another --output")
    log.info(f"the report is {output / 'report.html'}")
    return 1 if any(section["not_computed"] for section in sections) else 0


def _section(
    name: str, item: Exhibit, options: ReproduceOptions, results: Results
) -> dict[str, Any]:
    """Returns an item's section for ``report.write``; the item's errors are ``not_computed``."""
    results.asked.clear()
    content, problems = [], []
    try:
        content = item.content(options, results)
    except OSError:
        raise
    except Exception as error:
        problems = [reason(error)]
    asked, found, failed = list(results.asked), results.found, results.failed
    lost = [f"{part}: {failed[part]}" for part in asked if part in failed and part not in found]
    return {
        "name": name,
        "title": item.title,
        "content": content,
        "not_computed": lost + problems,
        "measured": {part: found[part] for part in asked if part in found},
    }
